# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks in virtual time: whole on an idle network, within the bound on any."""

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import LossBound, MessageKey, ReceiveRequest, TransportOptions
from dlcp.values.tags import PacketTags
from dlcp.wire import Flag, PacketType
from tests.transport.exchanges import (
    KEY,
    Network,
    Selective,
    all_done,
    check,
    datagram,
    deliver,
    exchange,
    packets_of,
    payload_of,
    plain_tags,
    receive,
    send,
)
from tests.transport.network import outcome_of

SIZE = 300_000


def kinds_of(network):
    """The kinds of packets that have arrived anywhere."""
    return {PacketType(data[0] & 15) for *_, data in network.arrived}


def mixed_tags(packets, seed=0):
    rng = np.random.default_rng(seed)
    drop_class = rng.integers(0, 8, packets).astype(np.uint8)
    return PacketTags(
        rng.integers(2, 7, packets).astype(np.uint8),
        drop_class,
        rng.integers(0, 256, packets).astype(np.uint8),
        drop_class == 0,
    )


@pytest.mark.parametrize("size", [1, 1439, 1440, 1441, SIZE])
def test_nothing_is_lost_on_an_idle_network_although_it_might_be(size):
    delivery, arrival = exchange(Network(2, depth=10_000), size, bound=LossBound(0.3))
    assert arrival.delivered.all()
    assert delivery.sent == packets_of(size)
    assert delivery.resent == 0


def test_an_idle_network_carries_many_messages_whole():
    network = Network(3, depth=10_000)
    futures = []
    for number in range(5):
        for source, target in ((0, 1), (1, 2), (2, 0), (1, 0)):
            payload = payload_of(40_000 + number)
            key, bound = MessageKey(0, number), LossBound(0.2)
            futures.append(receive(network, len(payload), source=source, target=target, key=key, bound=bound))
            futures.append(send(network, payload, source=source, target=target, key=key, bound=bound))
    network.run(all_done(*futures))
    assert all(future.result().delivered.all() for future in futures)
    assert all(delivery.result().resent == 0 for delivery in futures[1::2])


@pytest.mark.parametrize("protected", [0, 20])
def test_immediate_mode_stops_at_the_bound(protected):
    packets = packets_of(SIZE)
    bound = LossBound(0.3, immediate=True)
    tags = plain_tags(packets, protected=protected)
    tags.queue[tags.protected] = 6
    delivery, arrival = exchange(Network(2), SIZE, bound=bound, tags=tags)
    assert arrival.delivered.sum() == bound.required(packets)
    ceiling, _ = exchange(Network(2), SIZE, bound=LossBound(0.3), tags=tags)
    assert delivery.seconds < ceiling.seconds


def test_the_bound_is_used_only_when_the_sender_has_nothing_left_to_send():
    # A question in the middle of a message must not turn the ceiling into a target.
    network = Network(2)
    receiver = network.ranks[1]
    arrival = receive(network, 14_400, bound=LossBound(0.3))
    for index in range(10):
        if index in (3, 6):
            deliver(receiver, datagram(PacketType.PROBE, count=10, payload=b"\1"))
        assert not arrival.done()
        deliver(receiver, datagram(PacketType.DATA, index=index, count=10, payload=bytes(1440)))
    assert arrival.result(0).delivered.all()


def test_a_question_with_more_to_come_is_answered_and_settles_nothing():
    network = Network(2)
    receiver = network.ranks[1]
    arrival = receive(network, 14_400, bound=LossBound(0.3))
    for index in range(9):
        deliver(receiver, datagram(PacketType.DATA, index=index, count=10, payload=bytes(1440)))
    deliver(receiver, datagram(PacketType.PROBE, count=10, payload=b"\1"))
    assert not arrival.done()
    network.dead.add(0)
    network.run(lambda: not network.events)
    answers = [data for *_, data in network.sent if data[0] & 15 == PacketType.BITMAP]
    assert [data[32:] for data in answers] == [bytes([0xFF, 0x80])]


