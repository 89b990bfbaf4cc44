# SPDX-License-Identifier: Apache-2.0
"""The default law on paths of any length and any buffer, alone and next to CUBIC and BBR that share its queue."""

import pytest

from dlcp.transport import MessageKey, TransportOptions
from dlcp.transport.congestion import CubicWindow, Report
from dlcp.transport.dctcp import DctcpWindow, IdlePath, Round
from dlcp.transport.peer import READ_EVERY_S, pace_of
from tests.transport.bbr import BbrWindow
from tests.transport.bottleneck import Bottleneck, Flow
from tests.transport.exchanges import Network, all_done, payload_of, receive, send

RATE = {0.0001: 833_333, 0.001: 83_333, 0.02: 5000, 0.1: 1667, 0.2: 1667}
"""Packets a second, by round-trip time: from 10 Gbit/s to 20 Mbit/s at 1,500 bytes."""
RATE_BPS = 40e6
"""Of a path that whole engines use."""


def run(rtt_s, buffer, seconds, *, rivals=(), marks=False, seed=0, late_s=0.0):
    """Return a flow and its rivals after some seconds in one queue; ``buffer`` in bandwidth-delay products."""
    path_packets = RATE[rtt_s] * rtt_s
    depth = max(4, round(buffer * path_packets))
    flow = Flow(DctcpWindow(), start_s=late_s)
    others = [Flow(rival(), report_s=0, start_s=0.001 * rtt_s * number) for number, rival in enumerate(rivals)]
    port = Bottleneck(
        [flow, *others],
        rate=RATE[rtt_s],
        rtt_s=rtt_s,
        depth=depth,
        ecn_depth=max(2, depth // 4) if marks else None,
        noise_s=min(rtt_s / 10, 0.001),
        seed=seed,
    )
    port.run(seconds)
    return flow, others


def goodput(flow, rtt_s, seconds):
    """Return the share of the port that a flow had, without the first third."""
    return flow.goodput(seconds / 3, seconds) / RATE[rtt_s]


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("buffer", [0.2, 1, 10])
@pytest.mark.parametrize(("rtt_s", "seconds"), [(0.0001, 0.06), (0.001, 0.6), (0.02, 10), (0.1, 30), (0.2, 40)])
def test_alone_it_fills_the_port_and_leaves_a_deep_buffer_empty(rtt_s, seconds, buffer, marks):
    flow, _ = run(rtt_s, buffer, seconds, marks=marks)
    # A threshold of less than a seventh of what the path holds costs throughput (DCTCP, SIGCOMM 2010).
    least = {0.2: 0.75, 1: 0.85, 10: 0.95} if marks else {0.2: 0.93, 1: 0.95, 10: 0.95}
    assert goodput(flow, rtt_s, seconds) > least[buffer]
    if buffer == 10:
        # Half a round trip, or what cannot be told from a host's wake-up times.
        assert flow.smoothed_rtt_s < max(1.5 * rtt_s, rtt_s + 3 * 0.005)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("rtt_s", "buffer", "seconds"), [(0.02, 0.2, 30), (0.02, 1, 30), (0.1, 1, 60), (0.1, 10, 150)])
def test_beside_two_cubic_flows_it_gets_about_a_third(rtt_s, buffer, seconds, seed):
    flow, others = run(rtt_s, buffer, seconds, rivals=(CubicWindow, CubicWindow), seed=seed)
    mine, theirs = goodput(flow, rtt_s, seconds), sum(goodput(other, rtt_s, seconds) for other in others)
    assert mine + theirs > 0.95
    # CUBIC's own shares differ as much in so few of its periods.
    assert 0.55 / 3 < mine < 1.5 / 3


@pytest.mark.parametrize(("buffer", "least"), [(1, 0.02), (10, 0.25)])
def test_beside_bbr_in_a_deep_buffer_it_is_not_starved(buffer, least):
    # A shallow buffer BBR takes for itself: it ignores losses.
    flow, others = run(0.02, buffer, 30, rivals=(BbrWindow,))
    mine, theirs = goodput(flow, 0.02, 30), goodput(others[0], 0.02, 30)
    assert mine + theirs > 0.95
    assert mine > least


def test_what_comes_late_into_a_full_buffer_gets_its_share_too():
    flow, _ = run(0.02, 1, 60, rivals=(CubicWindow, CubicWindow), late_s=10)
    assert goodput(flow, 0.02, 60) > 0.55 / 3


