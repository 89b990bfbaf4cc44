# SPDX-License-Identifier: Apache-2.0
"""The laws by which windows move, alone: endless flows through one port; bit rates stand for packets of 1,500 bytes."""

import math

import pytest

from dlcp.transport.congestion import CubicWindow, Report
from dlcp.transport.dctcp import CALM_BLOCK_PACKETS, DctcpWindow, Finding, RandomLoss
from tests.transport.bottleneck import ORDINARY, Bottleneck, Flow, jain

M100, G1, G10 = 8333, 83333, 833333
"""Packets a second at 100 Mbit/s, 1 Gbit/s and 10 Gbit/s."""
MARKED = {"depth": 64, "ecn_depth": 17}
"""A queue of the built-in switch."""


def alone(seconds, *, report_s=0.001, **path):
    """Run one flow, return it and the share of the port that it gets once started."""
    flow = Flow(DctcpWindow(), report_s=report_s)
    Bottleneck([flow], **path).run(seconds)
    return flow, flow.goodput(seconds / 4, seconds) / path["rate"]


def together(flows, seconds, **path):
    """Run flows, return the share of the port that each gets in the second half."""
    Bottleneck(flows, noise_s=path["rtt_s"] / 10, **path).run(seconds)
    return [flow.goodput(seconds / 2, seconds) / path["rate"] for flow in flows]