def test_the_bound_is_used_when_the_sender_asks():
    network = Network(2)
    receiver = network.ranks[1]
    arrival = receive(network, 14_400, bound=LossBound(0.3))
    for index in range(7):
        deliver(receiver, datagram(PacketType.DATA, index=index, count=10, payload=bytes(1440)))
    assert not arrival.done()
    deliver(receiver, datagram(PacketType.PROBE, count=10))
    assert arrival.result(0).delivered.sum() == 7


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3])
def test_the_bound_is_kept_whatever_the_network_loses(loss, ratio):
    network = Network(2, loss=loss, seed=1)
    delivery, _ = exchange(network, SIZE, bound=LossBound(ratio), tags=mixed_tags(packets_of(SIZE)))
    assert (network.dropped["loss"] > 0) == (loss > 0)
    assert delivery.resent > 0 or loss <= ratio


@pytest.mark.parametrize("seed", range(4))
def test_loss_duplicates_and_disorder_at_once(seed):
    network = Network(2, loss=0.1, duplicate=0.2, jitter_s=0.02, seed=seed)
    for number in range(3):
        exchange(network, 100_000, key=MessageKey(0, number), bound=LossBound(0.1), tags=mixed_tags(70, seed))
    assert network.ranks[1].counters()["duplicate"] + network.ranks[1].counters()["late"] > 0


def test_duplicates_alone_cost_nothing():
    network = Network(2, duplicate=1.0, depth=10_000)
    delivery, arrival = exchange(network, SIZE)
    assert arrival.delivered.all()
    assert delivery.resent == 0
    assert network.ranks[1].counters()["duplicate"] > 0.9 * packets_of(SIZE)


def test_a_little_disorder_is_no_loss():
    # Spraying sends neighbours over paths of different length.
    delivery, _ = exchange(Network(2, jitter_s=0.0008, depth=10_000), SIZE)
    assert delivery.resent == 0


def test_what_is_abandoned_is_what_is_worth_least():
    packets = packets_of(SIZE)
    tags = mixed_tags(packets)
    lost = []
    for seed in range(12):
        network = Network(2, loss=0.15, seed=seed)
        _, arrival = exchange(network, SIZE, bound=LossBound(0.1), tags=tags)
        lost.append(tags.drop_class[~arrival.delivered])
        assert len(lost[-1]) > packets * 0.05
        headers = [wire.decode(datagram) for _, _, _, datagram in network.arrived]
        at_once = [h.index for h in headers if h.type is PacketType.DATA and not h.flags & Flag.RETRANSMISSION]
        lost_at_first = np.delete(tags.drop_class, at_once)
        assert lost[-1].mean() > lost_at_first.mean()
    assert np.concatenate(lost).mean() > tags.drop_class.mean() + 1.2


@pytest.mark.parametrize("bound", [LossBound(), LossBound(0.05)], ids=str)
def test_it_is_enough_to_look_when_something_is_due(bound):
    def only_when_due(engine):
        """Let the engine tick when it says, or after packets have come or gone, as it does over a socket."""
        due_s, tick, pump, take_in = [0.0], engine.tick, engine.pump, engine.take_in

        def tick_if_due(now_s):
            if now_s >= due_s[0]:
                due_s[0] = tick(now_s)

        def anew(action):
            def do(*arguments):
                result = action(*arguments)
                due_s[0] = due_s[0] if result == 0 else 0.0
                return result

            return do

        engine.tick, engine.pump, engine.take_in = tick_if_due, anew(pump), anew(take_in)

    network = Network(2, loss=0.1, seed=4)
    for protocol in network.ranks:
        only_when_due(protocol.engine)
    for number in range(3):
        delivery, _ = exchange(network, 100_000, bound=bound, key=MessageKey(0, number))
        assert delivery.seconds < (0.05 if number else 0.2)
    network.run(lambda: all(protocol.settled for protocol in network.ranks), limit_s=1.0)


