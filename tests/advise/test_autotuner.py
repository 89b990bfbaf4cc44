# SPDX-License-Identifier: Apache-2.0
"""All ranks choose alike, between two steps, by what all have told; and layers keep bounds of their own."""

import re
from dataclasses import replace
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import pytest

from dlcp.collectives import Bucket, DirectAllReduce, RingAllReduce
from dlcp.collectives.bucket import LayerBounds
from dlcp.collectives.deferral import Deferral
from dlcp.convergence import COST_OF_DEFERRAL, steps_factor
from dlcp.dtypes import ValueType
from dlcp.ledger import add_up
from dlcp.phases import TIGHT_RATIO, Phases
from dlcp.session import Options
from dlcp.session.averager import StepAverager
from dlcp.session.session import Fallback, TrainingSession
from dlcp.tags import Segment
from dlcp.transport import LossBound
from dlcp.tuning import autotuner as autotuner_module
from dlcp.tuning.autotuner import NORM_VALUES, Autotuner, squares_of
from dlcp.tuning.rules import Advice, Choice, Settings
from dlcp.wire import Flag, PacketType
from tests.collectives.test_deferral import SIZES, SlowPort
from tests.collectives.virtual_ranks import LAYERS, NOTHING_PROTECTED, SMALL_SIZES, SmallRanks, assert_identical
from tests.collectives.virtual_ring import RingRanks
from tests.transport.network import endpoint_of

WARM_UP_STEPS, WINDOW_STEPS = 2, 4
FIRST_CHOICE = WARM_UP_STEPS + WINDOW_STEPS


def hurry():
    """Let autotuners choose after fewer steps than in real training."""
    autotuner_module.WARM_UP_STEPS, autotuner_module.WINDOW_STEPS = WARM_UP_STEPS, WINDOW_STEPS


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(autotuner_module, "WARM_UP_STEPS", WARM_UP_STEPS)
    monkeypatch.setattr(autotuner_module, "WINDOW_STEPS", WINDOW_STEPS)


class Autotuned(SmallRanks):
    """Ranks whose steps begin with metadata, and whose sessions follow their autotuners."""

    allowed = 0.1
    """The loss bound that ranks are given."""

    def __init__(self, count, **fields):
        chosen = {name: fields.pop(name) for name in ("adapt", "phases") if name in fields}
        super().__init__(count, policy=NOTHING_PROTECTED, **fields)
        self.made = [[] for _ in range(count)]
        self.sessions = [self.session(rank, range(count), plain, chosen) for rank, plain in enumerate(self.reducers)]
        self.tuners = [session.averager.autotuner for session in self.sessions]

    def session(self, rank, ranks, plain, chosen):
        context = plain.context
        shared = {"tagger": context.tagger, "ledger": context.ledger, "feedback": context.residual}

        def make(settings):
            kind = RingAllReduce if settings.collective == "ring" else DirectAllReduce
            self.made[rank].append(settings.collective)
            bound = replace(context.options.bound, deferral=settings.deferral_bound)
            options = replace(context.options, bound=bound)
            return kind(replace(context, options=options))

        session = TrainingSession(StepAverager(Options(), rank, ranks, **shared), Fallback("nothing"))
        session._exit.cancel()  # a rank in virtual time has no network to leave when the tests end
        given = Settings(self.allowed, deferral_bound=context.options.deferral_bound)
        size = 4 * sum(self.sizes.values())
        session.averager.autotuner = Autotuner(given, LossBound(self.allowed), rank, ranks)
        session.averager.autotuner.measure(
            self.ledgers[rank],
            self.connections[rank],
            hosts=1,
            gradient_bytes=size,
            inbound_rates_bps=context.inbound_rates_bps,
            **chosen,
        )
        session.use(endpoint_of(self.connections[rank]), make)
        return session

    def step(self, step, gradients):
        """Metadata, then one bucket; return each rank's average."""
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
            session.averager.autotuner.on_gradients_ready()
        self.network.run(lambda: all(each.done() for each in started))
        return [{"all": each.result()} for each in started]


