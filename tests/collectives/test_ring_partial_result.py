# SPDX-License-Identifier: Apache-2.0
"""A ring that breaks at any moment leaves enough behind to complete the average exactly."""

import numpy as np
import pytest

from dlcp.collectives import ring
from dlcp.collectives.partial_result import recover
from dlcp.transport import TransportError
from tests.collectives.meeting_ranks import together
from tests.collectives.virtual_ranks import NOTHING_PROTECTED
from tests.collectives.virtual_ring import RingRanks


def broken_at(share, *, count=4, bound=0.0, loss=0.0, **fields):
    """Stop all ranks after a share of a step's time; return them, their inputs and their futures."""
    whole = RingRanks(count, bound=bound, loss=loss, **fields)
    rng = np.random.default_rng(0)
    # Small integers, so that sums are exact whoever adds them up.
    gradients = [{"conv2.weight": rng.integers(-8, 9, 20_000).astype(np.float32)} for _ in range(count)]
    whole.reduce(0, gradients, [["conv2.weight"]])
    took_s = whole.network.now
    ranks = RingRanks(count, bound=bound, loss=loss, **fields)
    started = [row[0] for row in ranks.start(0, gradients, [["conv2.weight"]])]
    ranks.network.run(lambda: ranks.network.now >= share * took_s)
    for protocol in ranks.network.ranks:
        protocol.fail(TransportError("the switch is gone"))
    return ranks, [rank["conv2.weight"] for rank in gradients], started


def completed(ranks, started):
    held = [run.partial_result() for run in started]
    assert [one is None for one in held] == [future.exception() is None for future in started]

    def complete(channel, rank):
        recovered = recover(channel, rank, range(ranks.count), held[rank], finished=held[rank] is None)
        return started[rank].result() if held[rank] is None else recovered.values

    return together(ranks.count, complete), held


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.97])
def test_the_average_is_completed(share, monkeypatch):
    monkeypatch.setattr(ring, "PIECE_BYTES", 4 * 1440)
    ranks, given, started = broken_at(share)
    averages, held = completed(ranks, started)
    for average in averages:
        np.testing.assert_array_equal(average, sum(given) / 4)
    finals = [one.final.mean() for one in held if one]
    if share == 0.0:
        assert finals == [0.0] * 4
    if share == 0.6:
        assert any(0 < final < 1 for final in finals), "the moment is one of interest"


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_what_was_lost_before_stays_lost_and_ranks_agree(share, monkeypatch):
    monkeypatch.setattr(ring, "PIECE_BYTES", 16 * 1440)
    ranks, given, started = broken_at(share, bound=0.6, loss=0.1, policy=NOTHING_PROTECTED)
    averages, held = completed(ranks, started)
    for average in averages[1:]:
        np.testing.assert_array_equal(average, averages[0])
    # Where nothing is final yet, nothing is lost after all: every rank gives its own.
    nowhere = np.logical_and.reduce([~one.final if one else np.zeros(56, bool) for one in held])
    untouched = np.repeat(nowhere, 360)[:20_000]
    np.testing.assert_array_equal(averages[0][untouched], (sum(given) / 4)[untouched])
    assert sum(one.residual is not None for one in held if one) > 0, "what hops are known to have lost is told"


def test_a_finished_bucket_leaves_no_partial_result():
    ranks = RingRanks(3)
    started = ranks.start(0, ranks.gradients(0))
    ranks.network.run(lambda: all(run.done() for (run,) in started))
    assert [run.partial_result() for (run,) in started] == [None, None, None]
