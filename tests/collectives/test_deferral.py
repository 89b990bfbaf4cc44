# SPDX-License-Identifier: Apache-2.0
"""Deferral in the direct all-reduce: shorter steps behind one slow port, equal replicas, and nothing lost for good."""

from dataclasses import replace

import numpy as np
import pytest

from dlcp.collectives import Bucket, RankContext, ReduceOptions, make_reducer
from dlcp.collectives.bucket import LayerBounds
from dlcp.collectives.choice import Costs, Topology
from dlcp.collectives.deferral import REFRESH_STEPS, WHOLE_STEPS, Deferral, shares_by_value
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.dtypes import ValueType
from dlcp.tags import Segment, layers_in_order
from dlcp.transport import LossBound
from tests.collectives.virtual_ranks import Ranks, assert_identical
from tests.collectives.virtual_ring import RingRanks
from tests.transport.exchanges import Selective

MBIT = 1e6
SIZES = {"conv1.weight": 45_000, "conv1.bias": 40, "conv2.weight": 200_000, "conv2.bias": 100, "fc.weight": 100_345}
STEPS = 8
BOUND = 0.75


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


def take_steps(ranks, steps, stride=1):
    """Return all gradients, all averages, and seconds per step."""
    gradients, averages, seconds = [], [], []
    for step in range(0, stride * steps, stride):
        gradients.append(ranks.gradients(step))
        before = ranks.network.now
        averages.append(ranks.reduce(step, gradients[-1]))
        seconds.append(ranks.network.now - before)
    return gradients, averages, seconds


def train(count, *, network=SlowPort, deferral_bound=BOUND, steps=STEPS, stride=1, **fields):
    """Steps after the whole ones: return the ranks, all gradients, all averages, and seconds per step."""
    ranks = ManyValues(
        count, network=network, adaptive_shards=True, deferral_bound=deferral_bound, rate_bps=32 * MBIT, depth=96,
        **fields,
    )  # fmt: skip
    for reducer in ranks.reducers:
        if reducer.deferral:
            reducer.deferral._steps = WHOLE_STEPS
    return ranks, *take_steps(ranks, steps, stride)


@pytest.mark.parametrize(("count", "at_least"), [(2, 1.3), (4, 1.5)])
def test_a_step_behind_a_slow_port_is_shorter(count, at_least):
    *_, whole = train(count, deferral_bound=0.0)
    ranks, _, _, seconds = train(count)
    assert np.median(whole[3:]) / np.median(seconds[3:]) >= at_least
    ledgers = [ledger.summary() for ledger in ranks.ledgers]
    assert sum(each["deferred"] for each in ledgers) > 0
    assert all(each["violations"] == 0 and each["max_deferred_ratio"] <= BOUND for each in ledgers)


def test_shares_stay_as_they_are_while_ports_do():
    """A rank that owns nothing gets averages of few ranks at a time, each of which has more of its port then."""
    ranks, _, _, seconds = train(8, deferral_bound=0.0, steps=5)
    assert max(seconds[1:]) < 1.1 * min(seconds[1:])
    assert max(seconds[1:]) < 0.8 * seconds[0]
    assert [reducer.weights[7] for reducer in ranks.reducers] == [0.0] * 8
    seen_bps = [connection.inbound_bps for connection in ranks.connections]
    assert seen_bps == pytest.approx([32 * MBIT] * 7 + [32 * MBIT / 3], rel=0.1)


@pytest.mark.parametrize("value_type", [ValueType.FLOAT32, ValueType.BFLOAT16], ids=lambda kind: kind.value)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("precision", ["32", "8", "4"])
def test_replicas_are_equal_and_what_is_deferred_is_owed(precision, count, value_type):
    ranks, gradients, averages, _ = train(count, value_type=value_type, precision=precision)
    for each in averages:
        assert_identical(each)
    assert sum(ledger.summary()["deferred"] for ledger in ranks.ledgers) > 0
    assert all(ledger.violations == 0 for ledger in ranks.ledgers)
    widen = value_type.widen
    for name in SIZES:
        given = sum(widen(rank[name]).astype(np.float64) for step in gradients for rank in step)
        had = sum(widen(step[0][name]).astype(np.float64) for step in averages) * count
        owed = ranks.owed(name)
        error = np.abs(had + owed - given)
        assert error.max() < (1e-3 if value_type is ValueType.FLOAT32 else 2), name  # bfloat16 has eight bits
        assert error.mean() < (1e-5 if value_type is ValueType.FLOAT32 else 0.03), name


