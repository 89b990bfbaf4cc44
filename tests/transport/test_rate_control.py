# SPDX-License-Identifier: Apache-2.0
"""Windows under congestion: shares, urgency, the receiver's limit, and no collapse. Tolerances are wide on purpose."""

import numpy as np
import pytest

from dlcp.transport import LossBound, MessageKey, TransportOptions
from dlcp.transport.congestion import CubicWindow, Report
from dlcp.transport.dctcp import DctcpWindow
from dlcp.transport.peer import DeliveryRate
from tests.transport.exchanges import (
    Network,
    PacketType,
    all_done,
    datagram,
    deliver,
    payload_of,
    plain_tags,
    receive,
    send,
)

CONTROLS = pytest.mark.parametrize("control", [DctcpWindow, CubicWindow])
CONGESTION = {DctcpWindow: "dctcp", CubicWindow: "cubic"}


def rival_bytes(control, weights, *, seconds=3.0, rate_bps=40e6):
    """The throughput of flows of some weights to one receiver, to which all send without end."""
    receiver = len(weights)
    network = Network(receiver + 1, rate_bps=rate_bps, options=TransportOptions(congestion=CONGESTION[control]), seed=1)
    payload = payload_of(int(seconds * rate_bps / 8))
    for source, weight in enumerate(weights):
        network.ranks[source].peers[receiver].control = control(weight)
        receive(network, len(payload), source=source, target=receiver)
        send(network, payload, source=source, target=receiver)
    network.run(lambda: network.now > seconds)
    got = [0] * len(weights)
    for when, source, target, data in network.arrived:
        if when > seconds / 4 and target == receiver:
            got[source] += len(data)
    assert sum(got) > 0.75 * rate_bps / 8 * 0.75 * seconds, "together they must keep the link busy"
    return got


@CONTROLS
def test_two_flows_of_half_a_weight_count_as_one(control):
    halves_and_whole = rival_bytes(control, [0.5, 0.5, 1.0])
    share = halves_and_whole[2] / sum(halves_and_whole)
    assert 0.22 < share < 0.67
    assert 0.4 < halves_and_whole[0] / halves_and_whole[1] < 2.5


@CONTROLS
def test_equal_flows_get_equal_shares(control):
    one, other = rival_bytes(control, [1.0, 1.0])
    assert 0.5 < one / other < 2.0


@CONTROLS
def test_more_weight_gets_more(control):
    light, heavy = rival_bytes(control, [0.25, 1.0])
    assert heavy > 1.5 * light


@pytest.mark.parametrize("congestion", ["dctcp", "cubic"])
@pytest.mark.parametrize("depth", [8, 24])
def test_sixteen_senders_into_a_shallow_queue_do_not_collapse(congestion, depth):
    senders, size, rate_bps = 16, 60_000, 100e6
    network = Network(
        senders + 1,
        depth=depth,
        ecn_depth=depth // 2,
        rate_bps=rate_bps,
        options=TransportOptions(congestion=congestion),
    )
    futures = []
    for source in range(senders):
        futures.append(receive(network, size, source=source, target=senders, bound=LossBound(0.1)))
        futures.append(send(network, payload_of(size), source=source, target=senders, bound=LossBound(0.1)))
    network.run(all_done(*futures))
    ideal_s = senders * size * 8 / rate_bps
    assert network.now < 4 * ideal_s
    sent = sum(delivery.result().sent for delivery in futures[1::2])
    useful = sum(int(delivery.result().delivered.sum()) for delivery in futures[1::2])
    assert sent < 2 * useful


@CONTROLS
def test_one_flow_fills_an_idle_link(control):
    network = Network(2, rate_bps=50e6, options=TransportOptions(congestion=CONGESTION[control]))
    payload = payload_of(3_000_000)
    futures = receive(network, len(payload)), send(network, payload)
    network.run(all_done(*futures))
    assert network.now < 1.6 * len(payload) * 8 / 50e6


@pytest.mark.parametrize("window", [1, 3, 20])
def test_no_more_is_on_the_way_than_the_receiver_has_room_for(window):
    network = Network(2, depth=10_000, delay_s=0.005)
    hello = datagram(PacketType.HELLO, sender=1, payload=(1440).to_bytes(4, "big") + window.to_bytes(4, "big"))
    deliver(network.ranks[0], hello, source=1)
    payload = payload_of(200_000)
    futures = receive(network, len(payload)), send(network, payload)
    on_the_way, most = 0, 0
    sending, delivering = network.send, network.deliver

    def counting_send(source, target, datagram, tos):
        nonlocal on_the_way, most
        if datagram[0] & 15 == PacketType.DATA:
            on_the_way += 1
            most = max(most, on_the_way)
        return sending(source, target, datagram, tos)

    def counting_deliver(target, packet):
        nonlocal on_the_way
        on_the_way -= packet[1][0] & 15 == PacketType.DATA
        delivering(target, packet)

    network.send, network.deliver = counting_send, counting_deliver
    network.run(all_done(*futures))
    assert most <= window
    assert most == window


