# SPDX-License-Identifier: Apache-2.0
"""Layers keep loss bounds of their own, with each collective."""

from dataclasses import replace

import pytest

from dlcp.collectives.bucket import LayerBounds
from dlcp.transport.ledger import add_up
from dlcp.wire import Flag, PacketType
from tests.collectives.virtual_ranks import LAYERS, NOTHING_PROTECTED, SmallRanks, assert_identical
from tests.collectives.virtual_ring import RingRanks


def nearly_all_at_first(_, source, header):
    """Lose nearly all that may be lost, when it is sent for the first time."""
    first = header.type is PacketType.DATA and not header.flags & Flag.RETRANSMISSION
    return bool(first) and bool(header.drop_class) and header.index % 8 != 7


OWN_BOUNDS = LayerBounds((("conv1*", 0.0), ("fc*", 0.3)))


@pytest.mark.parametrize("kind", [SmallRanks, RingRanks, "server"], ids=["direct", "ring", "server"])
def test_no_layer_loses_more_than_its_own_bound(kind):
    fields = {"bound": 0.4, "policy": NOTHING_PROTECTED, "lose": nearly_all_at_first, "error_feedback": False}
    if kind == "server":
        ranks = SmallRanks(3, server=True, **fields)
        ranks.serve()
    else:
        ranks = kind(3, **fields)
    for reducer in ranks.reducers:
        reducer.context = replace(reducer.context, options=replace(reducer.context.options, layers=OWN_BOUNDS))
    for step in range(3):
        assert_identical(ranks.reduce(step, ranks.gradients(step)))
    by_layer = add_up([ledger.summary() for ledger in ranks.ledgers])["by_layer"]
    (packets, lost, *_), of_fc, of_conv2 = (
        by_layer[str(LAYERS[name].position)] for name in ("conv1.weight", "fc.weight", "conv2.weight")
    )
    assert (packets > 0, lost) == (True, 0)
    assert 0 < of_fc[1] <= 0.3 * of_fc[0]
    assert of_conv2[1] > 0
    assert all(ledger.violations == 0 for ledger in ranks.ledgers)
