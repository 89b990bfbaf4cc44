# SPDX-License-Identifier: Apache-2.0
"""Ranks of some framework as processes of their own, behind the built-in switch or not; no way to hang."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from dlcp.session import Options
from tests.transport.free_ports import free_port

LIMIT_S = 1200
READY_LIMIT_S = 200
PAYLOAD_BYTES = 1440
LOSS = 0.01
"""Of each port of the switch: narrow queues alone lose nothing where ranks are slow."""
PATIENT = {"DLCP_SILENCE_S": "60", "DLCP_DEADLINE_S": "240", "DLCP_MEET_S": "240"}
"""A busy machine is no dead one."""
SEEDS = (1, 2, 3)
LEARNT = 0.95
HALF_A_POINT = 0.005
"""Between means over the seeds: what is lost moves one training by up to three of the 600 test images, either way."""
ROOT = Path(__file__).parents[2]
OWN = ROOT / ".venv" / "bin" / "python"
"""The environment that DLCP has for itself, with what the switch needs: a framework's environment need not have it."""


@dataclass(frozen=True)
class Ended:
    """How a rank has ended: its exit status, what it printed last as JSON (None if that is not), and all it said."""

    status: int
    result: dict | None
    output: str
    seconds: float


@contextmanager
def switch(folder, udp_port, *, hosts=2, rate_bps, depth_packets):
    """The built-in switch, with narrow ports that lose packets; gives the environment of each rank behind it."""
    fabric = Path(folder) / "star.json"
    star = {"hosts": hosts, "udp_ports": [udp_port], "queueing": {"loss": LOSS}}
    fabric.write_text(json.dumps(star))
    python = OWN if OWN.exists() else sys.executable
    command = [str(python), "-m", "dlcp.cli", "switch", "--fabric", str(fabric)]
    command += ["--rate-bps", str(rate_bps), "--depth-packets", str(depth_packets)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert select.select([process.stdout], [], [], READY_LIMIT_S)[0], "the switch does not begin"
            assert process.stdout.readline(), "the switch has ended"
            yield [
                {
                    "DLCP_BIND": f"127.77.1.{rank + 1}:{udp_port}",
                    "DLCP_ADVERTISE": f"127.77.0.{rank + 1}:{udp_port}",
                    "DLCP_PAYLOAD_BYTES": str(PAYLOAD_BYTES),
                }
                for rank in range(hosts)
            ]
        finally:
            process.terminate()
            process.wait(30)


def run_ranks(
    module, *arguments, count=2, environments=None, environment=None, limit_s=LIMIT_S, python=(sys.executable,)
):
    """Run a module on every rank and wait for all; whoever is not done at the limit is killed."""
    port = free_port()
    plain = {key: value for key, value in os.environ.items() if not key.startswith("DLCP_")}
    began_s = time.monotonic()
    with ExitStack() as stack:
        processes, folder = [], Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlcp-ranks-")))
        for rank in range(count):
            where = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            own = {} if environments is None else environments[rank]
            output, errors = (stack.enter_context((folder / f"{rank}.{end}").open("w+")) for end in ("out", "err"))
            process = subprocess.Popen(
                [*python, "-m", module, *map(str, arguments)],
                cwd=ROOT,
                env={**plain, **where, **own, **(environment or {})},
                stdout=output,
                stderr=errors,
            )
            stack.callback(process.kill)
            processes.append((process, output, errors))
        return [_await(*process, began_s, began_s + limit_s) for process in processes]


def _await(process, output, errors, began_s, end_s):
    try:
        status = process.wait(max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status = None
    for file in (output, errors):
        file.seek(0)
    printed = output.read().strip()
    last = printed.rpartition("\n")[2]
    result = json.loads(last) if status == 0 and last.startswith("{") else None
    return Ended(status, result, f"{printed}\n{errors.read()}", time.monotonic() - began_s)


def assert_learnt_alike(ranks, own):
    """Check what two ranks print of training by the framework's ``own`` way and by DLCP, over a network that loses.

    Each prints what came of every seed of ``SEEDS``, in a list for either way.
    """
    for rank in ranks:
        assert rank.status == 0, rank.output
        assert len(rank.result["dlcp"]) == len(SEEDS)
        for ours in rank.result["dlcp"]:
            assert ours["active"], rank.output
            assert ours["lost"] > 0, "without loss there is nothing to show"
            assert ours["violations"] == 0
            assert ours["max_message_ratio"] <= Options().loss_bound
        assert_as_accurate(rank.result["dlcp"], rank.result[own])
        assert_as_accurate(rank.result[own], rank.result["dlcp"])
    first, second = (rank.result for rank in ranks)
    for mine, others, owns in zip(first["dlcp"], second["dlcp"], first[own], strict=True):
        assert mine["weights"] == others["weights"], "replicas are the same bit by bit"
        assert mine["weights"] != owns["weights"]


def assert_as_accurate(ours, theirs):
    """Check that all trainings learnt, and that ours, from the same seeds as theirs, are not half a point less so."""
    ours, theirs = ([run["accuracy"] for run in runs] for runs in (ours, theirs))
    assert len(ours) == len(theirs)
    assert min(*ours, *theirs) > LEARNT, f"{ours}, {theirs}"
    assert mean(ours) >= mean(theirs) - HALF_A_POINT, f"{ours}, {theirs}"


def assert_death_is_known(ranks):
    """Check how two ranks end of which the second one dies by itself after its fifth step."""
    first, second = ranks
    assert second.status == -signal.SIGKILL
    assert first.status == 1, first.output
    assert "rank 1 has ended" in first.output
    assert "step 6" in first.output, first.output
