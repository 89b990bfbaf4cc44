# SPDX-License-Identifier: Apache-2.0
"""What `make` does to the system: it says what it installs before it does, and leaves it alone if told to."""

import os
import subprocess
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / ".ci" / "packages"


@pytest.fixture
def system(tmp_path):
    """Call ``.ci/packages`` on a system that has only apt-get; return what it said and what apt-get was asked."""
    asked = tmp_path / "asked"

    def program(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    # Says so on the same stream as the script, so that the order of both is seen.
    program("apt-get", f'echo "apt-get $*" >> {asked}; echo "apt-get runs" > /proc/$PPID/fd/2; [[ $* != *mininet* ]]')

    def call(*programs, user=0, **environment):
        program("id", f"echo {user}")
        asked.unlink(missing_ok=True)
        done = subprocess.run(
            ["/bin/bash", str(PACKAGES), *programs],
            env={"PATH": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        return done.stderr, asked.read_text() if asked.exists() else ""

    return call


def test_what_will_be_installed_and_why_is_said_before(system):
    said, asked = system("ip", "tshark")
    before, _, _ = said.partition("apt-get runs")
    assert "ip is missing: builds the networks" in before
    assert "tshark is missing: reads packets" in before
    assert "installing iproute2 tshark with apt-get, as root; DLCP_NO_APT=1 in the environment leaves" in before
    assert "install -y -qq --no-install-recommends iproute2\n" in asked
    assert "install -y -qq --no-install-recommends tshark\n" in asked


def test_a_variable_leaves_the_system_as_it_is(system):
    said, asked = system("ip", DLCP_NO_APT="1")
    assert asked == ""
    assert "apt-get does not install iproute2" in said
    assert "going on without ip" in said


def test_only_root_installs(system):
    said, asked = system("ip", user=1000)
    assert asked == ""
    assert "going on without ip" in said


def test_what_cannot_be_installed_stops_nothing(system):
    said, asked = system("mnexec", "ip")
    assert "apt-get could not install mininet" in said
    assert asked.endswith("iproute2\n")


def test_a_system_that_has_everything_is_left_alone(system):
    assert system("id", "apt-get") == ("", "")


def test_whoever_sets_up_or_runs_uses_this_script_alone():
    for name in (".ci/set-up", ".ci/set-up-framework", "Makefile"):
        assert "apt-get install -" not in (PACKAGES.parents[1] / name).read_text()
    assert os.access(PACKAGES, os.X_OK)
