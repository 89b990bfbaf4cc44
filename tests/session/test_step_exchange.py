# SPDX-License-Identifier: Apache-2.0
"""All ranks bound a step alike, by what all have told; and layers keep bounds of their own."""

from dataclasses import replace

import numpy as np
import pytest

from dlcp.collectives import Bucket
from dlcp.collectives.bucket import LayerBounds
from dlcp.dtypes import ValueType
from dlcp.ledger import add_up
from dlcp.phases import TIGHT_RATIO, Phases
from dlcp.session import Options, step_exchange
from dlcp.session.averager import StepAverager
from dlcp.session.session import Fallback, TrainingSession
from dlcp.session.step_exchange import NORM_VALUES, StepExchange, squares_of
from dlcp.tags import Segment
from dlcp.transport import LossBound
from dlcp.wire import Flag, PacketType
from tests.collectives.virtual_ranks import LAYERS, NOTHING_PROTECTED, SmallRanks, assert_identical
from tests.collectives.virtual_ring import RingRanks
from tests.transport.network import endpoint_of

BOUND = 0.1


class PhasedRanks(SmallRanks):
    """Ranks whose steps begin with metadata, which sets their bounds."""

    def __init__(self, count):
        super().__init__(count, bound=BOUND, policy=NOTHING_PROTECTED)
        self.sessions = [self.session(rank, reducer) for rank, reducer in enumerate(self.reducers)]
        self.exchanges = [session.averager.exchange for session in self.sessions]

    def session(self, rank, reducer):
        context = reducer.context
        shared = {"tagger": context.tagger, "ledger": context.ledger, "feedback": context.residual}
        session = TrainingSession(StepAverager(Options(), rank, range(self.count), **shared), Fallback("nothing"))
        session._exit.cancel()  # a rank in virtual time has no network to leave when the tests end
        session.averager.exchange = StepExchange(LossBound(BOUND), rank, range(self.count), phases=True)
        session.use(endpoint_of(self.connections[rank]), reducer)
        return session

    def step(self, step, gradients):
        """Metadata, then one bucket."""
        for session in self.sessions:
            session.begin_step(step)
        self.network.run(lambda: all(session._metadata.done() for session in self.sessions))
        started = []
        for rank, session in enumerate(self.sessions):
            assert session.weight(step) == 1
            values = np.concatenate(list(gradients[rank].values()))
            stops = np.cumsum([len(part) for part in gradients[rank].values()]).tolist()
            segments = [
                Segment(LAYERS[name], *ends)
                for name, *ends in zip(gradients[rank], [0, *stops[:-1]], stops, strict=True)
            ]
            started.append(session.average(step, 1, Bucket(values, self.value_type, segments)))
        self.network.run(lambda: all(each.done() for each in started))


def test_the_bound_is_tight_in_critical_regimes(monkeypatch):
    monkeypatch.setattr(step_exchange, "Phases", lambda: Phases(4))
    ranks = PhasedRanks(2)
    found = []
    for step in range(20):
        size = 5.0 if step >= 12 else 1.0
        gradients = [{name: np.float32(size) * values for name, values in rank.items()} for rank in ranks.gradients(0)]
        ranks.step(step, gradients)
        assert len({exchange.bound.ratio for exchange in ranks.exchanges}) == 1
        found.append(ranks.exchanges[0].bound.ratio)
    assert found[:8] == [TIGHT_RATIO] * 8, "the first windows are critical"
    assert found[9:12] == [BOUND] * 3, "and steady ones are not"
    assert found[17:20] == [TIGHT_RATIO] * 3, "until the norm jumps"


@pytest.mark.parametrize("immediate", [False, True])
def test_phases_leave_the_rest_of_the_bound(immediate):
    for phases in (False, True):
        bound = StepExchange(LossBound(BOUND, immediate), 0, range(2), samples=4, phases=phases).bound
        assert bound == LossBound(TIGHT_RATIO if phases else BOUND, immediate)


def test_the_norm_of_a_large_bucket_is_reckoned_from_a_part_of_it():
    values = np.random.default_rng(0).standard_normal(5 * NORM_VALUES).astype(np.float32)
    segments = [Segment(LAYERS["fc.weight"], 0, len(values))]
    assert squares_of(Bucket(values, ValueType.FLOAT32, segments)) == pytest.approx(len(values), rel=0.02)
    short = Bucket(ValueType.BFLOAT16.narrow(np.full(100, 3, np.float32)), ValueType.BFLOAT16, segments)
    assert squares_of(short) == pytest.approx(900)


def nearly_all_at_first(_, source, header):
    """Lose nearly all that may be lost, when it is sent for the first time."""
    first = header.type is PacketType.DATA and not header.flags & Flag.RETRANSMISSION
    return bool(first) and bool(header.drop_class) and header.index % 8 != 7


OWN_BOUNDS = LayerBounds.parse("conv1*=0, fc*=0.3")


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