def test_deferral_shortens_steps_of_lower_precision_too():
    medians = [
        np.median(train(4, deferral_bound=bound, precision=precision)[3][3:])
        for precision, bound in (("32", 0.0), ("8", 0.0), ("8", BOUND))
    ]
    assert medians[0] / medians[1] > 2.5
    assert medians[1] / medians[2] > 1.2


def test_what_matters_most_is_sent():
    _, gradients, averages, _ = train(2)
    values = np.concatenate([averages[-1][0][name] for name in SIZES])
    zero = values == 0
    assert 0.05 < zero.mean() <= 0.5
    for name in ("conv1.bias", "conv2.bias"):
        assert (averages[-1][0][name] != 0).all(), "small layers are whole"
    size = np.abs(np.concatenate([sum(rank[name] for rank in gradients[-1]) / 2 for name in SIZES]))
    assert size[zero].mean() < 0.5 * size[~zero].mean()


LOSSY = {"bound": 0.1, "loss": 0.03, "seed": 4}


@pytest.mark.parametrize(
    ("count", "fields"),
    [(2, {}), (4, {}), (2, {"bound": 0.3, "loss": 0.2, "seed": 4}), (2, {"stride": 4})],
    ids=["two", "four", "lossy", "numbers"],
)
def test_no_packet_waits_for_longer_than_the_limit(count, fields):
    """Shards of four ranks change from step to step. Ranks that broadcast between steps take their numbers, too."""
    ranks, *_ = train(count, steps=2 * REFRESH_STEPS + 4, **fields)
    waited = [ledger.summary()["max_deferred_steps"] for ledger in ranks.ledgers]
    assert 2 <= max(waited) < REFRESH_STEPS


def test_a_packet_is_not_lost_either_when_its_turn_comes():
    ranks = ManyValues(2, deferral_bound=BOUND, bound=0.3, loss=0.2, seed=4)
    waiting = []
    for ledger in ranks.ledgers:
        ledger.note_waiting = lambda _, packets: waiting.append(packets)
    for step in range(4):
        waiting.clear()
        ranks.reduce(step, ranks.gradients(step))
        assert [bool(packets.any()) for packets in waiting] == [True, True]
        turn = ranks.reducers[0].turn
        assert not any((packets & Deferral.due(0, len(packets), turn)).any() for packets in waiting)


@pytest.mark.parametrize("fields", [{}, LOSSY], ids=["whole", "lossy"])
@pytest.mark.parametrize("way", ["direct", "server"])
def test_a_flush_sends_all_that_waits_and_nothing_stays_behind(way, fields):
    ranks, gradients, averages, _ = train(4, **fields) if way == "direct" else train_with_server(**marking(**fields))
    assert sum(reducer.context.residual.size for reducer in ranks.reducers) > 0
    gradients.append(ranks.gradients(STEPS))
    averages.append(ranks.reduce(STEPS, gradients[-1], flush=True))
    assert_identical(averages[-1])
    assert [reducer.context.residual.size for reducer in ranks.reducers] == [0] * ranks.count
    sent = [record for ledger in ranks.ledgers for record in ledger.of_step(STEPS)]
    assert len(sent) >= ranks.count
    assert not any(record.deferred or record.lost for record in sent)
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
        options = replace(reducer.context.options, layers=LayerBounds.parse("conv2.*=0.5"))
        reducer.context = replace(reducer.context, options=options)
    for step in range(3):
        ranks.reduce(step, ranks.gradients(step))
    assert ranks.lost > 0
    lost = ranks.lost
    ranks.reduce(3, ranks.gradients(3), flush=True)
    assert ranks.lost == lost
    assert [reducer.context.residual.size for reducer in ranks.reducers] == [0, 0]


def test_nothing_is_deferred_where_ports_are_alike():
    ranks, *_ = train(4, network=EvenPorts)
    assert sum(ledger.summary()["deferred"] for ledger in ranks.ledgers) == 0
    assert not sum(reducer.context.residual.size for reducer in ranks.reducers)


def test_nothing_is_deferred_in_the_first_steps():
    ranks = ManyValues(
        2, network=SlowPort, adaptive_shards=True, deferral_bound=BOUND, rate_bps=32 * MBIT, depth=96
    )  # fmt: skip
    for step in range(WHOLE_STEPS):
        ranks.reduce(step, ranks.gradients(step))
    assert sum(ledger.summary()["deferred"] for ledger in ranks.ledgers) == 0


