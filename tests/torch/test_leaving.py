# SPDX-License-Identifier: Apache-2.0
"""Scripts that end without closing anything: the other ranks get their averages, and hear who has left."""

import os
import time

import pytest

from tests.torch.workers import FIXED, start_python
from tests.transport.free_ports import free_port

LIMIT_S = 100
SILENCE_S = 1000
"""So long would ranks wait for one that has ended, if it did not say goodbye: longer than a test may take."""
STEPS = 4
WAYS = ["ddp", "cross_step", "fsdp", "backend", "group"]


@pytest.fixture
def run(tmp_path):
    def run(way, ending, steps):
        """Run a rank for each number of ``steps``; return exit statuses and what the ranks printed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DLCP_")}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(steps))}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DLCP_SHARED_MEMORY": "0"}
        environment |= {"DLCP_BIND": "127.0.0.1:0", "DLCP_SILENCE_S": str(SILENCE_S), "DLCP_FALLBACK": "0", **FIXED}
        outputs = [tmp_path / f"rank {rank}" for rank in range(len(steps))]
        processes = [
            start_python(
                ["-m", "tests.torch.leaving_script", way, ending, str(count)],
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                outputs[rank],
            )
            for rank, count in enumerate(steps)
        ]
        end_s = time.monotonic() + LIMIT_S
        try:
            for process in processes:
                process.join(max(0.0, end_s - time.monotonic()))
            statuses = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        printed = [output.read_text() for output in outputs]
        assert None not in statuses, "\n".join(printed)
        return statuses, printed

    return run


@pytest.mark.parametrize("ending", ["returned", "destroyed"])
@pytest.mark.parametrize("way", WAYS)
def test_the_last_step_is_not_lost_with_a_rank_that_ends(run, way, ending):
    if way == "group" and ending == "destroyed":
        pytest.skip("a group of its own has no process group")
    statuses, printed = run(way, ending, [STEPS] * 3)
    assert statuses == [0] * 3, "\n".join(printed)
    assert "Traceback" not in "".join(printed)  # PyTorch's C++ code itself prints the C++ frames of a lost connection


@pytest.mark.parametrize("way", ["ddp", "cross_step", "fsdp"])
def test_a_rank_that_waits_for_the_store_ends_like_any_other(run, way):
    """Python ends threads that return from PyTorch's store too late, and that aborts the process."""
    statuses, printed = run(way, "watching", [STEPS] * 2)
    assert statuses == [0] * 2, "\n".join(printed)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "fsdp"])  # Gloo, which gathers parameters, sees it first
def test_ranks_hear_at_once_that_another_has_left(run, way):
    statuses, printed = run(way, "returned", [STEPS, STEPS, STEPS - 2])
    assert 0 not in statuses[:2], "\n".join(printed)
    for text in printed[:2]:
        assert "rank 2 has left" in text or "rank 2 has ended" in text or "has left DLCP" in text, text


@pytest.mark.parametrize("ending", ["raised", "raised in finally"])
@pytest.mark.parametrize("way", ["ddp", "backend", "group"])
def test_ranks_hear_which_error_another_left_with(run, way, ending):
    if way == "group" and ending == "raised in finally":
        pytest.skip("a group of its own has no process group")
    statuses, printed = run(way, ending, [STEPS, STEPS, STEPS - 2])
    assert 0 not in statuses, "\n".join(printed)
    for text in printed[:2]:
        assert "ValueError" in text, text
        assert "label 11 is not a class" in text, text
