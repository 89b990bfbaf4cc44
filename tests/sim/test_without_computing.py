# SPDX-License-Identifier: Apache-2.0
"""Experiments that measure the network alone take the time of their bytes on the slowest link."""

import pytest

from dlcp.sim.experiments.experiment import ExperimentRun, RunSetting
from dlcp.sim.experiments.running import run
from dlcp.sim.jobs.models import parse_size
from dlcp.sim.jobs.training import TrainingJob
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import FlowPattern

RATE_GBPS = 100
ON_THE_WIRE = (1500 + 64) / (1500 - 60)
"""A packet and the acknowledgement of one in the other direction, over the packet's payload."""


def measured(**setting):
    network = Star(hosts=8, host_link=LinkSpec(rate_gbps=RATE_GBPS))
    item = ExperimentRun(
        experiment="bare", point={}, setting=RunSetting(topology=network, **setting), convergence="published"
    )
    return run(item)["metrics"]


@pytest.mark.parametrize("options", [{}, {"collective": "direct"}, {"bytes_per_value": 2}])
def test_an_all_reduce_of_a_size(options):
    job = TrainingJob(name="job", model="20MB", workers=8, steps=2, **options)
    found = measured(training=(job,))
    assert found["step_s"] == pytest.approx(2 * 7 / 8 * 20e6 * ON_THE_WIRE * 8 / (RATE_GBPS * 1e9), rel=0.03)
    assert found["compute_s"] == 0
    assert not {"efficiency", "speedup"} & found.keys(), "they are about computing"


def test_an_all_to_all_of_a_size():
    found = measured(patterns=(FlowPattern(pattern="all_to_all", size_bytes=1_000_000),))
    assert found["other_max_s"] == pytest.approx(7 * 1e6 * ON_THE_WIRE * 8 / (RATE_GBPS * 1e9), rel=0.03)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("350MB", 350_000_000), ("1.5 GB", 1_500_000_000), ("64kB", 64_000), ("8B", 8), ("vgg16", 0)],
)
def test_sizes(text, size_bytes):
    assert parse_size(text) == size_bytes
