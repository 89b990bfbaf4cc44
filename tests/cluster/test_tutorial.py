# SPDX-License-Identifier: Apache-2.0
"""The tutorial for several machines, followed on four nodes: each command where its first line says that it runs."""

import re
import sys

import pytest

from tests.cluster.nodes import Nodes, finished, kill
from tests.docs.pages import blocks

pytestmark = pytest.mark.timeout(500)
NODES = [f"node{number}" for number in range(1, 5)]
EVERYWHERE = "every machine"


@pytest.fixture
def nodes(tmp_path):
    addresses = {name: f"10.91.0.{number}" for number, name in enumerate(NODES, 1)}
    hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
    with Nodes(tmp_path, {name: {"eth0": address} for name, address in addresses.items()}, lambda _: hosts) as found:
        yield found


def steps():
    """Return the commands of the page in order: where each runs, whether in the background, and the command."""
    found = []
    for block in blocks("sh"):
        if block.place.startswith("docs/several-machines.md:"):
            where, _, command = block.text.partition("\n")
            places, background = re.fullmatch(r"# on (every machine|node\d)(, in the background)?", where).groups()
            found.append((places, bool(background), command.replace("\\\n", " ").strip()))
    return found


def test_the_tutorial_works_when_followed_in_order(nodes):
    pytest.importorskip("sklearn")
    said, background = {}, []
    try:
        for where, goes_on, command in steps():
            if command.startswith("pip install"):
                continue  # done before the tests
            shell = re.sub(r"^dlcp ", f"{sys.executable} -m dlcp.cli ", command)
            shell = shell.replace("job.secret", str(nodes.folder / "job.secret"))
            started = [
                nodes.popen(name, ["sh", "-c", shell], OMP_NUM_THREADS="1")
                for name in (NODES if where == EVERYWHERE else [where])
            ]
            if goes_on:
                background += started
            else:
                said[" ".join(command.split()[:3])] = "".join(finished(started, 200))
    finally:
        for process in background:
            kill(process)
    assert "round trip" in said["dlcp doctor --peer"]
    assert said["dlcp train --nnodes"].count("55 steps, 1 of 4 ranks, those of this machine") == 4
    assert said["dlcp train --nnodes"].count("fallback           none") == 4
    verdicts = re.findall(r"  (DLCP can gain .*|Steps .*)", said["dlcp doctor --nnodes"])
    assert (len(verdicts), len(set(verdicts))) == (4, 1)
    secret = nodes.folder / "job.secret"
    assert (secret.stat().st_mode & 0o077, len(secret.read_text()) > 32) == (0, True)
