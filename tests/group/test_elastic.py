# SPDX-License-Identifier: Apache-2.0
"""With ``elastic``, training goes on without ranks that have ended, and what is left of them is equal on all others."""

import os
import signal
import subprocess
import sys

import pytest

from dlcp.session import Options
from tests.group.group_ranks import ends_of, start_process
from tests.transport.free_ports import free_port

TRAINING = """
import hashlib, os, signal, sys, time
import numpy as np
import dlcp.session
logging = __import__("logging").basicConfig()
dead, how, at, least, steps = [int(text) for text in sys.argv[1].split(",")], *sys.argv[2:3], *map(int, sys.argv[3:6])
options = dlcp.session.Options(elastic=least, silence_s=float(sys.argv[6]), deadline_s=60)
with dlcp.session.join(options) as group:
    group.register(["front", "back"])
    seen = hashlib.sha256()
    sizes = []
    for step in range(steps):
        if group.rank in dead and step == at + dead.index(group.rank):
            if how == "close":
                sys.exit()
            os.kill(os.getpid(), getattr(signal, how))
        rng = np.random.default_rng([group.rank, step])
        given = {"front": rng.standard_normal(200_000).astype(np.float32), "back": np.full(9, group.rank, np.float32)}
        group.average(given)
        seen.update(given["front"].tobytes() + given["back"].tobytes())
        sizes.append(group.size)
        time.sleep(0.001)
    expected = sum(group.ranks) / group.size
    assert group.active or group.size == 1, group.reason
    assert abs(given["back"] - expected).max() < (1e-6 if options.precision == "32" else 0.2), (given["back"], expected)
    group.barrier()
    value = np.full(5, group.rank, np.int64)
    group.broadcast(value, group.ranks[-1])
    assert (value == group.ranks[-1]).all()
    sys.stdout.write(" ".join(map(str, [*group.ranks, seen.hexdigest(), sizes[0], sizes[-1]])) + chr(10))  # at once
"""


MEETING = """
import os, signal
import dlcp.session
with dlcp.session.join(dlcp.session.Options(elastic=1, deadline_s=60)) as group:
    group.register(["front"])
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    print(*group.ranks)
"""

WITHHOLDING = TRAINING.replace(
    "with dlcp.session.join",
    """
from dlcp.collectives.direct import DirectRun
send_average = DirectRun._send_average

def withhold(run, peer):
    if run.step != at - 1 or peer == 0:
        send_average(run, peer)

if int(os.environ["RANK"]) in dead:
    DirectRun._send_average = withhold
with dlcp.session.join""",
    1,
).replace("            os.kill", "            time.sleep(0.5)\n            os.kill")
"""The rank that ends has sent its last averages only to rank 0, which has begun the next step."""

FALLEN_BACK = TRAINING.replace(
    "with dlcp.session.join",
    """
from dlcp.session import joining, training_session
succeed = int(os.environ["JOINS"])

def join(*arguments, **named):
    global succeed
    succeed -= 1
    if succeed < 0:
        raise joining.NotJoinedError("no packets get through")
    return joining.join(*arguments, **named)

training_session.join = join
with dlcp.session.join""",
    1,
).replace("assert group.active or group.size == 1, group.reason", "assert group.reason == 'no packets get through'")


def survivors_of(size, dead, how="SIGKILL", at=5, least=1, steps=40, silence_s=20, code=TRAINING, **variables):
    """Train with ``size`` ranks; those in ``dead`` end one after another, a step apart."""
    port, variables = free_port(), {"DLCP_PRECISION": "32", **variables}
    names = ",".join(map(str, dead))
    processes = [
        start_process(rank, size, port, code, names, how, at, least, steps, silence_s, **variables)
        for rank in range(size)
    ]
    return processes, ends_of(processes)


def check(size, dead, how="SIGKILL", **variables):
    """Check that the others go on with equal averages; return what rank 0 says."""
    processes, ends = survivors_of(size, dead, how, **variables)
    left = [rank for rank in range(size) if rank not in dead]
    assert [processes[rank].returncode for rank in left] == [0] * len(left), ends
    (line,) = {ends[rank][0] for rank in left}
    assert line.split()[: len(left)] == [str(rank) for rank in left]
    assert line.split()[-2:] == [str(size), str(len(left))]
    return ends[0][1]


@pytest.mark.parametrize(("size", "dead"), [(2, [1]), (3, [1]), (4, [3, 1]), (5, [2, 3, 4])])
def test_the_others_go_on_without_ranks_that_are_killed(size, dead):
    warning = check(size, dead)
    assert any(f"rank {rank} has ended" in warning for rank in dead)
    if size - len(dead) > 1:
        assert "Training goes on after" in warning
        assert f"with {size - len(dead)} of" in warning