def test_bursts_of_loss_are_survived():
    bursts = [(0.002, 0.01), (0.03, 0.06), (0.1, 0.4)]

    def lose(network, source, header):
        return any(start < network.now < stop for start, stop in bursts)

    network = Selective(2, lose)
    delivery, _ = exchange(network, 2_000_000, bound=LossBound(0.1))
    assert network.dropped["selected"] > 20
    assert delivery.seconds < 3


@pytest.mark.parametrize("kind", [PacketType.STOP, PacketType.STOP_ACK, PacketType.BITMAP, PacketType.ACK,
                                  PacketType.PROBE])  # fmt: skip
@pytest.mark.parametrize("bound", [LossBound(), LossBound(0.1), LossBound(0.2, immediate=True)], ids=str)
def test_control_packets_may_be_lost_again_and_again(kind, bound):
    lost = []

    # A message that came whole needs no STOP, unless the acknowledgement that says so is lost.
    unheard = PacketType.ACK if kind in (PacketType.STOP, PacketType.STOP_ACK) and bound == LossBound() else None

    def lose(network, source, header):
        if header.type is not kind or len(lost) >= 6:
            return header.type is unheard
        lost.append(header)
        return True

    network = Selective(2, lose, loss=0.15, seed=2)
    for number in range(3):
        exchange(network, 100_000, key=MessageKey(0, number), bound=bound)
    network.run(lambda: all(protocol.settled for protocol in network.ranks))
    assert lost, f"no {kind.name} was sent at all"


@pytest.mark.parametrize("kind", [PacketType.STOP, PacketType.BITMAP, PacketType.ACK, PacketType.PROBE])
def test_every_other_control_packet_may_be_lost(kind):
    seen = []

    def lose(network, source, header):
        if header.type is kind:
            seen.append(header)
        return header.type is kind and len(seen) % 2 == 1

    exchange(Selective(2, lose, loss=0.1), SIZE, bound=LossBound(0.05))


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_messages_of_several_bitmap_fragments(loss):
    options = TransportOptions(payload_bytes=64)
    size = 64 * 3000 - 11  # 512 packets a fragment
    network = Network(2, options=options, loss=loss, seed=5, rate_bps=20e6, depth=10_000)
    delivery, arrival = exchange(network, size, bound=LossBound(0.05))
    assert len(arrival.delivered) == 3000
    assert arrival.delivered.all() == (not loss)
    parts = {data[16:20]: data[32:] for *_, data in network.arrived if data[0] & 15 == PacketType.STOP}
    assert len(parts) == (6 if loss else 0)
    assert all(parts.values())
    assert delivery.sent >= 3000


@pytest.mark.parametrize("bound", [LossBound(), LossBound(0.1)], ids=str)
def test_of_a_message_that_comes_whole_an_acknowledgement_is_enough(bound):
    network = Network(2)
    delivery, arrival = exchange(network, SIZE, bound=bound)
    assert arrival.delivered.all()
    assert delivery.delivered.all()
    assert kinds_of(network) == {PacketType.DATA, PacketType.ACK}


def test_a_sender_asks_whether_its_message_is_done_if_the_last_acknowledgement_is_lost():
    network = Selective(2, lambda network, source, header: header.type is PacketType.ACK)
    exchange(network, 5000)
    stops = [data for *_, data in network.arrived if data[0] & 15 == PacketType.STOP]
    assert [len(data) for data in stops] == [32], "a STOP of a whole message needs no bitmap"


def test_a_rank_that_leaves_tells_senders_once_more_what_came_whole():
    network = Selective(2, lambda network, source, header: header.type in (PacketType.ACK, PacketType.PROBE))
    arrival = receive(network, 5000)
    delivery = send(network, payload_of(5000))
    network.run(all_done(arrival))
    assert not delivery.done()
    network.ranks[1].engine.remind(network.now)
    network.run(all_done(delivery))
    network.run(lambda: network.ranks[1].settled)
    assert delivery.result().delivered.all()
    network.dead.add(0)
    network.ranks[1].engine.remind(network.now)
    assert network.ranks[1].settled, "who knows need not be told"