def test_once_others_are_gone_the_queue_is_drained_again():
    rival = Flow(CubicWindow(), report_s=0, packets=40_000)
    flow = Flow(DctcpWindow())
    port = Bottleneck([flow, rival], rate=5000, rtt_s=0.02, depth=1000)
    port.run()
    assert flow.control.contested
    rival.unconfirmed = None
    end_s = port.now + 60
    port.run(end_s)
    assert not flow.control.contested
    assert flow.goodput(end_s - 5, end_s) > 0.95 * 5000
    assert flow.smoothed_rtt_s < 1.5 * 0.02


def all_reduce_s(rtt_s, buffer, *, seconds=1.0, rounds=3):
    """Return how long two ranks took for the last of some all-reduces, through one queue each way."""
    network = Network(
        2,
        rate_bps=RATE_BPS,
        delay_s=rtt_s / 2,
        depth=max(8, round(buffer * rtt_s * RATE_BPS / 8 / 1514)),
        ecn_depth=10_000,
        options=TransportOptions(tagged=False, silence_s=60),
    )
    payload = payload_of(int(seconds * RATE_BPS / 8 / 1514 / 2) * 1440)
    for step in range(rounds):
        began_s = network.now
        averages = []
        for rank in range(2):
            there = {"source": rank, "target": 1 - rank}
            contribution = receive(network, len(payload), key=MessageKey(step, 1), **there)
            averages.append(receive(network, len(payload), key=MessageKey(step, 2), **there))
            back = {"source": 1 - rank, "target": rank, "key": MessageKey(step, 2)}
            contribution.add_done_callback(lambda _, back=back: send(network, payload, **back))
            send(network, payload, key=MessageKey(step, 1), **there)
        network.run(all_done(*averages))
        took_s = network.now - began_s
        pause_s = network.now + seconds / 2
        network.run(lambda until=pause_s: network.now >= until)
    return took_s


@pytest.mark.parametrize(("rtt_s", "buffer", "least"), [(0.02, 0.2, 0.65), (0.02, 1, 0.93), (0.02, 10, 0.93)])
def test_an_all_reduce_with_pauses_fills_a_long_path_both_ways(rtt_s, buffer, least):
    # Unpaced, with what acknowledgements wait for taken for a queue, it was 0.58, 0.73 and 0.75.
    assert 1.0 / all_reduce_s(rtt_s, buffer) > least


def test_a_queue_on_the_way_back_is_none_on_the_way_there():
    path = IdlePath()
    for number, (rtt_s, one_way_s) in enumerate([(0.02, 7.01), (0.05, 7.01), (0.06, 7.03)]):
        finished = Round(float(number))
        finished.add(Report(number + 0.5, 10, 0, 0, rtt_s, rtt_s, False, one_way_s))
        delay_s = path.add(finished, number + 0.5, keep=False)
        assert (delay_s, path.back_s) == pytest.approx([(0, 0), (0, 0.03), (0.02, 0.02)][number])


@pytest.mark.parametrize(("base_s", "full"), [(0.001, False), (0.02, True)])
def test_on_a_long_path_a_queue_that_comes_and_goes_within_a_round_may_be_full(base_s, full):
    path = IdlePath()
    for number, rtt_s in enumerate([base_s, base_s + 0.02, base_s]):
        finished = Round(float(number))
        finished.add(Report(number + 0.5, 10, 0, 0, rtt_s, rtt_s, False))
        path.add(finished, number + 0.5, keep=False)
    assert path.may_be_full(0.0, base_s + 0.015) == full


def test_what_leaves_after_a_pause_is_paced_on_long_paths_only():
    control = DctcpWindow()
    assert pace_of(control, 0.001, 0.001) == float("inf")
    assert pace_of(control, 0.1, 0.1) == 2 * control.window / 0.1
    assert pace_of(control, 0.1, 0.2) == control.window / 0.1


def test_a_longer_path_may_hold_more_than_the_receive_buffer():
    network = Network(2)
    peer = network.ranks[0].peers[1]
    room = peer.room_packets
    peer.base_rtt_s = READ_EVERY_S / 2
    peer.limit_window()
    assert peer.flow.largest_window <= room
    peer.base_rtt_s = 10 * READ_EVERY_S
    peer.limit_window()
    assert peer.flow.largest_window == 10 * room
