# SPDX-License-Identifier: Apache-2.0
"""The built-in switch is killed while ranks train through it."""

import json
import os
import signal

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

import torch.distributed as dist

from dlcp.switch import SwitchProcess
from dlcp.torch import Options
from tests.faults.fault_training import train
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(110)
RANKS = 2
STEPS = 3
UDP_PORT = 53702  # others take the first and the last of DLCP's block
EXACT = 2e-6


def through_a_switch(worker):
    options = Options(
        bind=f"127.77.1.{worker.rank + 1}:{UDP_PORT}",
        advertise=f"127.77.0.{worker.rank + 1}:{UDP_PORT}",
        loss_bound=0.0,
        silence_s=1.5,
        deadline_s=8.0,
    )

    def kill_at_one(step, state):
        dist.barrier()
        if step == 1 and worker.rank == 0:
            os.kill(int(os.environ["TEST_SWITCH"]), signal.SIGKILL)
        dist.barrier()

    return train(worker, options, STEPS, before_step=kill_at_one)


def test_a_dead_switch_costs_no_gradient(tmp_path):
    fabric = tmp_path / "star.json"
    fabric.write_text(json.dumps({"hosts": RANKS, "udp_ports": [UDP_PORT]}))
    with SwitchProcess(["--fabric", str(fabric)]) as switch:
        results = values(launch(RANKS, through_a_switch, environment={"TEST_SWITCH": str(switch.pid)}))
    for rank, result in enumerate(results):
        assert result.active == [True, False, False], result
        assert result.error_max < EXACT
        assert result.same_on_all
        assert sum("DLCP is off" in message and "silent" in message for message in result.said) == (rank == 0)
