# SPDX-License-Identifier: Apache-2.0
"""Who makes the others wait: rank, cause and numbers from durations alone, and nobody without reason."""

import numpy as np
import pytest

from dlcp.session.slowness import (
    ACTIVITIES,
    LEAST_STEPS,
    UNCOMPARED_STEPS,
    Activity,
    Cause,
    RankComparison,
    RankReport,
)
from dlcp.session.tcp_links import TcpEnds, TcpUse

RANKS, STEPS = 4, 40
USUAL_S = {
    Activity.LOADING: 0.002,
    Activity.FORWARD: 0.02,
    Activity.BACKWARD: 0.04,
    Activity.OPTIMIZER: 0.003,
    Activity.EVALUATION: 0.0,
}


def durations(extra=None, ranks=RANKS, steps=STEPS, network_s=0.005, jitter_s=0.001, seed=0):
    """Return seconds of shape (ranks, steps, activities) of ranks that all wait for the slowest.

    ``extra`` has seconds by rank and activity, a number or one for each step.
    """
    rng = np.random.default_rng(seed)
    found = np.zeros((ranks, steps, len(ACTIVITIES)))
    for place, activity in enumerate(ACTIVITIES[:-1]):
        found[:, :, place] = USUAL_S[activity] + rng.uniform(0, jitter_s / 4, (ranks, steps))
    for (rank, activity), seconds in (extra or {}).items():
        found[rank, :, ACTIVITIES.index(activity)] += seconds
    busy = found.sum(2)
    found[:, :, -1] = busy.max(0) - busy + network_s
    return found


def compared(seconds, *, rank=0, layers=None, names=("first", "second"), connections=None, rates=None, warm=True):
    """Return the comparison of ranks with such steps, which follow on the warm-up."""
    ranks = len(seconds)
    comparison = RankComparison(rank, range(ranks), names)
    if warm:
        seconds = np.concatenate([np.ones((ranks, UNCOMPARED_STEPS, len(ACTIVITIES))), seconds], axis=1)
    layers = np.zeros((ranks, len(names))) if layers is None else layers
    comparison.add(
        [
            RankReport(seconds[each], layers[each], (connections or [{}] * ranks)[each], (rates or [{}] * ranks)[each])
            for each in range(ranks)
        ]
    )
    return comparison


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("activity", "cause", "words"),
    [
        (Activity.FORWARD, Cause.COMPUTING, "its forward and backward pass take 1.6 times the median"),
        (Activity.BACKWARD, Cause.COMPUTING, "its forward and backward pass take 1.6 times the median"),
        (Activity.LOADING, Cause.LOADING, "its data loader, or other work before the forward pass, takes 40.1 ms"),
        (Activity.OPTIMIZER, Cause.OPTIMIZER, "after the averages, its optimizer takes 41.1 ms, the others' 3.1"),
        (Activity.EVALUATION, Cause.EVALUATION, "its evaluation, passes without gradients, takes 38.1 ms"),
    ],
)
def test_a_slow_rank_is_named_with_its_cause(rank, activity, cause, words):
    verdict = compared(durations({(rank, activity): 0.038})).overall()
    assert (verdict.rank, verdict.cause, verdict.others) == (rank, cause, ())
    assert verdict.lost_s == pytest.approx(0.038, abs=0.001)
    assert str(verdict).startswith(f"rank {rank} makes the others wait ")
    assert words in str(verdict)


def test_of_two_ranks_the_slower_one_is_named():
    verdict = compared(durations({(1, Activity.LOADING): 0.02}, ranks=2)).overall()
    assert (verdict.rank, verdict.cause) == (1, Cause.LOADING)
    assert verdict.lost_s == pytest.approx(0.02, abs=0.001)


def test_the_layers_with_the_excess_are_named():
    seconds = durations({(2, Activity.BACKWARD): 0.03})
    layers = np.array([[1.0, 1.0], [1.1, 1.0], [1.1, 2.2], [1.0, 1.1]])
    assert "most of the excess in layer second" in str(compared(seconds, layers=layers).overall())
    names = ("first", "blocks.1 to blocks.4")
    assert "in layers blocks.1 to blocks.4" in str(compared(seconds, layers=layers, names=names).overall())
    layers[2] = [1.6, 1.6]
    assert "most of the excess" not in str(compared(seconds, layers=layers).overall()), "it is slow everywhere"


