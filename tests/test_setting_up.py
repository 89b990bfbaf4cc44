# SPDX-License-Identifier: Apache-2.0
"""The effects of `make` and `pip` on a system: they announce what they install, and change nothing else."""

import json
import os
import pty
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

import dlcp

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / ".ci" / "packages"


@pytest.fixture
def system(tmp_path):
    """Call ``.ci/packages`` on a system that has only apt-get; return its output and its calls of apt-get."""
    asked = tmp_path / "asked"

    def program(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    # Says so on the same stream as the script, so that the order of both is seen.
    program("apt-get", f'echo "apt-get $*" >> {asked}; echo "apt-get runs" > /proc/$PPID/fd/2; [[ $* != *mininet* ]]')

    def call(*programs, user=0, typed="", **environment):
        program("id", f"echo {user}")
        asked.unlink(missing_ok=True)
        terminal, stdin = pty.openpty() if typed else (None, subprocess.DEVNULL)
        if terminal is not None:
            os.write(terminal, typed.encode())
        done = subprocess.run(
            ["/bin/bash", str(PACKAGES), *programs],
            env={"PATH": str(tmp_path), **environment},
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        for opened in [] if terminal is None else [terminal, stdin]:
            os.close(opened)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        return done.stderr, asked.read_text() if asked.exists() else ""

    return call


def test_what_will_be_installed_and_why_is_said_before(system):
    said, asked = system("ip", "tshark", DLCP_APT="1")
    before, _, _ = said.partition("apt-get runs")
    assert "ip is missing: builds the networks" in before
    assert "tshark is missing: reads packets" in before
    assert "installing iproute2 tshark with apt-get, as root; DLCP_NO_APT=1 in the environment leaves" in before
    assert "install -y -qq --no-install-recommends iproute2\n" in asked
    assert "install -y -qq --no-install-recommends tshark\n" in asked


def test_with_nobody_to_ask_what_one_can_do_without_is_left_out(system):
    said, asked = system("ip", "tshark")
    assert "installing iproute2 with apt-get" in said
    assert "going on without tshark" in said
    assert "tshark" not in asked


@pytest.mark.parametrize(("answer", "installs"), [("\n", True), ("y\n", True), ("n\n", False), ("what?\n", False)])
def test_whoever_sits_at_a_terminal_is_asked(system, answer, installs):
    said, asked = system("ip", "tshark", typed=answer)
    assert "install iproute2 tshark with apt-get, as root? [Y/n]" in said
    assert ("install -y" in asked) == installs
    assert "going on without ip" in said


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
        assert "apt-get install -" not in (ROOT / name).read_text()
    assert os.access(PACKAGES, os.X_OK)


@pytest.mark.parametrize("status", [0, 2])
def test_continuous_integration_says_at_its_end_what_was_skipped(tmp_path, status):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    make = tmp_path / "make"
    make.write_text(f"#!/bin/sh\necho 'SKIPPED [2] tests/test_x.py:3: no tool'\necho 9 passed\nexit {status}\n")
    make.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DLCP_NO_APT": "1"}
    done = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == status
    skipped = "SKIPPED [2] tests/test_x.py:3: no tool\n"
    assert done.stdout == f"{skipped}9 passed\nSkipped, and why:\n{skipped}"


def test_nothing_is_set_up_without_a_compiler(tmp_path):
    programs, folder = tmp_path / "bin", tmp_path / "venv"
    programs.mkdir()
    for name in ("bash", "dirname", "env", "id"):
        (programs / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["/bin/bash", ROOT / ".ci" / "set-up", folder, sys.executable],
        env={"PATH": str(programs), "DLCP_NO_APT": "1", "CC": "gcc"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "gcc is missing: compiles DLCP's engine" in done.stderr
    assert "DLCP needs a C compiler and the C library's headers, and gcc is missing" in done.stderr
    assert "apt-get install build-essential" in done.stderr
    assert not folder.exists()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """DLCP's sources, where nothing has been built."""
    pytest.importorskip("setuptools", minversion="77", reason="building takes setuptools 77")
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "data")
    for name in ("dlcp", "controller", "sim", "p4", "docs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def test_without_a_compiler_the_installation_fails_and_says_what_to_do(source, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    environment = {**os.environ, "CC": "gcc", "PATH": str(tmp_path)}
    done = subprocess.run(
        [*pip, "--target", tmp_path / "target", source], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 1
    (said,) = (line.strip() for line in done.stderr.splitlines() if "error: DLCP" in line)
    assert "(Debian and Ubuntu: apt-get install build-essential python3-dev) and run pip again" in said
    assert "or install a wheel that `make dist` has built" in said
    assert not (tmp_path / "target").exists()


@pytest.fixture(scope="module")
def bystanders(source, tmp_path_factory):
    """An environment with DLCP and, installed before it, other packages called ``sim`` and ``controller``."""
    folder = tmp_path_factory.mktemp("bystanders")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    for name in ("sim", "controller"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("OWNER = 'somebody else'\n")
    # What DLCP and its build need comes from where this environment has it, but DLCP itself does not.
    found = {str(Path(find_spec(name).origin).parents[1]) for name in ("pip", "setuptools", "numpy")}
    (packages / "environment.pth").write_text("\n".join(sorted(found)))
    pip = [python, "-m", "pip"]
    frugal = ["--quiet", "--no-deps", "--no-index"]
    build = [*pip, "wheel", *frugal, "--no-build-isolation", "--wheel-dir", folder, source]
    done = subprocess.run(build, capture_output=True, text=True, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    # From here on there is no compiler: of programs, only those of the environment itself are found.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "CC")}
    environment["PATH"] = str(python.parent)
    done = subprocess.run(
        [*pip, "install", *frugal, "--ignore-installed", wheel],
        capture_output=True, text=True, timeout=200, cwd=folder, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def run(*words):
        return subprocess.run(
            [str(folder / "venv" / "bin" / words[0]), *words[1:]],
            capture_output=True, text=True, timeout=100, cwd=folder, env=environment,
        )  # fmt: skip

    return packages, run


def test_an_installation_overwrites_nobodys_packages(bystanders):
    packages, run = bystanders
    for name in ("sim", "controller"):
        assert [path.name for path in (packages / name).iterdir() if path.name != "__pycache__"] == ["__init__.py"]
        assert run("python", "-c", f"import {name}; print({name}.OWNER)").stdout == "somebody else\n"
    assert not {"tests", "p4", "docs"} & {path.name for path in packages.iterdir()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--version"], dlcp.__version__),
        (["sim", "--help"], "usage: dlcp sim"),
        (["fabric", "--help"], "usage: dlcp fabric"),
        (["testbed", "--help"], "usage: dlcp testbed"),
    ],
)
def test_commands_work_once_installed(bystanders, words, expected):
    _, run = bystanders
    done = run("dlcp", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout


def test_the_compiled_program_and_the_library_are_installed(bystanders):
    packages, run = bystanders
    code = (
        "import dlcp.native, dlcp.switch as switch;"
        "program = switch.Program.load(switch.PROGRAM_FOLDER / 'dlcp.json');"
        "print(dlcp.native.LIBRARY, switch.PROGRAM_FOLDER, len(program.tables))"
    )
    done = run("python", "-c", code)
    assert done.returncode == 0, done.stderr
    library, folder, tables = done.stdout.split()
    assert Path(library).is_relative_to(packages)
    assert Path(folder).is_relative_to(packages)
    assert int(tables) > 5


LINE_FIT = """
import os

import numpy as np
import dlcp.session

with dlcp.session.join() as group:
    values = np.random.default_rng(group.rank).normal(size=(64, 3))
    wanted, weights = values @ [1.0, -2.0, 3.0], np.zeros(3)
    group.register(["weights"])
    for _ in range(60):
        gradient = values.T @ (values @ weights - wanted) / len(values)
        group.average({"weights": gradient})
        weights -= 0.3 * gradient
    error = abs(weights - [1, -2, 3]).max()
    words = f"rank {group.rank} {group.active} {error < 1e-3}"
    os.write(1, f"{words}\\n".encode())  # at once, for both ranks write there
"""


def test_a_wheel_trains_where_there_is_no_compiler(bystanders):
    packages, run = bystanders
    diagnoses = json.loads(run("dlcp", "doctor", "--json").stdout)
    assert f"{packages}/dlcp/native/_native.abi3.so" in json.dumps(diagnoses)
    done = run("dlcp", "launch", "-n", "2", "--", "python", "-c", LINE_FIT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} True True" for rank in range(2)]


def test_dlcp_does_not_take_what_says_what_to_install_for_its_own_options():
    recipes = [part for part in (ROOT / "Makefile").read_text().split("\n\n") if ".ci/packages ip" in part]
    assert len(recipes) >= 2
    assert [recipe for recipe in recipes if "$(UNSET); " not in recipe] == []
    done = subprocess.run(
        ["make", "--no-print-directory", "--eval", "show: ; @$(UNSET); env", "show"],
        cwd=ROOT,
        env=os.environ | {"DLCP_APT": "1", "DLCP_NO_APT": "1", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "_APT=" not in done.stdout
    assert "PATH=" in done.stdout
