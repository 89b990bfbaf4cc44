# SPDX-License-Identifier: Apache-2.0
"""The ranks take the faster of two routes, from what they have seen of each step; no step runs here."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp.session import Options, join
from dlcp.session.route import (
    FIRST_BACK_OFF,
    FIRST_PERIOD,
    LAG,
    TRIAL,
    WARM_UP,
    Route,
    RouteChooser,
    StepReport,
    may_choose,
)
from tests.transport.free_ports import free_port

TRIAL_ENDS = WARM_UP + len(TRIAL) + LAG - 1
"""The first step by which the first trial has been judged, if the first step is 0."""


def report(step_s=0.1, waited_s=0.02, *, lossy=False, queued=False, remote=True):
    return StepReport(step_s, waited_s, lossy, queued, remote)


@dataclass
class Run:
    """Steps whose routes a chooser chooses; ``world`` says what a step over a route is like."""

    world: object
    chooser: RouteChooser = field(default_factory=lambda: RouteChooser("gloo"))
    routes: list = field(default_factory=list)
    reported: list = field(default_factory=list)
    _pending: tuple | None = None

    def go(self, steps):
        chooser = self.chooser
        for _ in range(steps):
            step = len(self.routes)
            if self._pending:
                chooser.observe(*self._pending)
                self._pending = None
            if step and chooser.wants(step - 1):
                self.reported.append(step - 1)
                self._pending = step - 1, self.world(step - 1, self.routes[-1])
            self.routes.append(chooser.route(step))
        return self

    def by_framework(self, first=0):
        return [step for step, route in enumerate(self.routes) if route is Route.FRAMEWORK and step >= first]


def times(dlcp_s, framework_s):
    return lambda _, route: report(dlcp_s if route is Route.DLCP else framework_s)


def test_the_faster_framework_is_taken_once_measured_and_said_in_one_sentence():
    run = Run(times(0.118, 0.101)).go(FIRST_PERIOD)
    assert run.by_framework()[0] == WARM_UP + TRIAL.index(Route.FRAMEWORK)
    assert run.by_framework(TRIAL_ENDS) == list(range(TRIAL_ENDS, FIRST_PERIOD))
    assert run.chooser.decision == f"framework since step {TRIAL_ENDS}: gloo 101 ms a step, DLCP 118 ms"


@pytest.mark.parametrize("framework_s", [0.098, 0.1, 0.13])
def test_dlcp_stays_unless_the_framework_is_clearly_faster(framework_s):
    run = Run(times(0.1, framework_s)).go(30_000)
    assert run.by_framework()[-1] < 20_000
    assert len(run.by_framework()) == 8 * 5, "trials get rare"
    assert run.chooser.decision == f"DLCP since step 0: DLCP 100 ms a step, gloo {1e3 * framework_s:.3g} ms"
    assert len(run.reported) == 5 * len(TRIAL), "nobody reports on steps that decide nothing"


@pytest.mark.parametrize("sign", [{"lossy": True}, {"queued": True}])
def test_on_a_network_that_is_not_clean_nothing_is_tried_and_little_said(sign):
    run = Run(lambda *_: report(**sign)).go(30_000)
    assert run.by_framework() == []
    assert len(run.reported) < 80
    assert run.chooser.decision.startswith("DLCP since step 0: packets ")


def test_a_network_that_becomes_clean_is_tried_then():
    run = Run(lambda step, route: report(0.1 if route is Route.DLCP else 0.05, lossy=step < 50)).go(300)
    assert run.by_framework()[0] >= 50
    assert run.chooser.settled is Route.FRAMEWORK


def test_where_packets_queue_now_and_then_the_framework_is_tried():
    run = Run(lambda step, route: report(0.1 if route is Route.DLCP else 0.05, queued=step % 3 > 0)).go(60)
    assert run.chooser.settled is Route.FRAMEWORK


def test_ranks_that_share_memory_ask_once():
    run = Run(lambda *_: report(remote=False)).go(1000)
    assert (run.by_framework(), run.reported) == ([], [WARM_UP])
    assert run.chooser.decision.endswith("all ranks exchange packets through memory")


def test_a_trial_ends_with_its_first_step_that_takes_far_longer():
    """As on the demo's network, where a step over TCP takes four times as long."""
    run = Run(lambda _, route: report() if route is Route.DLCP else report(0.4, 0.32)).go(5000)
    first = WARM_UP + TRIAL.index(Route.FRAMEWORK)
    assert run.by_framework()[:LAG] == [first, first + 1]
    assert len(run.by_framework()) == LAG * 4
    assert "a step took 400 ms with gloo, 100 ms with DLCP" in run.chooser.decision


def test_a_framework_that_becomes_slow_is_left_within_two_steps_and_not_at_once_taken_again():
    breaks_at = 100
    run = Run(lambda step, route: report(0.4, 0.3) if route is Route.FRAMEWORK and step >= breaks_at else report(0.15))
    run.world = lambda step, route: (
        report(0.15) if route is Route.DLCP else report(0.4, 0.3) if step >= breaks_at else report(0.1)
    )
    run.go(breaks_at + LAG + FIRST_BACK_OFF)
    assert run.by_framework(breaks_at) == [breaks_at, breaks_at + 1]
    since = f"DLCP since step {breaks_at + LAG}: "
    assert run.chooser.decision == since + "a step with gloo took 400 ms, usually 100 ms"
    assert len(run.go(20_000).by_framework(breaks_at)) < 20


