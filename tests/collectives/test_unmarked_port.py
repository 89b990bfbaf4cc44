# SPDX-License-Identifier: Apache-2.0
"""Steps of ranks whose ports mark nothing, in virtual time: flows that pause get their share all the same."""

import statistics

import pytest

from tests.collectives.virtual_ranks import Ranks
from tests.transport.exchanges import Selective

RATE_BPS, DEPTH = 100e6, 83
PAUSE_S, STEPS, SETTLED = 0.05, 13, 7
SIZES = {"conv1.weight": 250_000}
BYTES = 1_000_000
PACKET_SHARE = 1440 / (1440 + 32 + 42)
"""Of a frame's bytes, the gradients."""


class OneQueue(Selective):
    """Every packet goes into the same queue, which drops at its end."""

    def enqueue(self, target, queue, packet):
        super().enqueue(target, 0, packet)


@pytest.mark.parametrize(("count", "most"), [(2, 1.4), (4, 1.35), (8, 1.9)])
def test_steps_take_little_longer_than_the_ports_need(count, most):
    # Before flows began again with a part of their windows, those who paused lost their shares: 1.6 and 3.3 times it.
    fields = {"rate_bps": RATE_BPS, "depth": DEPTH, "ecn_depth": 1 << 30}
    ranks = Ranks(count, network=OneQueue, **fields)
    network, took_s = ranks.network, []
    for step in range(STEPS):
        gradients, began_s = ranks.gradients(step, SIZES), network.now
        ranks.reduce(step, gradients, [list(SIZES)])
        took_s.append(network.now - began_s)
        rested_s = network.now + PAUSE_S
        network.run(lambda until_s=rested_s: network.now >= until_s)
    needed_s = 2 * (count - 1) / count * BYTES * 8 / PACKET_SHARE / RATE_BPS
    assert statistics.median(took_s[-SETTLED:]) < most * needed_s