@pytest.mark.parametrize(
    "variables",
    [
        {"DLCP_COLLECTIVE": "ring"},
        {"DLCP_SHARED_MEMORY": "0"},
        {"DLCP_PRECISION": "auto", "DLCP_SHARED_MEMORY": "0"},
        {"DLCP_LOSS_BOUND": "0", "DLCP_TAGGED": "0", "DLCP_SHARED_MEMORY": "0"},
    ],
    ids=lambda variables: "-".join(variables.values()),
)
def test_the_others_go_on_however_they_average(variables):
    check(4, [2], **variables)


def test_an_average_that_one_rank_has_got_reaches_all_others():
    port = free_port()
    arguments = ("2", "SIGKILL", 5, 1, 40, 20)
    processes = [start_process(rank, 3, port, WITHHOLDING, *arguments, DLCP_PRECISION="32") for rank in range(3)]
    ends = ends_of(processes)
    assert [process.returncode for process in processes] == [0, 0, -signal.SIGKILL], ends
    assert ends[0][0] == ends[1][0]
    assert ends[0][0].startswith("0 1 ")


@pytest.mark.parametrize("joins", [0, 1])
def test_ranks_that_have_fallen_back_to_the_store_go_on_too(joins):
    warning = check(4, [3, 1], code=FALLEN_BACK, JOINS=joins, DLCP_MEET_S=30 if joins else 3)
    assert "Training continues with the store" in warning
    assert "ranks: 0, 2." in warning


def test_the_others_go_on_without_a_rank_that_leaves():
    check(3, [2], "close")


def test_after_a_fallback_the_others_go_on_without_a_rank_that_leaves():
    leaving = FALLEN_BACK.replace('if how == "close":', "if True:\n                group.close()")
    assert "with 2 of 3 ranks: 0, 1." in check(3, [2], code=leaving, JOINS=0, DLCP_MEET_S=3)


def test_a_launcher_lets_the_others_go_on_without_rank_0(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    words = ["-n", "3", "--elastic", "2", "--", sys.executable, script, "0", "SIGKILL", "5", "2", "40", "20"]
    environment = {**os.environ, "DLCP_PRECISION": "32"}
    done = subprocess.run(
        [sys.executable, "-m", "dlcp.cli", "launch", *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("1 2 ")
    assert "dlcp launch: rank 0 was killed by SIGKILL; the others may go on" in done.stderr
    assert "with 2 of 3 ranks: 1, 2." in done.stderr


def test_a_rank_that_stands_still_is_left_out_and_ends_when_it_wakes():
    port = free_port()
    arguments = ("1", "SIGSTOP", 5, 1, 1500, 2)
    processes = [start_process(rank, 3, port, TRAINING, *arguments, DLCP_PRECISION="32") for rank in range(3)]
    said = next(line for line in processes[0].stderr if "Training goes on" in line)
    assert "with 2 of 3 ranks: 0, 2." in said
    processes[1].send_signal(signal.SIGCONT)  # the others still train
    ends = ends_of(processes)
    assert [process.returncode for process in processes] == [0, 1, 0], ends
    assert ends[0][0] == ends[2][0]
    assert ends[0][0].startswith("0 2 ")
    assert "ranks [0, 2] were to go on without rank 1" in ends[1][1]
    assert "Training goes on" not in ends[0][1]  # it has not disturbed the others again


def test_a_barrier_holds_without_a_rank_that_ends_before_it():
    port = free_port()
    processes = [start_process(rank, 3, port, MEETING) for rank in range(3)]
    ends = ends_of(processes)
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0], ends
    assert ends[0][0] == ends[2][0] == "0 2\n"


def test_while_nobody_ends_it_changes_nothing():
    outputs = {output for least in (0, 1) for output, _ in survivors_of(2, [7], least=least)[1]}
    assert len(outputs) == 1, outputs


def test_too_few_ranks_end():
    processes, ends = survivors_of(3, [1], least=3)
    assert processes[0].returncode == processes[2].returncode == 1
    for rank in (0, 2):
        assert "only 2 left, fewer than elastic=3" in ends[rank][1]
        assert "rank 1 has ended" in ends[rank][1]


def test_options_that_do_not_allow_it_are_refused_by_name():
    for wrong in ({"samples": 3}, {"compression": "topk:0.1"}, {"fallback": False}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"elastic lets training go on .*{name}"):
            Options(elastic=1, **wrong)
