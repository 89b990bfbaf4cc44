# SPDX-License-Identifier: Apache-2.0
"""One rank's port is slower than the others': shards and collectives follow it, and a flush leaves nothing behind."""

from dataclasses import replace

import numpy as np
import pytest

from dlcp.collectives import make_reducer
from dlcp.collectives.bucket import LayerBounds
from dlcp.collectives.choice import Costs
from tests.collectives.virtual_ranks import Ranks, assert_identical
from tests.collectives.virtual_ring import RingRanks
from tests.transport.exchanges import Selective

MBIT = 1e6
SIZES = {"conv1.weight": 45_000, "conv1.bias": 40, "conv2.weight": 200_000, "conv2.bias": 100, "fc.weight": 100_345}
STEPS = 8
PORTS = {"rate_bps": 32 * MBIT, "depth": 96}


class SlowPort(Selective):
    """A network in which the last rank's port has a part of the others' rate."""

    slowness = 3.0

    def run(self, until, step_s=0.001, **limits):  # in which the slow port sends a packet
        super().run(until, step_s, **limits)

    def transmit(self, target):
        usual = self.rate_bps
        self.rate_bps = usual / self.slowness if target == len(self.ranks) - 1 else usual
        super().transmit(target)
        self.rate_bps = usual


class EvenPorts(SlowPort):
    slowness = 1.0


class ManyValues(Ranks):
    sizes = SIZES

    def _floats(self, rng, size):
        scale = np.repeat(rng.lognormal(0, 1, -(-size // 360)), 360)[:size]
        return (rng.standard_normal(size) * scale).astype(np.float32)


def take_steps(ranks, steps=STEPS):
    """Return all gradients, all averages, and seconds per step."""
    gradients, averages, seconds = [], [], []
    for step in range(steps):
        gradients.append(ranks.gradients(step))
        before = ranks.network.now
        averages.append(ranks.reduce(step, gradients[-1]))
        seconds.append(ranks.network.now - before)
    return gradients, averages, seconds


def test_shares_stay_as_they_are_while_ports_do():
    """A rank without a shard receives averages from few ranks at a time, so each of these has more of its port."""
    ranks = ManyValues(8, network=SlowPort, **PORTS)
    seconds = take_steps(ranks, 5)[2]
    assert max(seconds[1:]) < 1.1 * min(seconds[1:])
    assert max(seconds[1:]) < 0.8 * seconds[0]
    assert [reducer.weights[7] for reducer in ranks.reducers] == [0.0] * 8
    seen_bps = [connection.inbound_bps for connection in ranks.connections]
    assert seen_bps == pytest.approx([32 * MBIT] * 7 + [32 * MBIT / 3], rel=0.1)


@pytest.mark.parametrize("fields", [{}, {"bound": 0.1, "loss": 0.03, "seed": 4}], ids=["whole", "lossy"])
@pytest.mark.parametrize("server", [False, True], ids=["direct", "server"])
def test_a_flush_sends_all_that_waits_and_nothing_stays_behind(server, fields):
    ranks = ManyValues(2 if server else 4, server=server, precision="8", **PORTS, **fields)
    if server:
        ranks.serve()
    gradients, averages, _ = take_steps(ranks)
    assert sum(reducer.context.residual.size for reducer in ranks.reducers) > 0
    gradients.append(ranks.gradients(STEPS))
    averages.append(ranks.reduce(STEPS, gradients[-1], flush=True))
    assert_identical(averages[-1])
    assert [reducer.context.residual.size for reducer in ranks.reducers] == [0] * ranks.count
    sent = [record for ledger in ranks.ledgers for record in ledger.of_step(STEPS)]
    assert len(sent) >= ranks.count
    assert not any(record.lost for record in sent)
    for name in SIZES:
        given = sum(rank[name].astype(np.float64) for step in gradients for rank in step)
        had = sum(step[0][name].astype(np.float64) for step in averages) * ranks.count
        np.testing.assert_allclose(had, given, atol=1e-3)
    for step in (STEPS + 1, STEPS + 2):
        ranks.reduce(step, ranks.gradients(step))
    assert sum(reducer.context.residual.size for reducer in ranks.reducers) > 0, "one step is whole, and no other"


def test_a_flush_is_whole_where_layers_have_bounds_of_their_own():
    ranks = ManyValues(2, loss=0.1, seed=4)
    for reducer in ranks.reducers:
        options = replace(reducer.context.options, layers=LayerBounds((("conv2.*", 0.5),)))
        reducer.context = replace(reducer.context, options=options)
    for step in range(3):
        ranks.reduce(step, ranks.gradients(step))
    assert ranks.lost > 0
    lost = ranks.lost
    ranks.reduce(3, ranks.gradients(3), flush=True)
    assert ranks.lost == lost
    assert [reducer.context.residual.size for reducer in ranks.reducers] == [0, 0]


def train_with_a_choice(network):
    """Steps of four ranks that may choose, and take the ring where ports are alike."""
    ranks = ManyValues(4, network=network, **PORTS)
    costs = Costs(rate_bps=32 * MBIT, flow_penalty=0.3)
    ranks.reducers = [make_reducer("auto", reducer.context, costs=costs) for reducer in ranks.reducers]
    for reducer in ranks.reducers:
        reducer.context = reducer.reducers["direct"].context
    return ranks, *take_steps(ranks)


class ManyValuesInARing(RingRanks):
    sizes = SIZES


@pytest.mark.parametrize("step", [0, 1])
def test_all_ranks_in_a_ring_know_whose_port_is_slow(step):
    ranks = ManyValuesInARing(
        4, order=[2, 0, 3, 1], tells_rates=True, network=SlowPort, rate_bps=32 * MBIT, depth=96
    )  # fmt: skip
    ranks.reduce(step, ranks.gradients(0))
    rates = [reducer.received_bps() for reducer in ranks.reducers]
    assert rates == [rates[0]] * 4
    assert [rates[0][rank] / 1e6 for rank in range(4)] == pytest.approx([32, 32, 32, 32 / 3], rel=0.2)


def test_ranks_leave_a_ring_behind_a_slow_port():
    ranks, gradients, averages, seconds = train_with_a_choice(SlowPort)
    assert [reducer.chosen for reducer in ranks.reducers] == [{"ring": 1, "direct": STEPS - 1}] * 4
    assert seconds[0] / np.median(seconds[3:]) >= 1.2
    for each in averages:
        assert_identical(each)
    for name in SIZES:
        given = sum(rank[name].astype(np.float64) for step in gradients for rank in step)
        had = sum(step[0][name].astype(np.float64) for step in averages) * 4
        np.testing.assert_allclose(had + ranks.owed(name), given, atol=1e-3)


def test_ranks_stay_in_a_ring_where_ports_are_alike():
    ranks, *_ = train_with_a_choice(EvenPorts)
    assert [reducer.chosen for reducer in ranks.reducers] == [{"ring": STEPS}] * 4
    rates = [reducer.topology.rates_bps for reducer in ranks.reducers]
    assert rates == [rates[0]] * 4
    assert set(rates[0]) == set(range(4)), "all are known, though each rank sends to one only"