@pytest.mark.parametrize("pause_s", [0.06, 1.0, 100.0])
def test_a_pause_of_the_script_or_one_slow_rank_changes_nothing(pause_s):
    """Then one rank does not wait, however long the others do."""
    run = Run(lambda step, route: report((0.118, 0.101)[route is Route.FRAMEWORK] + pause_s * (step % 10 == 9)))
    run.go(FIRST_PERIOD)
    assert run.by_framework(TRIAL_ENDS) == list(range(TRIAL_ENDS, FIRST_PERIOD))


def test_short_steps_may_vary_but_not_grow():
    def world(step, route):
        slow = step % 10 == 5 or step > 150
        return report(0.005, 0.001) if route is Route.DLCP else report(0.01, 0.007) if slow else report(0.004, 0.001)

    run = Run(world).go(FIRST_PERIOD)
    assert run.by_framework(TRIAL_ENDS)[: 152 - TRIAL_ENDS] == list(range(TRIAL_ENDS, 152))
    assert run.routes[154] is Route.DLCP


def test_the_first_step_of_a_turn_may_be_cold():
    def world(step, route):
        cold = step == WARM_UP + TRIAL.index(Route.FRAMEWORK)
        return report(0.12) if route is Route.DLCP else report(0.2, 0.12) if cold else report(0.1)

    assert Run(world).go(TRIAL_ENDS + 1).chooser.settled is Route.FRAMEWORK


def test_it_makes_no_difference_at_which_step_training_begins():
    late = Run(times(0.118, 0.101))
    late.chooser.begin(7000)
    early = Run(times(0.118, 0.101)).go(50)
    late.routes = [None] * 7000
    assert late.go(50).routes[7000:] == early.routes


reports = st.builds(
    report,
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    lossy=st.booleans(),
    queued=st.booleans(),
    remote=st.sampled_from([True] * 20 + [False]),
)


@given(st.lists(reports, min_size=1, max_size=30), st.integers(1, 29))
@settings(max_examples=200)
def test_whatever_is_reported_the_framework_is_watched_and_kept_off_lossy_networks(drawn, stride):
    run = Run(lambda step, _: drawn[step * stride % len(drawn)]).go(400)
    assert Route.FRAMEWORK not in run.routes[: WARM_UP + TRIAL.index(Route.FRAMEWORK)]
    for step in run.by_framework()[:-1]:
        assert step in run.reported or run.routes[step + 1] is Route.DLCP
        known = step - LAG
        assert run.routes[known] is Route.FRAMEWORK or not (known in run.reported and run.world(known, None).lossy)


@given(reports, reports)
def test_of_all_ranks_the_longest_step_counts_and_the_shortest_wait(one, two):
    both = StepReport.from_maxima([max(pair) for pair in zip(one.to_maxima(), two.to_maxima(), strict=True)])
    assert both.step_s == max(one.step_s, two.step_s)
    assert both.waited_s == min(one.waited_s, two.waited_s)
    assert both.lossy == (one.lossy or two.lossy)
    assert both.queued == (one.queued and two.queued)
    assert both.remote == (one.remote or two.remote)


@given(st.integers(0, 3000), st.floats(1.5, 100))
def test_whenever_the_framework_becomes_slow_dlcp_averages_soon(breaks_at, factor):
    def world(step, route):
        if route is Route.DLCP:
            return report(0.1, 0.02)
        return report(0.08, 0.02) if step < breaks_at else report(factor * 0.16, 0.02 + factor * 0.16 - 0.08)

    slow = set(Run(world).go(breaks_at + 100).by_framework(breaks_at))
    for step in slow:
        assert not slow.issuperset(range(step, step + LAG + 2)), "one more if the turn's first step may be cold"


WITHOUT_CHOICE = [
    {"compression": "fp16"},
    {"combine": "sum", "fallback": False},
    {"samples": 4},
    {"phases": True},
    {"collective": "server", "server": "10.0.0.9:53696"},
]


@pytest.mark.parametrize("chosen", WITHOUT_CHOICE)
def test_where_more_than_an_average_is_wanted_there_is_no_choice(chosen):
    assert not may_choose(Options(**chosen))
    assert Options(**chosen, route="dlcp").route == "dlcp"
    with pytest.raises(ValueError, match=f"which has no {next(iter(chosen))}: omit one of the two"):
        Options(**chosen, route="framework")


def test_otherwise_the_ranks_choose_unless_told():
    assert may_choose(Options())
    assert may_choose(Options(error_feedback=False, fallback=False, collective="ring"))
    assert not may_choose(Options(route="dlcp"))
    with pytest.raises(ValueError, match="route must be one of auto, dlcp, framework, got 'gloo'"):
        Options(route="gloo")


def test_what_has_no_framework_refuses_its_route():
    with pytest.raises(ValueError, match=r"route 'framework' needs PyTorch: dlcp\.session\.join averages with DLCP"):
        join(Options(route="framework"), rank=0, size=2, master=f"127.0.0.1:{free_port()}")
    backend = pytest.importorskip("dlcp.torch.backend")
    with pytest.raises(ValueError, match="a group of backend dlcp does not support route"):
        backend._heeded(Options(route="framework"))
    assert backend._heeded(Options(route="dlcp")).route == "dlcp"