def train_with_a_choice(network):
    """Steps of four ranks that may choose, and take the ring where ports are alike; return what ``train`` does."""
    ranks = ManyValues(4, network=network, adaptive_shards=True, deferral_bound=BOUND, rate_bps=32 * MBIT, depth=96)
    costs = Costs(rate_bps=32 * MBIT, flow_penalty=0.3)
    ranks.reducers = [make_reducer("auto", reducer.context, costs=costs) for reducer in ranks.reducers]
    for reducer in ranks.reducers:
        reducer.reducers["direct"].deferral._steps = WHOLE_STEPS
        reducer.context = reducer.reducers["direct"].context
    return ranks, *take_steps(ranks, STEPS)


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


def test_ranks_leave_a_ring_behind_a_slow_port_and_defer():
    ranks, gradients, averages, seconds = train_with_a_choice(SlowPort)
    assert [reducer.chosen for reducer in ranks.reducers] == [{"ring": 1, "direct": STEPS - 1}] * 4
    assert seconds[0] / np.median(seconds[3:]) >= 1.5
    assert sum(ledger.summary()["deferred"] for ledger in ranks.ledgers) > 0
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


def test_losses_on_top_keep_replicas_equal_and_sums():
    ranks, gradients, averages, _ = train(2, bound=0.1, loss=0.03, seed=4)
    assert ranks.lost > 0
    for each in averages:
        assert_identical(each)
    for name in SIZES:
        given = sum(rank[name].astype(np.float64) for step in gradients for rank in step)
        had = sum(step[0][name].astype(np.float64) for step in averages) * 2
        np.testing.assert_allclose(had + ranks.owed(name), given, atol=1e-3)
    assert all(ledger.summary()["violations"] == 0 for ledger in ranks.ledgers)


# The rule ---------------------------------------------------------------------------------------------------------


def ready(count, weights=None, ceiling=0.9, rates=None, seconds=None):
    one = Deferral(0, range(count), ceiling)
    for _ in range(WHOLE_STEPS + 1):
        for peer, each in (seconds or {}).items():
            one.note_average_sent(peer, each)
        one.begin_step(rates or {}, set(), weights or dict.fromkeys(range(count), 1.0))
    return one


def test_the_slow_rank_is_done_when_the_others_are():
    # Four ranks, the slow one owns nothing: (1 - q) 3 = 3 w + (1 - q)(1 - w) with w = 1/3, so 1 - q = 3/7.
    four = ready(4, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0}, rates={0: 9e6, 1: 9e6, 2: 9e6, 3: 3e6})
    assert four.shares([0, 0, 0, 0]) == {3: pytest.approx(4 / 7)}
    # Two ranks own halves: 3 u = 1/2 + u / 2, and 0.8 is more than a step may defer.
    assert ready(2, ceiling=0.6, rates={0: 3e6, 1: 1e6}).shares([0, 0]) == {1: pytest.approx(0.4)}


def test_how_long_averages_take_says_how_slow_a_slow_rank_is():
    rates = {0: 9e6, 1: 9e6, 2: 9e6, 3: 4e6}
    weights = {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0}
    one = ready(4, weights, rates=rates, seconds={1: 0.1, 2: 0.2, 3: 0.3})
    assert one.shares([0, 0, 0, 0]) == {3: pytest.approx(4 / 7)}
    for peer, seconds in ((1, 0.1), (3, 0.25)):
        one.note_average_sent(peer, seconds)
    assert one.shares([0, 0, 0, 0]) == {3: pytest.approx(4 / 7)}, "this step's count only when all peers are known"
    one.note_average_sent(2, 0.1)
    assert one.shares([0, 0, 0, 0]) == {3: pytest.approx(4 / 7)}, "deferral makes a port look faster"
    one.begin_step(rates, set(), weights)
    assert one.shares([0, 0, 0, 0]) == {3: pytest.approx(1 - 1 / (2.5 - 2 / 3))}


def test_rates_that_differ_little_defer_nothing():
    assert ready(4, rates={0: 2e6, 1: 2e6, 2: 2e6, 3: 1.1e6}).shares([0, 0, 0, 0]) == {}
    assert ready(4).shares([0, 0, 0, 0]) == {}
    assert ready(4, rates=dict.fromkeys(range(4), 2e6)).shares([0, 3e6, 2e6, 2e6]) == {}


