# SPDX-License-Identifier: Apache-2.0
"""The path fails in the middle of a compressed exchange: the exact average, or the compressed one on all ranks."""

from collections import Counter

import numpy as np
import pytest

from dlcp.collectives.partial_result import recover
from dlcp.compress import Feedback, make_compressor
from dlcp.wire import PacketType
from tests.collectives.meeting_ranks import together
from tests.compress.compressed_ranks import EVERY, SIZE, CompressedRanks, assert_identical
from tests.transport.exchanges import Selective

AVERAGES = [text for text in EVERY if make_compressor(text).feedback is not Feedback.NOTHING]


def recovered(ranks, started):
    """What each rank has in the end: its own result, or what it recovers; and what it owes of that besides."""
    held = {rank: run.partial_result() for rank, run in started.items()}
    done = {rank: future.done() and not future.exception() for rank, future in started.items()}
    found = together(
        ranks.count,
        lambda channel, rank: recover(channel, rank, range(ranks.count), held[rank], finished=done[rank]),
    )
    return [
        (started[rank].result(), None) if done[rank] else (found[rank].values, found[rank].residual)
        for rank in range(ranks.count)
    ]


@pytest.mark.parametrize("until_s", [0.0, 0.0012, 0.003])
@pytest.mark.parametrize("text", AVERAGES)
def test_what_nobody_has_finished_is_averaged_exactly(text, until_s):
    ranks = CompressedRanks(3, text, rate_bps=5e6)
    gradients = ranks.gradients(1)
    started = ranks.start(0, gradients)
    ranks.network.run(lambda: ranks.network.now >= until_s)
    assert not any(future.done() for future in started.values())
    results = recovered(ranks, started)
    assert_identical([values for values, _ in results])
    np.testing.assert_allclose(results[0][0], np.sum(gradients, axis=0) / 3, rtol=1e-5, atol=1e-6)
    assert all(owed is None for _, owed in results), "nothing was left out"


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("text", AVERAGES)
def test_what_one_rank_has_finished_all_get_and_owe_the_rest(text, lossy):
    """Rank 1 hears nothing of the last round's result, or of rank 0's last verdict; and some of its own is lost."""
    ranks = CompressedRanks(2, text, network=Selective, lose=withheld(text, lossy), bound=0.4)
    gradients = ranks.gradients(1)
    started = ranks.start(0, gradients)
    ranks.network.run(started[0].done)
    assert not started[1].done()
    assert (ranks.lost > 0) == lossy
    results = recovered(ranks, started)
    assert_identical([values for values, _ in results])
    taken = 2 * results[0][0].astype(np.float64)
    if make_compressor(text).feedback is Feedback.ALL:
        owed = results[1][1] if results[1][1] is not None else 0
        np.testing.assert_allclose(taken + ranks.owed() + owed, np.sum(gradients, axis=0), rtol=1e-4, atol=1e-3)
    else:
        assert (results[1][1] is not None) == lossy


def withheld(text, lossy):
    """Lose what rank 0 says last: a result, or a verdict; and at first every fourth packet that rank 1 contributes."""
    seen = Counter()
    last = 2 * make_compressor(text).rounds - 1  # odd phases are results and verdicts

    def lose(network, source, header):
        if source == 1:
            contributed = header.type is PacketType.DATA and header.message // 2 == last - 1
            seen[header.index] += contributed
            return lossy and contributed and header.index % 4 == 3 and seen[header.index] < 3
        return header.type is PacketType.DATA and header.message // 2 == last

    return lose


def test_results_are_kept_for_others():
    ranks = CompressedRanks(2, "topk:0.1")
    started = ranks.start(0, ranks.gradients(0))
    ranks.network.run(lambda: all(run.done() for run in started.values()))
    averaged = started[0].result().copy()
    started[0].result()[:] = 0  # the caller's, who has it back
    assert started[0].partial_result().final.all()
    np.testing.assert_array_equal(started[0].partial_result().values, averaged)


@pytest.mark.parametrize("text", ["topk:0.1", "randomk:0.1", "powersgd:2"])
def test_exact_buckets_have_partial_results_too(text):
    ranks = CompressedRanks(2, text, rate_bps=5e6)
    gradients = ranks.gradients(1)
    started = ranks.start(3, gradients, sequence=5, exact=True)
    ranks.network.run(lambda: ranks.network.now >= 0.002)
    held = [started[rank].partial_result() for rank in range(2)]
    found = together(2, lambda channel, rank: recover(channel, rank, range(2), held[rank]))
    np.testing.assert_allclose(found[0].values, sum(gradients) / 2, rtol=1e-6)
    assert not started[0].done()


def test_a_recovered_contribution_has_what_was_owed_before():
    ranks = CompressedRanks(2, "topk:0.1", rate_bps=5e6)
    first = ranks.gradients(1)
    taken = 2 * ranks.reduce(0, first)[0].astype(np.float64)
    started = ranks.start(1, [np.zeros(SIZE, np.float32)] * 2)
    results = recovered(ranks, started)
    np.testing.assert_allclose(taken + 2 * results[0][0], np.sum(first, axis=0), atol=1e-4)
    assert not ranks.owed().any()