@pytest.mark.parametrize("loss", [0.001, 0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize(
    "path",
    [
        {"rate": M100, "rtt_s": 0.001, "depth": 64},
        {"rate": M100, "rtt_s": 0.02, "depth": 170},
        {"rate": G1 / 2, "rtt_s": 0.001, "depth": 256, "ecn_depth": 65},
    ],
)
def test_random_loss_does_not_close_the_window(path, loss):
    seconds = 1.0 if path["rate"] > M100 else 3.0
    assert alone(seconds, loss=loss, **path)[1] > (0.75 if loss > 0.1 else 0.85)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_loss_is_not_the_others_doing_however_late_a_busy_host_acknowledges(seed):
    # With delays that are taken for a queue that others fill, 25 MB took up to 240 ms, where 193 would do.
    flow = Flow(DctcpWindow(), packets=17361)
    Bottleneck([flow], rate=90_000, rtt_s=0.0002, depth=1000, loss=0.01, noise_s=0.003, seed=seed).run()
    assert flow.done_s < 0.206


def test_losses_that_begin_later_do_not_close_the_window_either():
    flow = Flow(DctcpWindow())
    port = Bottleneck([flow], rate=M100, rtt_s=0.001, depth=64)
    port.run(1.0)
    port.loss = 0.1
    port.run(4.0)
    assert flow.goodput(2.0, 4.0) > 0.8 * M100


@pytest.mark.parametrize("report_s", [0, 0.001, 0.02])
def test_marks_keep_the_queue_short_and_the_port_busy_however_often_it_is_reported(report_s):
    flow, share = alone(2.0, report_s=report_s, rate=M100, rtt_s=0.001, **MARKED)
    assert share > 0.95
    assert flow.lost < 0.01 * flow.sent
    assert flow.smoothed_rtt_s < 0.001 + 40 / M100


def test_delay_alone_keeps_a_deep_queue_short():
    flow, share = alone(2.0, rate=M100, rtt_s=0.001, depth=5000)
    assert share > 0.98
    assert flow.lost == 0
    assert flow.smoothed_rtt_s < 0.001 + 3 * 0.005


def test_late_wake_ups_are_no_congestion():
    assert alone(0.06, rate=G10, rtt_s=0.00005, depth=100_000, noise_s=0.003)[1] > 0.95


@pytest.mark.parametrize(
    ("path", "seconds"),
    [
        ({"rate": G10, "rtt_s": 0.00005, "depth": 200, "ecn_depth": 65}, 0.1),
        ({"rate": G1, "rtt_s": 0.0005, "depth": 200, "ecn_depth": 65}, 0.5),
        ({"rate": M100, "rtt_s": 0.005, **MARKED}, 2),
        ({"rate": M100, "rtt_s": 0.05, "depth": 300, "ecn_depth": 100}, 6),
    ],
)
def test_the_port_is_kept_busy_at_any_round_trip_time(path, seconds):
    assert alone(seconds, **path)[1] > 0.9


def test_a_window_opens_in_a_few_round_trips():
    flow = Flow(DctcpWindow(), report_s=0)
    Bottleneck([flow], rate=G1, rtt_s=0.001, depth=200, ecn_depth=65).run(0.02)
    rounds = next(n for n in range(1, 20) if flow.goodput(n * 0.001, (n + 1) * 0.001) > 0.9 * G1)
    # Ten packets at first (RFC 6928), 83 fill the path: doubling takes log2(8.3) rounds.
    assert rounds <= math.log2(8.3) + 2


@pytest.mark.parametrize(("depth", "worst"), [(8, 0.1), (16, 0.06), (64, 0.03)])
def test_a_shallow_queue_without_marks_is_respected(depth, worst):
    flow, share = alone(3.0, rate=M100, rtt_s=0.0004, depth=depth)
    assert share > 0.9
    assert flow.lost < worst * flow.sent


@pytest.mark.parametrize("path", [{"depth": 8}, {"depth": 64}, {"depth": 2000}, MARKED])
def test_two_training_jobs_get_equal_shares(path):
    # What both see in each other's pauses is how long the path takes when nobody waits.
    jobs = [Flow(DctcpWindow(), pauses=(0.1, 0.05)), Flow(DctcpWindow(), pauses=(0.12, 0.05), start_s=0.5)]
    assert jain(together(jobs, 6.0, rate=M100, rtt_s=0.0004, **path)) > 0.95


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_jobs_without_a_pause_get_equal_shares_where_packets_are_marked(late_s):
    jobs = [Flow(DctcpWindow(0.5), start_s=(index // 2) * late_s) for index in range(4)]
    assert jain(together(jobs, 4.0, rate=M100, rtt_s=0.0004, **MARKED)) > 0.95


@pytest.mark.parametrize(("ranks", "rivals", "share"), [(3, 1, 0.5), (3, 2, 1 / 3), (1, 1, 0.5)])
def test_a_job_takes_its_share_of_a_port_and_leaves_tcp_the_rest(ranks, rivals, share):
    job = [Flow(DctcpWindow(1 / ranks), metered=True) for _ in range(ranks)]
    tcp = [Flow(CubicWindow(), queue=ORDINARY, report_s=0, start_s=0.1 * index) for index in range(rivals)]
    shares = together([*job, *tcp], 6.0, rate=2700, rtt_s=0.001, share=share * 2700, **MARKED)
    assert sum(shares[:ranks]) == pytest.approx(share, rel=0.1)
    assert sum(shares[ranks:]) == pytest.approx(1 - share, rel=0.1)


@pytest.mark.parametrize("depth", [8, 16, 64])
@pytest.mark.parametrize("packets", [50, 200])
def test_an_incast_is_over_when_the_port_could_have_done(depth, packets):
    path = {"rate": M100, "rtt_s": 0.0004, "depth": depth, "ecn_depth": depth // 4}
    times = []
    for seed in range(5):
        flows = [Flow(DctcpWindow(1 / 16), packets=packets, start_s=1e-5 * seed * index) for index in range(16)]
        Bottleneck(flows, seed=seed, noise_s=0.00004, **path).run(60)
        times.append(max(flow.done_s for flow in flows))
    bound_s = 16 * packets / M100 + 0.0004
    assert sorted(times)[2] < 1.2 * bound_s
    assert max(times) < 1.5 * bound_s


@pytest.mark.parametrize("weights", [[0.5, 0.5, 1.0], [0.25, 0.25, 0.25, 0.25, 1.0]])
@pytest.mark.parametrize("rtt_s", [0.0004, 0.005])
def test_light_cubic_flows_count_as_one(weights, rtt_s):
    flows = [Flow(CubicWindow(weight), report_s=0, start_s=0.1 * index) for index, weight in enumerate(weights)]
    Bottleneck(flows, rate=3333, rtt_s=rtt_s, depth=64, noise_s=rtt_s / 2).run(24)
    got = [flow.goodput(8, 24) for flow in flows]
    assert 0.37 < got[-1] / sum(got) < 0.63


def test_a_silence_halves_the_window_only_when_it_lasts():
    control = DctcpWindow()
    control.window = 100.0
    control.on_timeout()
    assert control.window == 100
    control.on_timeout()
    control.on_timeout()
    assert control.window == 25
    control.on_report(Report(1.0, 25, 0, 0, 0.01, 0.01, limited=True))
    assert control.window == 50, "what was there before is taken back as fast as it arrives, up to a half"


def overflowed(window=400.0):
    """A window that a marked and full queue has just shrunk."""
    control = DctcpWindow()
    control.window = window
    for step in range(2):  # what it began with is a round of its own
        control.on_report(Report(1.0 + step / 100, 300, 300, 100, 0.002, 0.002, limited=True))
    assert control.window < window
    assert not control.contested
    return control


def test_after_a_loss_a_pause_ends_with_a_part_of_the_window_and_with_all_of_it_two_rounds_later():
    control = overflowed()
    before = control.window
    assert control.restart(1.1)
    assert control.window == before / 4
    assert control.slow_start
    assert not control.restart(1.1), "nothing has come back: another message changes nothing"
    for round_s in (1.2, 1.3):
        control.on_report(Report(round_s, int(control.window) + 1, 0, 0, 0.002, 0.002, limited=True))
    assert before <= control.window < 1.1 * before


def test_a_loss_after_a_pause_does_not_take_back_more_than_its_part():
    control = overflowed()
    before = control.window
    control.restart(1.1)
    for step in range(20):
        lost = 10 if step == 0 else 0
        window = int(control.window) + 1
        control.on_report(Report(1.2 + step / 100, window - lost, lost, lost, 0.002, 0.002, limited=True))
    assert control.window > before / 2


def test_pauses_change_nothing_where_nothing_has_overflowed_lately():
    for control in (DctcpWindow(), CubicWindow()):
        control.window = 400.0
        assert not control.restart(1.0)
        assert control.window == 400
    control = overflowed()
    before = control.window
    assert not control.restart(12.0)
    assert control.window == before


def test_a_window_that_held_nothing_back_does_not_grow():
    control = DctcpWindow()
    for step in range(100):
        control.on_report(Report(step * 0.01, 10, 0, 0, 0.01, 0.01, limited=False))
    assert control.window == 10


def judge(losses, packets, lost, window, *, rounds, starting=False):
    """Return the first finding but NOTHING of some rounds, or NOTHING."""
    for _ in range(rounds):
        finding = losses.judge(packets, lost, window, starting=starting)
        if finding is not Finding.NOTHING:
            return finding
    return Finding.NOTHING


def test_what_is_lost_of_fewer_packets_too_is_lost_at_random():
    losses = RandomLoss()
    assert judge(losses, 100, 10, 100.0, rounds=2) is Finding.CONSPICUOUS
    assert losses.trying
    assert judge(losses, 70, 7, 70.0, rounds=20) is Finding.RANDOM
    assert losses.baseline == pytest.approx(0.1)
    assert judge(losses, 100, 10, 100.0, rounds=20) is Finding.NOTHING, "it is known by now"
    assert losses.explains(100, 10)
    assert not losses.explains(100, 30)


def test_what_is_no_longer_lost_of_fewer_packets_was_congestion():
    losses = RandomLoss()
    assert judge(losses, 100, 10, 100.0, rounds=2) is Finding.CONSPICUOUS
    assert judge(losses, 70, 0, 70.0, rounds=20) is Finding.CONGESTION
    assert losses.baseline == 0


def test_a_path_that_gets_better_is_noticed():
    losses = RandomLoss()
    losses.baseline = 0.3
    judge(losses, CALM_BLOCK_PACKETS, 5, 100.0, rounds=2)
    assert losses.baseline < 0.05


def test_more_than_a_path_may_lose_is_congestion():
    losses = RandomLoss()
    assert judge(losses, 100, 60, 100.0, rounds=2) is Finding.CONSPICUOUS
    assert judge(losses, 40, 24, 40.0, rounds=20) is Finding.CONGESTION


def test_losses_without_a_queue_while_others_fill_it_are_counted_in_blocks():
    losses = RandomLoss()
    assert not losses.watch(CALM_BLOCK_PACKETS - 1, 20)
    assert losses.watch(1, 0)
    assert not losses.watch(CALM_BLOCK_PACKETS, 2)


def test_a_few_losses_are_not_looked_into():
    assert judge(RandomLoss(), 100, 1, 100.0, rounds=100) is Finding.NOTHING