def test_a_rank_counts_as_slow_for_the_rest_of_the_step_after():
    rates = {0: 9e6, 1: 9e6, 2: 9e6, 3: 3e6}
    one = ready(4, rates=rates)
    assert set(one.shares([0, 1e6, 0, 3e6])) == {1, 3}
    one.begin_step({**rates, 1: 3e6, 3: 9e6}, set(), dict.fromkeys(range(4), 1.0))
    assert set(one.shares([0, 1e6, 3e6, 3e6])) == {1}


def test_a_step_after_larger_gradients_is_whole():
    one = ready(2)
    sizes = np.ones(10, np.float32)
    for factor, allowed in ((1, True), (1.5, True), (4, False), (1, True), (float("nan"), False)):
        one.choose((ALL_GATHER, 0), sizes * factor, np.ones(10, np.bool_), 0.5, 5)
        one.begin_step({}, set(), {0: 1.0, 1: 1.0})
        assert one.is_allowed is allowed, factor


def test_the_least_valuable_are_chosen_within_the_limit():
    one = ready(2)
    magnitudes = np.array([5, 1, 4, 2, 3, 0], np.float32)
    candidates = np.array([1, 1, 1, 1, 1, 0], np.bool_)

    def chosen(share, limit):
        return np.flatnonzero(one.choose((ALL_GATHER, 0), magnitudes, candidates, share, limit)).tolist()

    assert chosen(0.5, 5) == [1, 3, 4]
    assert chosen(0.5, 2) == [1, 3]
    assert chosen(1.0, 9) == [0, 1, 2, 3, 4]
    assert one.choose((ALL_GATHER, 0), magnitudes, candidates, 0.05, 9) is None


def test_messages_of_small_values_defer_more_than_others():
    one, anywhere = ready(2), np.ones(100, np.bool_)
    messages = {0: np.linspace(1, 2, 100, dtype=np.float32), 1: np.linspace(1.5, 2.5, 100, dtype=np.float32)}

    def counts(share):
        found = [one.choose((ALL_GATHER, at), each, anywhere, share, 90).sum() for at, each in messages.items()]
        one.begin_step({}, set(), {0: 1.0, 1: 1.0})
        return found

    assert counts(0.5) == [50, 50], "nothing is known yet"
    assert counts(0.5) == [75, 25]
    assert counts(0.4) == [60, 20]
    assert one.choose((REDUCE_SCATTER, 0, 1), 9 * messages[0], anywhere, 0.5, 90).sum() == 50


def test_what_a_message_may_not_defer_others_do():
    magnitudes = {(at,): np.linspace(at, at + 1, 100, dtype=np.float32) for at in range(4)}
    assert shares_by_value(magnitudes, 0.25, 0.75) == {(0,): 0.75, (1,): 0.25, (2,): 0, (3,): 0}
    assert shares_by_value(magnitudes, 0.5, 0.75) == {(0,): 0.75, (1,): 0.75, (2,): 0.5, (3,): 0}
    assert shares_by_value(magnitudes, 0.8, 0.75) == dict.fromkeys(magnitudes, 0.75)
    single = {(at,): np.full(1, at, np.float32) for at in range(4)}
    assert shares_by_value(single, 0.5, 0.75) == {(0,): 0.75, (1,): 0.75, (2,): 0.75, (3,): 0}, "none can be divided"


def test_each_packet_is_due_once_in_a_while():
    turns = sum(Deferral.due(3, 100, step).astype(int) for step in range(REFRESH_STEPS))
    assert (turns == 1).all()
    np.testing.assert_array_equal(Deferral.due(0, 103, 5)[3:], Deferral.due(3, 100, 5), "whatever shard it is in")


# A parameter server ------------------------------------------------------------------------------------------------


def train_with_server(*, deferral_bound=BOUND, steps=STEPS, bound=0.0, whole=0, value_type=ValueType.FLOAT32, **fields):
    """Steps of two workers with a server after the whole ones; return what ``train`` does."""
    fields.setdefault("rate_bps", 32 * MBIT)
    ranks = ManyValues(2, server=True, bound=bound, deferral_bound=deferral_bound, value_type=value_type, **fields)
    ranks.serve()
    for deferral in [ranks.server._deferral, *(reducer.deferral for reducer in ranks.reducers if reducer.deferral)]:
        deferral._steps = WHOLE_STEPS - whole
    return ranks, *take_steps(ranks, steps)


