# SPDX-License-Identifier: Apache-2.0
"""A fork of a rank that ends, however it does, is no end of the rank: neither the job nor its reports may change."""

import json

import pytest

from tests.group.group_ranks import start_process
from tests.transport.free_ports import free_port

LIMIT_S = 60
TRAINING = """
import os, sys
import numpy as np
import dlcp.session
from dlcp.session import Options

def fork():
    child = os.fork()
    if not child:
        if sys.argv[1] == "raises":
            raise ValueError("a child's own affair")
        sys.exit(0)
    os.waitpid(child, 0)

with dlcp.session.join(Options(shared_memory=sys.argv[2] == "memory", live=sys.argv[3])) as group:
    group.register(["w"])
    for step in range(6):
        if step == 2:
            fork()
        values = np.full(50_000, 1.0 + group.rank, np.float32)
        group.average({"w": values})
        assert (values == 1.5).all()
    assert group.active, group.reason
print("trained", flush=True)
"""


@pytest.mark.parametrize("way", ["sockets", "memory"])
@pytest.mark.parametrize("ending", ["exits", "raises"])
def test_a_fork_that_ends_does_not_end_the_job(ending, way, tmp_path):
    port = free_port()
    processes = [start_process(rank, 2, port, TRAINING, ending, way, tmp_path) for rank in range(2)]
    try:
        ends = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors
        assert output == "trained\n"
    for path in tmp_path.glob("rank-*"):
        snapshot = json.loads(path.read_text())
        assert (snapshot["ended"], snapshot["gave_up"], snapshot["step"]) == (True, None, 5)
