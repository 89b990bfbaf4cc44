# SPDX-License-Identifier: Apache-2.0
"""Ranks choose the fastest arm from their reports on steps; no step runs here."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp.policies.arms import (
    FIRST_BACK_OFF,
    FIRST_PERIOD,
    LAG,
    WARM_UP,
    Arm,
    ArmChooser,
    Route,
    StepReport,
    trial_steps,
)
from dlcp.session import Options, join
from dlcp.session.choosing import arms_of
from tests.transport.free_ports import free_port

WHOLE, GLOO, EIGHT = ARMS = Arm(Route.DLCP), Arm(Route.FRAMEWORK), Arm(Route.DLCP, 8)
TRIAL_STEPS = trial_steps(len(ARMS))
CHOSEN = WARM_UP + TRIAL_STEPS + LAG
"""The first step by which the first trial of all arms has been judged, if the first step is 0."""


def report(step_s=0.1, waited_s=0.02, *, lossy=False, queued=False):
    return StepReport(step_s, waited_s, lossy, queued)


@dataclass
class Run:
    """Training in which a chooser chooses the arms; ``world(step, arm)`` is the report on a step."""

    world: object
    chooser: ArmChooser = field(default_factory=lambda: ArmChooser(ARMS, "gloo"))
    arms: list = field(default_factory=list)
    reported: list = field(default_factory=list)
    seconds: list = field(default_factory=list)
    first: int = 0
    _pending: tuple | None = None
    _last: StepReport | None = None

    def go(self, steps):
        chooser = self.chooser
        for _ in range(steps):
            step = self.first + len(self.arms)
            if self._pending:
                chooser.observe(*self._pending)
                self._pending = None
            if self.arms and chooser.wants(step - 1):
                self.reported.append(step - 1)
                self._pending = step - 1, self._last
            self.arms.append(chooser.choose(step))
            self._last = self.world(step, self.arms[-1])
            self.seconds.append(self._last.step_s)
        return self

    def steps_with(self, arm, first=0):
        return [step for step, each in enumerate(self.arms) if each is arm and step >= first]


def times(whole_s, gloo_s, eight_s, waits=True, **signs):
    taken = dict(zip(ARMS, (whole_s, gloo_s, eight_s), strict=True))
    return lambda _, arm: report(taken[arm], max(0.0, taken[arm] - 0.08) if waits else 0.0, **signs)


@pytest.mark.parametrize(
    ("taken", "best", "words"),
    [
        ((0.118, 0.101, 0.13), GLOO, "gloo since step {}: 101 ms a step; 8 bits 130 ms, 32 bits 118 ms"),
        ((0.118, 0.13, 0.133), WHOLE, "32 bits since step {}: 118 ms a step; 8 bits 133 ms, gloo 130 ms"),
        ((0.12, 0.125, 0.1), EIGHT, "8 bits since step 0: 100 ms a step; 32 bits 120 ms"),
    ],
)
def test_the_fastest_is_taken_once_measured_and_said_in_one_line(taken, best, words):
    run = Run(times(*taken)).go(FIRST_PERIOD)
    assert run.arms[0] is EIGHT, "the cheaper mistake"
    assert set(run.arms[CHOSEN:]) == {best}
    assert run.chooser.decision == words.format(run.chooser.since)
    assert run.arms[run.chooser.since] is best


def test_what_is_as_fast_and_more_exact_is_preferred():
    assert Run(times(0.101, 0.1, 0.1)).go(CHOSEN).chooser.settled is WHOLE


def test_where_computing_hides_communication_all_bits_are_sent():
    assert Run(times(0.1, 0.1, 0.1, waits=False)).go(CHOSEN).chooser.settled is WHOLE


def test_where_all_ranks_wait_for_a_full_network_nothing_longer_is_tried():
    run = Run(times(0.3, 0.3, 0.1, queued=True)).go(30_000)
    assert set(run.arms) == {EIGHT}
    assert run.chooser.decision == "8 bits since step 0: packets queue in the network"


def test_the_framework_is_not_tried_while_packets_are_lost():
    run = Run(times(0.09, 1.0, 0.1, lossy=True)).go(2000)
    assert GLOO not in run.arms
    assert run.chooser.settled is WHOLE


def test_a_network_that_becomes_clear_is_tried_then():
    def world(step, arm):
        return report(0.3 if step < 50 and arm is not EIGHT else 0.1, 0.02, queued=step < 50)

    run = Run(world).go(50 + TRIAL_STEPS + 10)
    assert set(run.arms[:50]) == {EIGHT}
    assert run.chooser.settled is WHOLE


@pytest.mark.parametrize(("factor", "steps"), [(4, 1), (1.9, 1 + 1 + LAG)])
def test_a_bad_arm_costs_few_steps(factor, steps):
    run = Run(times(0.1 * factor, 0.1 * factor, 0.1)).go(CHOSEN)
    assert len(run.steps_with(WHOLE)) == steps
    assert GLOO not in run.arms, "it sends as much"
    assert f"32 bits {100 * factor:.0f} ms" in run.chooser.decision


def test_steps_are_weighed_with_their_number():
    """With 4 bits a step takes 0.1 s, with 8 bits 0.105, but training needs 1.17 times the steps."""
    four = Arm(Route.DLCP, 4, 1.17)
    taken = {WHOLE: 0.2, EIGHT: 0.105, four: 0.1}
    run = Run(lambda _, arm: report(taken[arm], 0.05), ArmChooser((WHOLE, EIGHT, four))).go(60)
    assert run.arms[0] is four
    assert run.chooser.settled is EIGHT
    assert run.chooser.decision.endswith("105 ms a step; 32 bits 200 ms, 4 bits 100 ms")


@given(st.floats(1, 6), st.floats(0.9, 2))
@settings(max_examples=100, deadline=None)
def test_trials_are_cheap(whole, gloo):
    """At most 5 % of the first 100 steps and 2 % of the first 1,000, over arms that take up to six times as long."""
    taken = {WHOLE: 0.1 * whole, GLOO: 0.1 * whole * gloo, EIGHT: 0.1}
    run = Run(lambda _, arm: report(taken[arm], taken[arm] - 0.08), ArmChooser(ARMS, "gloo"))
    for steps, share in ((100, 0.06), (900, 0.023)):
        run.go(steps)
        assert sum(run.seconds) <= (1 + share) * min(taken.values()) / 0.97 * len(run.seconds)


def test_trials_get_rare_and_reports_too_where_steps_are_short():
    run = Run(times(0.005, 0.0051, 0.0052), ArmChooser(ARMS, "gloo", report_s=120e-6)).go(30_000)
    assert len(run.steps_with(EIGHT, CHOSEN)) < 60
    assert len(run.reported) < 30_000 / 4


def test_an_arm_that_becomes_slow_is_left_within_two_steps_and_not_at_once_taken_again():
    breaks_at = 100
    run = Run(lambda step, arm: report(0.12 if arm is EIGHT else 0.4 if step >= breaks_at else 0.1, 0.3))
    run.world = lambda step, arm: (
        report(0.12) if arm is EIGHT else report(0.4, 0.3) if step >= breaks_at else report(0.1)
    )
    run.go(breaks_at + LAG + FIRST_BACK_OFF)
    assert run.arms[breaks_at - 1] is WHOLE
    assert run.steps_with(WHOLE, breaks_at) == [breaks_at, breaks_at + 1]
    since = f"8 bits since step {breaks_at + LAG}: "
    assert run.chooser.decision == since + "a step with 32 bits took 400 ms, usually 100 ms"
    assert len(run.go(10_000).steps_with(WHOLE, breaks_at)) < 20


@pytest.mark.parametrize("pause_s", [0.06, 1.0, 100.0])
def test_a_pause_of_the_script_or_one_slow_rank_changes_nothing(pause_s):
    """Then one rank does not wait, however long the others do."""
    taken = {WHOLE: 0.118, GLOO: 0.101, EIGHT: 0.125}
    run = Run(lambda step, arm: report(taken[arm] + pause_s * (step % 10 == 9))).go(FIRST_PERIOD)
    assert set(run.arms[CHOSEN:]) == {GLOO}


def test_an_oracle_is_hardly_better_where_the_network_changes():
    """Clear, congested, slow and clear again: 150 steps each, for which an oracle knows the best arm."""
    phases = [((0.1, 0.1, 0.105), {}), ((0.4, 0.5, 0.2), {"queued": True, "lossy": True})]
    phases += [((0.3, 0.3, 0.12), {"queued": True}), phases[0]]
    best = sum(150 * min(taken) for taken, _ in phases)

    def world(step, arm):
        taken, signs = phases[min(step // 150, 3)]
        return times(*taken, **signs)(step, arm)

    assert sum(Run(world).go(600).seconds) < 1.05 * best


def test_it_makes_no_difference_at_which_step_training_begins():
    world = times(0.118, 0.101, 0.13)
    early = Run(world).go(60)
    late = Run(world, ArmChooser(ARMS, "gloo", first_step=7000), first=7000).go(60)
    assert late.arms == early.arms


reports = st.builds(report, st.floats(0, 1e6), st.floats(0, 1e6), lossy=st.booleans(), queued=st.booleans())


@given(st.lists(reports, min_size=1, max_size=30), st.integers(1, 29))
@settings(max_examples=200)
def test_whatever_is_reported_there_is_an_arm_and_a_reason(drawn, stride):
    run = Run(lambda step, _: drawn[step * stride % len(drawn)]).go(400)
    assert set(run.arms) <= set(ARMS)
    assert set(run.arms[:WARM_UP]) == {EIGHT}
    assert run.chooser.decision


@given(reports, reports)
def test_of_all_ranks_the_longest_step_counts_and_the_shortest_wait(one, two):
    both = StepReport.from_maxima([max(pair) for pair in zip(one.to_maxima(), two.to_maxima(), strict=True)])
    assert both.step_s == max(one.step_s, two.step_s)
    assert both.waited_s == min(one.waited_s, two.waited_s)
    assert both.lossy == (one.lossy or two.lossy)
    assert both.queued == (one.queued and two.queued)


# What may be chosen from ----------------------------------------------------------------------------------------------

LEAVES_NOTHING = [
    {"combine": "sum", "fallback": False},
    {"samples": 4},
    {"collective": "server:10.0.0.9:53696"},
]


@pytest.mark.parametrize("chosen", LEAVES_NOTHING)
def test_where_more_than_an_average_is_wanted_the_framework_is_no_choice(chosen):
    assert GLOO not in arms_of(Options(**chosen), framework=True, remote=True)
    with pytest.raises(ValueError, match=f"which has no {next(iter(chosen))}: omit one of the two"):
        Options(**chosen, route="framework")


@pytest.mark.parametrize(
    ("chosen", "remote", "arms"),
    [
        ({}, True, ["dlcp 32", "framework 32", "dlcp 8"]),
        ({}, False, ["dlcp 32"]),
        ({"route": "dlcp"}, True, ["dlcp 32", "dlcp 8"]),
        ({"precision": "fast"}, True, ["dlcp 32", "framework 32", "dlcp 8", "dlcp 4"]),
        ({"precision": "exact"}, True, ["dlcp 32", "framework 32"]),
        ({"precision": 4}, True, ["dlcp 4"]),
        ({"error_feedback": False, "collective": "ring"}, True, ["dlcp 32", "framework 32"]),
        ({"compression": "powersgd:4"}, True, ["dlcp 32", "dlcp 8"]),
        ({"compression": "topk:0.1"}, True, ["dlcp 32"]),
        ({"collective": "server:10.0.0.9:53696"}, True, ["dlcp 8"]),
        ({"route": "framework"}, True, ["framework 32"]),
    ],
)
def test_the_ranks_choose_from_what_the_user_allows(chosen, remote, arms):
    found = arms_of(Options(**chosen), framework=True, remote=remote)
    assert [f"{arm.route.value} {arm.bits}" for arm in found] == arms


def test_exact_loses_nothing():
    assert Options(precision="exact", loss_bound=0.1).bound().ratio == 0


def test_what_has_no_framework_refuses_its_route():
    with pytest.raises(ValueError, match="route must be one of auto, dlcp, framework, got 'gloo'"):
        Options(route="gloo")
    with pytest.raises(ValueError, match=r"route 'framework' needs PyTorch: dlcp\.session\.join averages with DLCP"):
        join(Options(route="framework"), rank=0, size=2, master=f"127.0.0.1:{free_port()}")
    backend = pytest.importorskip("dlcp.torch.backend")
    with pytest.raises(ValueError, match="a group of backend dlcp does not support route"):
        backend._heeded(Options(route="framework"))
    assert backend._heeded(Options(route="dlcp")).route == "dlcp"