def test_all_ranks_choose_the_same_bound_at_the_same_step():
    ranks = Autotuned(3, bound=0.1, adapt=True)
    bounds = []
    for step in range(FIRST_CHOICE + 2 * WINDOW_STEPS):
        ranks.network.loss = 0.05 if step >= FIRST_CHOICE else 0.0
        assert_identical(ranks.step(step, ranks.gradients(step)))
        bounds.append({tuner.bound.ratio for tuner in ranks.tuners})
        assert len({tuner.settings for tuner in ranks.tuners}) == 1
    assert all(bound == {0.1} for bound in bounds[: FIRST_CHOICE - 1])
    assert bounds[FIRST_CHOICE] == {0.0}, "nothing was lost"
    assert max(bounds[-1]) > 0, "one packet in twenty was lost"
    by_step = {step: sum(r.lost for ledger in ranks.ledgers for r in ledger.of_step(step)) for step in range(30)}
    assert not any(by_step[step] for step in range(FIRST_CHOICE, FIRST_CHOICE + WINDOW_STEPS - 1))


class Deferring(Autotuned):
    """Three ranks, the last of them behind a port of a third of the others' rate, that may defer."""

    sizes = SIZES
    allowed = 0.0  # nothing is lost, so another bound would be chosen, and deferral begin anew with whole steps

    def __init__(self, bound):
        super().__init__(
            3,
            bound=0.0,
            adapt=True,
            network=SlowPort,
            adaptive_shards=True,
            deferral_bound=bound,
            rate_bps=32e6,
            depth=96,
        )

    def compute(self, seconds):
        due_s = self.network.now + seconds
        self.network.at(due_s, lambda: None)
        self.network.run(lambda: self.network.now >= due_s, step_s=0.01)


@pytest.mark.parametrize("bound", [0.0, 0.75])
def test_it_is_deferred_only_while_that_brings_the_accuracy_sooner(monkeypatch, bound):
    ranks = Deferring(bound)
    monkeypatch.setattr(autotuner_module, "time", SimpleNamespace(monotonic=lambda: ranks.network.now))
    last_of, steps = {}, count()
    phases = [("waiting", 0.0), ("computing", 3.0), ("waiting again", 0.0)]
    for phase, computing_s in phases if bound else phases[:2]:
        chosen, deferred, seconds = [], [], []
        for step in islice(steps, WARM_UP_STEPS + 3 * WINDOW_STEPS):
            ranks.compute(computing_s)
            began_s = ranks.network.now
            assert_identical(ranks.step(step, ranks.gradients(step)))
            assert len({tuner.settings for tuner in ranks.tuners}) == 1, "all choose alike"
            chosen.append(ranks.tuners[0].settings.deferral_bound)
            deferred.append(sum(r.deferred for ledger in ranks.ledgers for r in ledger.of_step(step)))
            seconds.append(ranks.network.now - began_s)
        why = ranks.tuners[0].advice.choices[-1].why
        last_of[phase] = chosen[-1], sum(deferred[-3:]) > 0, why, float(np.median(seconds[-5:]))
    expected = [(bound, bound > 0), (0.0, False), (bound, bound > 0)]
    assert [found[:2] for found in last_of.values()] == expected[: len(last_of)]
    # Three times more slowly, or what is left of the others' packets for a port to which half is not sent.
    assert all(re.match(r"rank 2 receives [345]\.", why) for _, _, why, _ in last_of.values()), last_of
    if not bound:
        assert all("deferral has not been allowed" in why for _, _, why, _ in last_of.values())
        return
    assert "times as long, so deferral gains nothing" in last_of["computing"][2]
    whole_s = last_of["computing"][3]
    for phase in ("waiting", "waiting again"):
        _, _, why, cut_s = last_of[phase]
        foreseen = [float(ms) / 1e3 for ms in re.search(r"from ([0-9.]+) to ([0-9.]+) ms", why).groups()]
        assert foreseen == pytest.approx([whole_s, cut_s], rel=0.1)
        assert cut_s * steps_factor(COST_OF_DEFERRAL, 0.5) < whole_s


def other_settings(**changes):
    def decide(figures, given, now, **_):
        settings = replace(given, **changes)
        return Advice(figures, [Choice(name, getattr(settings, name), 0, "") for name in Settings.__dataclass_fields__])

    return decide


