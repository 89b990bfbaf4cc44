# SPDX-License-Identifier: Apache-2.0
"""A script's steps are timed, settings chosen by them and tried: in real ranks over 127.0.0.1."""

import pytest

pytest.importorskip("torch")

from dlcp.train import advice, headroom
from dlcp.train.launcher import TrainPlan
from dlcp.tuning.rules import Figures, Settings, decide
from tests.torch.workers import launch, values
from tests.train.scripts import in_session, make, train

pytestmark = pytest.mark.timeout(110)
STEPS = 9


def advising(worker):
    def script(worker):
        from torch.nn.parallel import DistributedDataParallel

        train(DistributedDataParallel(make(width=2000)), 1000)
        return "never reached"

    return in_session(worker, script, TrainPlan(measure_steps=STEPS, advise=True))


def test_settings_are_chosen_by_what_is_measured_and_then_tried():
    results = values(launch(2, advising, limit_s=100))
    for ended, report in results:
        assert isinstance(ended, SystemExit)
        assert (ended.code, report["error"]) == (0, None)
    reports = [report for _, report in results]
    first, second = (report["measured"]["advice"] for report in reports)
    assert first["changes"] == second["changes"], "all ranks choose alike"
    figures = Figures.of_json(first["figures"])
    assert (figures.ranks, figures.hosts) == (2, 1)
    assert figures.gradient_bytes == 4 * (32 * 2000 + 2000 + 2000 * 10 + 10)
    assert figures.packets > 0
    assert decide(figures).as_json() == first
    assert first["changes"]["loss_bound"] == 0.0 if figures.wanting == 0 else True
    assert not first["changes"].get("compression"), "on one host bytes go through memory"
    steps = headroom.slowest_steps(reports)
    if first["changes"]:
        assert len(steps[headroom.ADVISED]) == STEPS // 3
        tried = advice.judge(decide(figures), steps[headroom.DLCP][-3:], steps[headroom.ADVISED])["tried"]
        assert tried["steps"] == 3
        assert tried["ratio"] > 0


def test_a_plan_to_advise_reaches_the_workers():
    plan = TrainPlan(measure_steps=30, advise=True)
    assert TrainPlan.from_environment(plan.as_environment()) == plan
    assert not TrainPlan.from_environment({}).advise
    assert Settings() == Settings(0.1, -1.0, "", "direct")