def test_a_greeting_tells_each_peer_its_part_of_the_receive_buffer():
    network = Network(5)
    for protocol in network.ranks:
        protocol.liveness.greet_all()
    network.run(lambda: not any(protocol.liveness.strangers for protocol in network.ranks))
    for protocol in network.ranks:
        assert {peer.flow.largest_window for peer in protocol.peers.values()} == {4096 // 4}


def finish_times(network, messages, *, size=200_000):
    """When each of some messages, given as (source, key, queue), is confirmed."""
    times = {}
    futures = []
    for source, key, queue in messages:
        tags = plain_tags(-(-size // 1440), queue=queue)
        futures.append(receive(network, size, source=source, target=3, key=key))
        futures.append(send(network, payload_of(size), source=source, target=3, key=key, tags=tags))
        futures[-2].add_done_callback(lambda _, at=(source, key): times.setdefault(at, network.now))
    network.run(all_done(*futures))
    return times


def test_front_layers_overtake_back_layers_of_the_same_rank():
    back_first = [(0, MessageKey(0, number), 2 + number) for number in range(5)]
    times = finish_times(Network(4, rate_bps=20e6), back_first)
    order = sorted(times, key=times.get)
    assert [key.message for _, key in order] == [4, 3, 2, 1, 0]


def test_front_layers_overtake_back_layers_of_other_ranks():
    network = Network(4, rate_bps=20e6, depth=32)
    messages = [(source, MessageKey(0, number), 2 if number == 0 else 6) for number in (0, 1) for source in range(3)]
    times = finish_times(network, messages)
    front = [when for (_, key), when in times.items() if key.message == 1]
    back = [when for (_, key), when in times.items() if key.message == 0]
    assert max(front) < min(back)
    assert max(front) < 0.75 * max(back)


def test_untagged_traffic_asks_for_no_favours():
    network = Network(2, options=TransportOptions(tagged=False))
    seen = set()
    sending = network.send

    def send_and_note(source, target, datagram, tos):
        seen.add((datagram[2] >> 5, datagram[2] >> 2 & 7, tos >> 2))
        return sending(source, target, datagram, tos)

    network.send = send_and_note
    futures = receive(network, 100_000, bound=LossBound(0.1)), send(network, payload_of(100_000), bound=LossBound(0.1))
    network.run(all_done(*futures))
    assert seen == {(1, 0, 0)}


@pytest.mark.parametrize(("ratio", "protected", "droppable"), [(0.1, 0, True), (0.0, 0, False), (0.1, 70, False)])
def test_only_packets_that_may_be_lost_are_marked_droppable(ratio, protected, droppable):
    network = Network(2)
    seen = set()
    sending = network.send

    def send_and_note(source, target, datagram, tos):
        if datagram[0] & 15 == PacketType.DATA:
            budget = int.from_bytes(bytes(datagram[6:8]), "big")
            seen.add((datagram[2] >> 2 & 7 > 0, bool(tos >> 4 & 1), tos >> 5, budget))
        return sending(source, target, datagram, tos)

    network.send = send_and_note
    bound = LossBound(ratio)
    tags = plain_tags(70, protected=protected)
    futures = receive(network, 100_000, bound=bound), send(network, payload_of(100_000), bound=bound, tags=tags)
    network.run(all_done(*futures))
    assert seen == {(droppable, droppable, 4, int(70 * ratio))}


@CONTROLS
def test_windows_never_vanish(control):
    flow = control(0.1)
    for step in range(200):
        flow.on_report(Report(step * 0.01, 1, 1, 1, 0.01, 0.01, limited=True))
        flow.on_timeout()
        assert flow.window > 0
        assert np.isfinite(flow.window)
    for step in range(200, 3000):
        flow.on_report(Report(step * 0.01, 5, 0, 0, 0.01, 0.01, limited=True))
    assert flow.window > 2, "and they grow again"


@CONTROLS
def test_the_smallest_window_still_gets_a_message_through(control):
    network = Network(2)
    peer = network.ranks[0].peers[1]
    for _ in range(30):
        peer.control.on_timeout()
    peer.flow.window = peer.control.window
    payload = payload_of(100_000)
    futures = receive(network, len(payload)), send(network, payload)
    network.run(all_done(*futures), limit_s=5)


def test_a_flow_is_in_slow_start_until_its_window_shrinks_and_after_a_silence():
    network = Network(2, rate_bps=20e6, depth=40)
    flow, peer = network.ranks[0].engine.flows[1], network.ranks[0].peers[1]
    assert flow.slow_start
    payload = payload_of(1_000_000)
    network.run(all_done(receive(network, len(payload)), send(network, payload)))
    assert not flow.slow_start
    for _ in range(3):
        peer.on_timeout()
    assert flow.slow_start


def test_a_delivery_rate_counts_only_while_packets_wait():
    rate = DeliveryRate()
    now_s = 0.0
    for _ in range(100):
        now_s += 0.01
        rate.on_feedback(now_s, 5, waiting=True)
    assert rate.packets_per_s(now_s) == pytest.approx(500, rel=0.05)
    rate.on_feedback(now_s, 0, waiting=False)
    for _ in range(50):
        now_s += 0.02
        rate.on_feedback(now_s, 0, waiting=False)
    assert rate.packets_per_s(now_s) == pytest.approx(500, rel=0.05), "idleness is no slowness"
    assert rate.packets_per_s(now_s + 10) == 0
    assert DeliveryRate().packets_per_s(0.0) == 0


def test_a_rank_knows_how_fast_it_reaches_a_peer():
    network = Network(2, rate_bps=20e6, options=TransportOptions())
    payload = payload_of(3_000_000)
    futures = receive(network, len(payload)), send(network, payload)
    network.run(lambda: network.now > 0.8)
    assert 14e6 < network.ranks[0].peers[1].rate_bps < 21e6
    network.run(all_done(*futures))