def test_who_still_sends_of_a_message_that_came_whole_is_told_so():
    network = Selective(2, lambda network, source, header: header.type in (PacketType.ACK, PacketType.PROBE))
    arrival = receive(network, 1000)
    delivery = send(network, payload_of(1000))
    network.run(all_done(arrival))
    late = datagram(PacketType.DATA, sender=0, step=KEY.step, message=KEY.message, payload=bytes(1000))
    for _ in range(5):
        deliver(network.ranks[1], late, now_s=network.now)
    assert not delivery.done(), "it may have heard meanwhile"
    network.run(lambda: network.now > 0.05)
    for _ in range(5):
        deliver(network.ranks[1], late, now_s=network.now)
    network.run(all_done(delivery))
    assert sum(data[0] & 15 == PacketType.STOP for *_, data in network.arrived) == 1


def test_what_came_whole_is_told_for_two_silences():
    network = Selective(
        2, lambda network, source, header: header.type is PacketType.STOP_ACK, options=TransportOptions(silence_s=2.0)
    )
    exchange(network, 1000)
    asked = datagram(PacketType.PROBE, sender=0, step=KEY.step, message=KEY.message)
    network.run(lambda: network.now > 3.8)
    deliver(network.ranks[1], asked, now_s=network.now)
    assert network.ranks[1].refused["stale"] == 0
    network.run(lambda: network.now > 4.2)
    assert PacketType.STOP in kinds_of(network)
    deliver(network.ranks[1], asked, now_s=network.now)
    assert network.ranks[1].refused["stale"] == 1


def test_a_rank_that_leaves_does_not_wait_long_for_one_that_has_left():
    network = Network(2)
    exchange(network, 5000)
    network.dead.add(0)
    network.ranks[1].engine.remind(network.now)
    assert not network.ranks[1].settled
    began_s = network.now
    network.run(lambda: network.ranks[1].settled)
    assert network.now - began_s < 0.3


@pytest.mark.parametrize("payload_bytes", [64, 80, 88, 160, 1440, 9000])
def test_packets_of_any_size_are_acknowledged(payload_bytes):
    options = TransportOptions(payload_bytes=payload_bytes)
    network = Network(2, options=options, depth=10_000)
    delivery, arrival = exchange(network, payload_bytes * 200, bound=LossBound(0.2))
    assert arrival.delivered.all()
    assert delivery.sent == 200
    assert max(len(datagram) for *_, datagram in network.arrived) <= payload_bytes + 32
    acknowledgements = [datagram for *_, datagram in network.arrived if datagram[0] & 15 == PacketType.ACK]
    assert acknowledgements


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_what_comes_before_anybody_waits_is_kept(loss):
    network = Network(2, loss=loss, seed=4)
    payload, bound = payload_of(SIZE), LossBound(0.1)
    delivery = send(network, payload, bound=bound)
    network.run(lambda: network.now > 0.5)
    assert not delivery.done()
    came_in_time = sum(datagram[0] & 15 == PacketType.DATA for *_, datagram in network.arrived)
    arrival = receive(network, len(payload), bound=bound)
    network.ranks[1].take_events()
    assert arrival.done(), "all of it had come already"
    network.run(all_done(arrival, delivery))
    check(payload, plain_tags(packets_of(SIZE)), bound, delivery.result(), arrival.result(), 1440)
    assert sum(datagram[0] & 15 == PacketType.DATA for *_, datagram in network.arrived) == came_in_time


def test_a_rank_that_is_late_does_not_make_its_peers_slow():
    # A straggler answers every question at once; it only has not got to this step.
    network = Network(2, depth=1000, ecn_depth=1000)
    exchange(network, 500_000, key=MessageKey(0, 0))
    window = network.ranks[0].peers[1].control.window
    payload = payload_of(20_000)
    delivery = send(network, payload, key=MessageKey(1, 0))
    network.run(lambda: network.now > 3.0)
    arrival = receive(network, len(payload), key=MessageKey(1, 0))
    network.run(all_done(arrival, delivery))
    assert network.ranks[0].peers[1].control.window >= window