def test_the_collective_changes_between_two_steps_on_all_ranks_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(autotuner_module, "decide", other_settings(collective="ring"))
    ranks = Autotuned(3, bound=0.1, loss=0.1, adapt=True, seed=2, value_type=ValueType.FLOAT64)
    given = taken = 0.0
    for step in range(FIRST_CHOICE + 3):
        gradients = ranks.gradients(step)
        averages = ranks.step(step, gradients)
        assert_identical(averages)
        given = given + sum(np.concatenate(list(rank.values())) for rank in gradients)
        taken = taken + 3 * averages[0]["all"]
    assert ranks.made == [["direct", "ring"]] * 3
    feedbacks = [session.averager.feedback for session in ranks.sessions]
    owed = np.concatenate(
        [
            sum(part if (part := each.of(name)) is not None else np.zeros(size) for each in feedbacks)
            for name, size in SMALL_SIZES.items()
        ]
    )
    np.testing.assert_allclose(taken + owed, given, atol=1e-9)


def test_the_bound_is_tight_in_critical_regimes(monkeypatch):
    monkeypatch.setattr(autotuner_module, "Phases", lambda: Phases(4))
    ranks = Autotuned(2, bound=0.1, phases=True)
    found = []
    for step in range(20):
        size = 5.0 if step >= 12 else 1.0
        gradients = [{name: np.float32(size) * values for name, values in rank.items()} for rank in ranks.gradients(0)]
        ranks.step(step, gradients)
        assert len({tuner.bound.ratio for tuner in ranks.tuners}) == 1
        found.append(ranks.tuners[0].bound.ratio)
    assert found[:8] == [TIGHT_RATIO] * 8, "the first windows are critical"
    assert found[9:12] == [0.1] * 3, "and steady ones are not"
    assert found[17:20] == [TIGHT_RATIO] * 3, "until the norm jumps"


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


def adapting(worker, changes):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch
    from tests.torch.ddp_models import BUCKET_MB, make, train

    hurry()
    if changes:
        autotuner_module.decide = other_settings(**changes)
    model = DistributedDataParallel(make(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(adapt=True, phases=True, samples=12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, worker.rank, FIRST_CHOICE + 3)
    tuner, active = state.session.averager.autotuner, state.active
    digest = dlcp.torch.parameter_digest(model.module)
    state.close()
    return tuner.settings, active, digest, tuner.advice.figures.packets > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("changes", [{}, {"compression": "bf16", "collective": "auto"}], ids=["by figures", "all new"])
def test_training_adapts_while_it_goes_on(changes):
    pytest.importorskip("torch")
    from tests.torch.workers import launch, values

    found = values(launch(2, adapting, changes))
    assert found[0] == found[1]
    settings, active, _, measured = found[0]
    assert active
    assert measured
    if changes:
        assert settings == replace(Settings(), **changes)


def deferring_no_longer(worker):
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch
    from tests.torch.ddp_models import BUCKET_MB, Linear, gradients_of

    hurry()
    other = 1 - worker.rank
    Deferral.shares = lambda self, rates, **_: {other: 0.5} if self.is_allowed else {}  # as if a port were slow
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(adapt=True, deferral_bound=0.75, loss_bound=0.0))
    wanted, taken, deferred, bounds = gradients_of(worker.rank), [0.0, 0.0], [], []
    for step in range(FIRST_CHOICE + 3):
        if step == FIRST_CHOICE - 1:
            autotuner_module.decide = other_settings(deferral_bound=0.0)
        model.zero_grad()
        model(*wanted).backward()
        taken = [total + p.grad for total, p in zip(taken, model.module.parameters(), strict=True)]
        deferred.append(sum(record.deferred for record in state.ledger.of_step(step)))
        bounds.append(state.session.averager.autotuner.settings.deferral_bound)
    left = state.feedback.size
    state.close()
    return deferred, bounds, left, [part.numpy() for part in taken]


@pytest.mark.timeout(120)
def test_a_deferral_bound_that_is_taken_back_holds_from_the_next_step_on_and_what_was_put_off_is_sent():
    pytest.importorskip("torch")
    from tests.torch.ddp_models import gradients_of
    from tests.torch.workers import launch, values

    steps = FIRST_CHOICE + 3
    for deferred, bounds, left, taken in values(launch(2, deferring_no_longer)):
        assert bounds == [0.75] * (FIRST_CHOICE - 1) + [0.0] * (steps - FIRST_CHOICE + 1)
        assert deferred[FIRST_CHOICE - 2] > 0
        assert not any(deferred[FIRST_CHOICE - 1 :])
        assert left == 0
        for got, mine, other in zip(taken, gradients_of(0), gradients_of(1), strict=True):
            np.testing.assert_allclose(2 * got, steps * (mine + other).numpy(), atol=2e-4)