def test_ranks_alike_have_no_culprit():
    verdict = compared(durations(jitter_s=0.0)).overall()
    assert str(verdict) == f"no rank stands out over {STEPS} steps of 70 ms, 5 ms of it for the network"
    assert "network" not in str(compared(durations(network_s=0.001)).overall())


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_that_are_slow_in_turn_have_no_culprit(ranks):
    rng = np.random.default_rng(1)
    extra = {(rank, Activity.FORWARD): rng.exponential(0.02, STEPS) for rank in range(ranks)}
    assert compared(durations(extra, ranks=ranks)).overall().rank is None


def test_a_single_long_step_makes_no_culprit():
    checkpoint = np.zeros(STEPS)
    checkpoint[STEPS // 2] = 10.0
    assert compared(durations({(0, Activity.LOADING): checkpoint})).overall().rank is None


def test_a_rank_that_is_always_slow_is_named_among_ranks_with_long_steps_now_and_then():
    rng = np.random.default_rng(2)
    extra = {(rank, Activity.BACKWARD): rng.exponential(0.003, STEPS) ** 2 * 2e3 for rank in range(RANKS)}
    assert compared(durations(extra)).overall().rank is None
    extra[1, Activity.LOADING] = 0.05
    assert compared(durations(extra)).overall().rank == 1


def test_a_rank_that_is_slow_now_and_then_is_named():
    stalls = np.where(np.arange(200) % 4, 0.0, 0.1)
    verdict = compared(durations({(3, Activity.LOADING): stalls}, steps=200)).overall()
    assert (verdict.rank, verdict.cause) == (3, Cause.LOADING)
    assert verdict.lost_s == pytest.approx(0.025, abs=0.002)


def test_further_slow_ranks_are_named_too():
    extra = {(1, Activity.FORWARD): 0.02, (6, Activity.FORWARD): 0.04}
    verdict = compared(durations(extra, ranks=8)).overall()
    assert (verdict.rank, verdict.others) == (6, (1,))
    assert str(verdict).endswith("; so does rank 1, for less")
    extra[2, Activity.LOADING] = 0.01
    assert str(compared(durations(extra, ranks=8)).overall()).endswith("; so do ranks 1, 2, for less")


def ring(slow_mbps, usual_mbps=200, ranks=RANKS, busy_s=2.0):
    """Return each rank's connections around a ring; ``slow_mbps`` has links that are slower, by their sender."""
    ends = [TcpEnds(f"10.0.0.{rank}:1", f"10.0.0.{(rank + 1) % ranks}:2") for rank in range(ranks)]
    most = 1e6 * min(slow_mbps.values(), default=usual_mbps) / 8 * busy_s
    found = []
    for rank, (own, before) in enumerate(zip(ends, ends[-1:] + ends[:-1], strict=True)):
        rate = slow_mbps.get(rank, usual_mbps)
        found.append(
            {
                own: TcpUse(round(most), 1000, most * 8 / (1e6 * rate)),
                TcpEnds(before.peer, before.own): TcpUse(1000, round(most), 0.04),
                TcpEnds(f"10.0.0.{rank}:9", "192.0.2.1:443"): TcpUse(10**9, 10**9, 100.0),
            }
        )
    return found


def test_a_rank_whose_links_are_all_slow_is_named():
    seconds = durations(network_s=0.06)
    verdict = compared(seconds, connections=ring({2: 12, 1: 12})).overall()
    assert (verdict.rank, verdict.peer, verdict.cause) == (2, None, Cause.LINK)
    assert verdict.rate_bps == pytest.approx(12e6, rel=0.01)
    assert str(verdict) == (
        "the link of rank 2 makes all ranks wait 47 ms of 126 ms a step: 12 Mbit/s, the usual is 200 Mbit/s"
    )


def test_a_single_slow_link_is_named_with_both_ends():
    verdict = compared(durations(network_s=0.06), connections=ring({1: 50})).overall()
    assert (verdict.rank, verdict.peer, verdict.cause) == (1, 2, Cause.LINK)
    assert str(verdict).startswith("the link from rank 1 to rank 2 makes all ranks wait ")


def test_rates_that_a_transport_knows_will_do():
    rates = [{peer: 12e6 if 3 in (rank, peer) else 95e6 for peer in range(RANKS) if peer != rank} for rank in range(4)]
    verdict = compared(durations(network_s=0.06), rates=rates).overall()
    assert (verdict.rank, verdict.peer, verdict.cause) == (3, None, Cause.LINK)


def test_no_link_is_blamed_while_nobody_waits_for_it():
    assert compared(durations(network_s=0.002), connections=ring({2: 12, 1: 12})).overall().rank is None
    assert compared(durations(network_s=0.06), connections=ring({2: 150})).overall().rank is None, "hardly slower"
    short = ring({2: 12, 1: 12}, busy_s=0.1)
    assert compared(durations(network_s=0.06), connections=short).overall().rank is None, "it was idle meanwhile"


def test_the_larger_loss_is_reported():
    seconds = durations({(0, Activity.FORWARD): 0.03}, network_s=0.06)
    assert compared(seconds, connections=ring({2: 12, 1: 12})).overall().rank == 2
    seconds = durations({(0, Activity.FORWARD): 0.09}, network_s=0.06)
    assert compared(seconds, connections=ring({2: 12, 1: 12})).overall().rank == 0


def test_the_first_steps_do_not_count_and_few_give_no_verdict():
    few = durations({(1, Activity.FORWARD): 0.5}, steps=LEAST_STEPS - 1)
    comparison = compared(few)
    assert comparison.overall().rank is None
    assert str(comparison.overall()) == f"no verdict: {LEAST_STEPS - 1} steps were compared, and it takes {LEAST_STEPS}"
    slow_at_first = np.concatenate(
        [np.full((RANKS, UNCOMPARED_STEPS, 6), [[[9.0]]] * 1 + [[[0.1]]] * 3), durations()], 1
    )
    assert compared(slow_at_first, warm=False).overall().rank is None


def test_steps_are_compared_once_all_ranks_have_reported_them():
    seconds = durations({(1, Activity.FORWARD): 0.05}, steps=UNCOMPARED_STEPS + STEPS)
    comparison, layers = RankComparison(0, range(RANKS), ["all"]), np.zeros(1)
    for begin in range(0, seconds.shape[1] + 2, 2):  # each rank's reports end at another step
        parts = [seconds[rank, max(0, begin - rank % 2) : begin + 2 - rank % 2] for rank in range(RANKS)]
        comparison.add([RankReport(part, layers, {}, {}) for part in parts])
    assert comparison.overall().steps == STEPS
    assert comparison.overall().lost_s == pytest.approx(0.05, abs=0.001)


def test_the_latest_verdict_forgets():
    comparison = compared(durations({(1, Activity.FORWARD): 0.05}))
    for seed in range(20):
        rows = durations(seed=seed)
        comparison.add([RankReport(rows[rank], np.zeros(2), {}, {}) for rank in range(RANKS)])
    assert comparison.latest().rank is None
    assert comparison.latest().steps < comparison.overall().steps


def test_waiting_is_attributed_to_the_last_rank_and_the_rest_to_the_network():
    steps, spent, waited = compared(durations({(3, Activity.LOADING): 0.05}), rank=1).totals()
    assert steps == STEPS
    assert spent["forward"] == pytest.approx(STEPS * 0.02, rel=0.05)
    assert waited[3] == pytest.approx(STEPS * 0.05, rel=0.05)
    assert waited[None] == pytest.approx(STEPS * 0.005, rel=0.05)
    assert sum(waited.values()) == pytest.approx(spent["waiting"])


def test_the_figures_are_plain_values():
    found = compared(durations({(1, Activity.FORWARD): 0.05}), connections=ring({}, busy_s=1.0)).as_json()
    assert found["verdict"]["rank"] == 1
    assert found["verdict"]["cause"] == "computing"
    assert found["verdict"]["text"].startswith("rank 1 makes the others wait 49.9 ms of 121 ms a step")
    assert found["activities_s"]["1"]["forward"] == pytest.approx(0.07, rel=0.05)
    assert {(each["from"], each["to"]) for each in found["rates_bps"]} == {(0, 1), (1, 2), (2, 3), (3, 0)}