def test_a_straggler_is_not_pestered():
    network = Network(2)
    payload = payload_of(20_000)
    send(network, payload)
    network.run(lambda: network.now > 2.0)
    probes = sum(datagram[0] & 15 == PacketType.PROBE for *_, datagram in network.arrived)
    assert 2 <= probes < 60


def test_a_full_stash_loses_nothing_for_good():
    network = Network(2, options=TransportOptions(early_buffer_bytes=100_000))
    payloads = [payload_of(60_000, seed) for seed in range(3)]
    deliveries = [send(network, payload, key=MessageKey(0, number)) for number, payload in enumerate(payloads)]
    network.run(lambda: network.now > 0.3)
    assert network.ranks[1].counters()["early_full"] > 0
    arrivals = [receive(network, 60_000, key=MessageKey(0, number)) for number in range(3)]
    network.run(all_done(*arrivals, *deliveries))
    for payload, arrival in zip(payloads, arrivals, strict=True):
        np.testing.assert_array_equal(arrival.result().payload, payload)


@pytest.mark.parametrize("burst", [1, 64])
def test_a_socket_that_is_full_delays_and_loses_nothing(burst):
    network = Network(2, depth=10_000)
    network.ranks[0].engine.flows[1].burst = burst
    engine = network.ranks[0].engine
    refusals, pumping = [0], engine.pump

    def pump_sometimes(now_s):
        engine.view.room = 0 if network.random.random() < 0.4 else 40
        sent = pumping(now_s)
        refusals[0] += sent < 0
        engine.view.room = -1
        return sent

    engine.pump = pump_sometimes
    delivery, arrival = exchange(network, SIZE)
    assert refusals[0] > (50 if burst == 1 else 5)
    assert arrival.delivered.all()
    if burst == 1:  # else what is refused in the middle of a burst is as good as lost
        assert delivery.sent == packets_of(SIZE)
        assert delivery.resent == 0


def test_a_parameter_server_learns_the_size_from_the_sender():
    network = Network(2, loss=0.1, seed=6)
    heard = []
    arrivals = []

    def on_unexpected(peer, key):
        heard.append((peer, key))
        arrivals.append(outcome_of(network.ranks[1].receive, ReceiveRequest(peer, key, None, LossBound(0.3), "bucket")))

    network.ranks[1].listen(on_unexpected)
    payload = payload_of(100_001)
    tags = plain_tags(packets_of(len(payload)))
    tags.protected[-1] = True
    delivery = send(network, payload, bound=LossBound(0.3), tags=tags)
    network.run(all_done(delivery))
    assert heard == [(0, KEY)]
    check(payload, tags, LossBound(0.3), delivery.result(), arrivals[0].result(), 1440)


def test_a_message_that_arrives_before_anyone_listens_is_reported_once_somebody_does():
    network, heard = Network(2), []
    deliveries = [send(network, payload_of(size), key=MessageKey(KEY.step, n)) for n, size in enumerate((10, 5_000))]
    network.run(lambda: network.now > 0.01)
    network.ranks[1].listen(lambda *message: heard.append(message))
    assert sorted(heard) == [(0, MessageKey(KEY.step, 0)), (0, MessageKey(KEY.step, 1))]
    deliveries.append(send(network, payload_of(10), key=MessageKey(KEY.step, 2)))
    network.run(lambda: len(heard) == 3)
    assert heard[-1] == (0, MessageKey(KEY.step, 2))
    assert not any(delivery.done() for delivery in deliveries)


def test_waiting_for_a_message_of_unknown_size_that_nobody_sends_is_an_error():
    with pytest.raises(ValueError, match=r"size of conv1\.weight is unknown: nothing has arrived from rank 0"):
        receive(Network(2), None)


def test_a_message_of_other_tags_than_packets_is_refused():
    with pytest.raises(ValueError, match="do not fit 3 packets"):
        send(Network(2), payload_of(10_000), tags=plain_tags(3))