def marking(**fields):
    """A network whose queues mark packets, and so say that they are congested."""
    return {"network": EvenPorts, "depth": 96, "ecn_depth": 8, "clear_after_s": 60.0, **fields}


def test_through_a_server_a_step_is_shorter_in_both_directions():
    *_, whole = train_with_server(deferral_bound=0.0, **marking())
    ranks, _, _, seconds = train_with_server(**marking())
    assert np.median(whole[3:]) / np.median(seconds[3:]) >= 1.5
    for ledger in [ranks.server.ledger, *ranks.ledgers]:
        summary = ledger.summary()
        assert summary["deferred"] > 0
        assert summary["violations"] == 0
        assert summary["max_deferred_ratio"] <= BOUND


@pytest.mark.parametrize("fields", [{}, LOSSY], ids=["whole", "lossy"])
def test_workers_owe_what_a_server_defers(fields):
    ranks, gradients, averages, _ = train_with_server(**marking(**fields))
    assert ranks.server.ledger.summary()["deferred"] > 0
    for each in averages:
        assert_identical(each)
    for name in SIZES:
        given = sum(rank[name].astype(np.float64) for step in gradients for rank in step)
        had = sum(step[0][name].astype(np.float64) for step in averages) * 2
        np.testing.assert_allclose(had + ranks.owed(name), given, atol=1e-3)


@pytest.mark.parametrize("value_type", list(ValueType), ids=lambda kind: kind.value)
def test_a_server_defers_in_every_format(value_type):
    ranks, gradients, averages, _ = train_with_server(value_type=value_type, **marking())
    assert not ranks.server.failed.done()
    assert ranks.server.ledger.summary()["deferred"] > 0
    widen = value_type.widen
    for each in averages:
        assert_identical(each)
    for name in ("conv1.weight", "conv2.weight"):
        given = sum(widen(rank[name]).astype(np.float64) for step in gradients for rank in step)
        had = sum(widen(step[0][name]).astype(np.float64) for step in averages) * 2
        assert np.abs(had + ranks.owed(name) - given).mean() < 0.03, name  # 16-bit sums are rounded


def test_a_server_puts_nothing_off_of_what_is_exact():
    ranks, *_ = train_with_server(**marking())
    values = [np.arange(400_000, dtype=np.float32) + rank for rank in range(2)]
    started = []
    for rank, reducer in enumerate(ranks.reducers):
        reducer.begin_step(STEPS)
        segments = [Segment(layers_in_order(["counts"])["counts"], 0, 400_000)]
        started.append(reducer.start(STEPS, 0, Bucket(values[rank], ValueType.FLOAT32, segments, exact=True)))
    ranks.network.run(lambda: all(each.done() for each in started) or ranks.server.failed.done())
    assert not ranks.server.failed.done()
    for each in started:
        np.testing.assert_array_equal(each.result(), np.arange(400_000, dtype=np.float32) + np.float32(0.5))
    ranks.network.run(lambda: ranks.network.ranks[2].settled)
    assert [record.deferred for record in ranks.server.ledger.of_step(STEPS)] == [0, 0]


def test_nothing_goes_to_a_server_later_if_nothing_says_that_it_is_congested():
    ranks, *_ = train_with_server(**marking(rate_bps=10_000 * MBIT, depth=10_000, ecn_depth=10_000))
    assert not any(ledger.summary()["deferred"] for ledger in [ranks.server.ledger, *ranks.ledgers])


def test_the_first_steps_through_a_server_are_whole():
    ranks, *_ = train_with_server(steps=3, whole=3, **marking())
    assert not any(ledger.summary()["deferred"] for ledger in [ranks.server.ledger, *ranks.ledgers])


@pytest.mark.parametrize("fields", [{"compression": "powersgd:2"}, {"layers": LayerBounds.parse("fc.*=0")}], ids=str)
def test_what_a_server_cannot_know_must_not_be_deferred(fields):
    ranks = ManyValues(2, server=True)
    layers = fields.pop("layers", LayerBounds())
    options = ReduceOptions(LossBound(0.1, deferral=BOUND), layers=layers)
    context = RankContext(ranks.connections[0], [0, 1], options)
    with pytest.raises(ValueError, match="deferral_bound=0"):
        make_reducer("server", context, topology=Topology(server=2), **fields)
