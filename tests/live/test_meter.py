# SPDX-License-Identifier: Apache-2.0
"""How long steps take and for whom a rank waits, told by a clock that the test moves."""

import pytest

from dlcp.session import snapshots
from dlcp.session.snapshots import STEP_EDGES_S, StepMeter
from dlcp.values.tags import Layer, Segment


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(snapshots, "time", found)
    return found


def segments(*names):
    return [Segment(Layer(name, 10 * place), place, place + 1) for place, name in enumerate(names)]


def test_each_moment_of_waiting_is_put_down_to_whose_message_comes_next(clock):
    meter = StepMeter()
    meter.on_ready(0, segments("head.weight"))
    clock.now_s += 0.5  # still computing
    meter.on_message(1, clock.now_s)
    meter.on_ready(0, segments("body.weight", "body.bias"))
    for peer, seconds in ((2, 0.3), (1, 0.1), (2, 0.2)):
        clock.now_s += seconds
        meter.on_message(peer, clock.now_s)
    meter.on_averaged(0)
    clock.now_s += 0.05  # the average of what came last
    meter.on_averaged(0)
    meter.on_message(1, clock.now_s + 0.5)  # a confirmation that nobody waits for
    clock.now_s += 0.85
    meter.on_ready(1, segments("head.weight"))
    found = meter.totals()
    assert found["step"] == 1
    assert found["step_s"] == pytest.approx(2.0)
    assert found["waiting_s"] == pytest.approx({"2": 0.5, "1": 0.1, "": 0.05})
    assert found["steps"][STEP_EDGES_S.index(2.048)] == sum(found["steps"]) == 1
    assert found["layers"] == {"0": ["head", "body"], "10": ["body"]}


def test_what_was_averaged_while_it_computed_is_no_waiting(clock):
    meter = StepMeter()
    meter.on_ready(0, [])
    clock.now_s += 1.0
    meter.on_message(1, clock.now_s)
    meter.on_averaged(0)
    clock.now_s += 1.0
    meter.on_ready(0, [])
    meter.on_averaged(0)
    clock.now_s += 1.0
    meter.on_ready(1, [])
    assert meter.totals()["step_s"] == pytest.approx(3.0)
    assert meter.totals()["waiting_s"] == {}


def test_a_step_that_others_finish_without_a_word_has_no_waiting(clock):
    meter = StepMeter()
    meter.on_ready(0, [])
    meter.on_ready(0, [])
    clock.now_s += 1.0
    meter.on_message(1, clock.now_s)
    meter.on_averaged(0)
    meter.on_ready(1, [])
    meter.on_averaged(0)  # too late to count for the step
    clock.now_s += 0.25
    meter.on_averaged(1)
    clock.now_s += 0.25
    meter.on_ready(2, [])
    found = meter.totals()
    assert (found["step_s"], found["waiting_s"]) == (pytest.approx(1.5), {"": pytest.approx(0.25)})


def test_the_longest_steps_count_too(clock):
    meter = StepMeter()
    meter.on_ready(0, [])
    clock.now_s += 1e6
    meter.on_ready(1, [])
    assert meter.totals()["steps"][-1] == 1


def test_layers_are_named_by_the_first_steps_only(clock):
    meter = StepMeter()
    for step in range(4):
        meter.on_ready(step, segments(f"layer{step}.weight", "alone"))
    assert meter.totals()["layers"] == {"0": ["layer0", "layer1"], "10": ["alone"]}
