# SPDX-License-Identifier: Apache-2.0
"""Run the commands of the testbed's page in order, and compare their output with the output that it shows."""

import os
import re
import shutil
import signal
import subprocess

import pytest

from tests.docs.pages import ROOT, blocks

DEADLINE_S = 900
PAGE = [block for block in blocks("sh", "text") if block.place.startswith("docs/testbed.md:")]


def as_pattern(shown):
    """Return a pattern for a line of the page, whose numbers may be others, and its spaces more or fewer."""
    return re.sub(r"(\\ )+", r"\\s+", re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(shown.strip())))


@pytest.mark.timeout(4 * DEADLINE_S)
def test_the_commands_of_the_page_in_their_order(needs, tmp_path):
    needs("builtin")
    said = ""
    try:
        for block in PAGE:
            if block.language == "text":
                for line in block.text.splitlines():
                    assert re.search(as_pattern(line), said), f"{block.place}: {line!r} is not in:\n{said}"
                continue
            if "apt-get" in block.text or ("bmv2" in block.text and not shutil.which("simple_switch_grpc")):
                continue
            # Two steps are enough to see that a training runs; what it prints is the demo's matter.
            text = re.sub(r"(testbed run.*)", rf"\1 --steps 2 --out {tmp_path}", block.text)
            # There the status must say that packets are lost.
            text = text.replace("# loses packets", "&& exit 1 || [ $? = 1 ]")
            said = run(f'set -e; sudo() {{ "$@"; }}\n{text}\nwait', tmp_path / "log", block.place)
    finally:
        subprocess.run([ROOT / ".venv/bin/dlcp", "testbed", "down"], timeout=100)


def run(script, log, place):
    """Return what a script prints."""
    with log.open("w") as out:
        shell = subprocess.Popen(["bash", "-c", script], cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        try:
            status = shell.wait(DEADLINE_S)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGTERM)
    said = log.read_text()
    assert status == 0, f"{place}:\n{said}"
    return said
