# SPDX-License-Identifier: Apache-2.0
"""Packets that do not belong to a session are refused and counted, and change nothing."""

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import LossBound, MessageKey, MessageMismatchError, PeerAbortedError, TransportOptions
from dlcp.transport.settings import PATHS_MAX
from tests.transport.exchanges import (
    KEY,
    TOKEN,
    Network,
    PacketType,
    all_done,
    datagram,
    deliver,
    exchange,
    payload_of,
    receive,
    send,
)

FRAGMENT = bytes(1440)


@pytest.mark.parametrize(
    ("data", "source", "reason"),
    [
        (datagram(PacketType.DATA, token=TOKEN + 1, payload=FRAGMENT), 0, "token"),
        (datagram(PacketType.ABORT, token=0, payload=b"forged"), 0, "token"),
        (datagram(PacketType.DATA, job=2, payload=FRAGMENT), 0, "job"),
        (datagram(PacketType.DATA, sender=9, payload=FRAGMENT), 0, "sender"),
        (datagram(PacketType.DATA, sender=1, payload=FRAGMENT), 0, "sender"),
        (datagram(PacketType.DATA, sender=2, payload=FRAGMENT), 0, "sender"),
        (datagram(PacketType.DATA, payload=FRAGMENT), 2, "sender"),
        (b"", 0, "malformed"),
        (b"\x11", 0, "malformed"),
        (datagram(PacketType.DATA)[:31], 0, "malformed"),
        (b"\x21" + datagram(PacketType.DATA, payload=FRAGMENT)[1:], 0, "malformed"),
        (b"\x1f" + datagram(PacketType.DATA, payload=FRAGMENT)[1:], 0, "malformed"),
        (b"\x10" + datagram(PacketType.DATA, payload=FRAGMENT)[1:], 0, "malformed"),
        (datagram(PacketType.DATA, payload=FRAGMENT[:-1], count=2), 0, "malformed"),
        (datagram(PacketType.DATA, payload=b"", count=1), 0, "malformed"),
        (datagram(PacketType.DATA, payload=FRAGMENT + b"\0", count=1), 0, "malformed"),
        (datagram(PacketType.DATA, payload=FRAGMENT, index=1, count=1), 0, "malformed"),
        (datagram(PacketType.DATA, payload=FRAGMENT, index=0, count=0), 0, "malformed"),
        (datagram(PacketType.DATA, payload=FRAGMENT, count=1 << 30), 0, "malformed"),
        (datagram(PacketType.DATA, payload=FRAGMENT, step=1 << 31), 0, "stale"),
        (datagram(PacketType.PROBE, index=5, count=4), 0, "malformed"),
        (datagram(PacketType.PROBE, count=0), 0, "malformed"),
        (datagram(PacketType.PROBE, count=1, step=1 << 31), 0, "stale"),
        (datagram(PacketType.ACK, payload=b""), 0, "malformed"),
        (datagram(PacketType.ACK, payload=bytes(11)), 0, "malformed"),
        (datagram(PacketType.HELLO, payload=bytes(7)), 0, "malformed"),
        (datagram(PacketType.HELLO_ACK), 0, "malformed"),
        (datagram(PacketType.HELLO, payload=bytes(9)), 0, "malformed"),
        (datagram(PacketType.HELLO, payload=bytes(8 + 2 * PATHS_MAX)), 0, "malformed"),
        # Late probes of the path's MTU (dlcp/transport/path_mtu.py).
        (datagram(PacketType.HELLO, index=1440, payload=bytes(1440)), 0, "stale"),
        (datagram(PacketType.HELLO_ACK, index=1440), 0, "stale"),
    ],
)
def test_a_packet_that_is_wrong_is_refused_by_its_fault(data, source, reason):
    network = Network(3)
    protocol = network.ranks[1]
    deliver(protocol, data, source=source)
    assert dict(protocol.refused) == {reason: 1}
    network.run(lambda: not network.events)
    assert network.arrived == [], "a refused packet is not answered"
    exchange(network, 5000)


@pytest.mark.parametrize("kind", [PacketType.BITMAP, PacketType.STOP])
@pytest.mark.parametrize(
    ("index", "count", "size"),
    [(0, 8, 1), (0, 7, 2), (1, 7, 1), (11520, 7, 1), (0, 7, 0), (0, 8, 0), (1, 7, 0)],
    ids=str,
)
def test_bitmaps_that_do_not_fit_their_message_are_refused(kind, index, count, size):
    if (kind, index, count, size) == (PacketType.STOP, 0, 7, 0):
        return  # of a message that is whole
    network = Network(2, rate_bps=1e6)
    payload = payload_of(7 * 1440)
    arrival, delivery = receive(network, len(payload)), send(network, payload)
    protocol = network.ranks[0]
    network.ranks[0].pump(0.0)
    deliver(protocol, datagram(kind, sender=1, index=index, count=count, payload=b"\xff" * size), source=1)
    assert dict(protocol.refused) == {"malformed": 1}
    network.run(all_done(arrival, delivery))
    assert delivery.result().delivered.all()


def test_an_answer_to_nothing_is_ignored():
    network = Network(2)
    protocol = network.ranks[0]
    for kind in (PacketType.BITMAP, PacketType.STOP_ACK):
        deliver(protocol, datagram(kind, sender=1, payload=b"\xff"), source=1)
    deliver(protocol, datagram(PacketType.ACK, sender=1, payload=bytes(20)), source=1)
    assert protocol.counters()["late"] == 1
    exchange(network, 5000)


def test_a_stop_of_a_message_long_done_is_answered_all_the_same():
    # Else its receiver would repeat it until its deadline.
    network = Network(2)
    exchange(network, 5000)
    network.run(lambda: network.ranks[1].settled)
    before = sum(data[0] & 15 == PacketType.STOP_ACK for *_, data in network.arrived)
    deliver(network.ranks[0], datagram(PacketType.STOP, sender=1, count=4, payload=b"\xf0"), source=1)
    network.run(lambda: not network.events)
    assert sum(data[0] & 15 == PacketType.STOP_ACK for *_, data in network.arrived) == before + 1


def test_packets_of_steps_that_are_over_are_refused():
    network = Network(2)
    receiver = network.ranks[1]
    receiver.begin_step(4)
    deliver(receiver, datagram(PacketType.DATA, step=3, payload=FRAGMENT))
    deliver(receiver, datagram(PacketType.PROBE, step=3, count=1))
    assert dict(receiver.refused) == {"stale": 2}
    deliver(receiver, datagram(PacketType.DATA, step=4, payload=FRAGMENT))
    assert receiver.counters()["data"] == 1
    receiver.begin_step(2)
    deliver(receiver, datagram(PacketType.DATA, step=3, payload=FRAGMENT))
    assert receiver.refused["stale"] == 3, "what is over stays over"


def test_what_was_stashed_of_a_step_that_is_over_is_given_back():
    network = Network(2, options=TransportOptions(early_buffer_bytes=20_000))
    receiver = network.ranks[1]
    for step in range(20):
        deliver(receiver, datagram(PacketType.DATA, step=step, payload=FRAGMENT, count=10))
        receiver.begin_step(step + 1)
    assert not receiver.counters()["early_full"]
    assert receiver.counters()["data"] == 20


def test_late_packets_of_a_message_that_is_done_change_nothing():
    network = Network(2)
    _, arrival = exchange(network, 5000)
    before = arrival.payload.copy()
    receiver = network.ranks[1]
    deliver(receiver, datagram(PacketType.DATA, count=4, index=1, payload=b"\xee" * 1440))
    assert receiver.counters()["late"] == 1
    np.testing.assert_array_equal(arrival.payload, before)


def test_a_huge_message_is_no_way_to_a_rank_s_memory():
    receiver = Network(2).ranks[1]
    for number in range(500):
        deliver(receiver, datagram(PacketType.DATA, message=number, count=1 << 22, payload=FRAGMENT))
        deliver(receiver, datagram(PacketType.PROBE, message=number, count=1 << 17))
    assert receiver.counters()["early_full"] > 500
    most = receiver.options.early_buffer_bytes
    assert most / 2 < receiver.engine.view.early_bytes <= most


@pytest.mark.parametrize(("sent", "expected"), [(5000, 9000), (9000, 5000), (5000, 5001), (5001, 5000)])
@pytest.mark.parametrize("early", [True, False])
def test_ranks_that_disagree_about_a_size_are_told(sent, expected, early):
    network = Network(2, options=TransportOptions(deadline_s=2.0))
    if early:
        send(network, payload_of(sent))
        network.run(lambda: network.now > 0.1)
    arrival = receive(network, expected, bound=LossBound(0.1), label="conv1.weight..fc.bias")
    if not early:
        send(network, payload_of(sent))
    network.run(all_done(arrival))
    with pytest.raises(MessageMismatchError) as caught:
        arrival.result()
    for word in ("job 1", "step 3", "rank 0", "conv1.weight..fc.bias"):
        assert word in str(caught.value)


def test_ranks_of_different_packet_sizes_are_told_at_the_first_greeting():
    network = Network(2)
    hello = datagram(PacketType.HELLO, sender=1, payload=(9000).to_bytes(4, "big") + (100).to_bytes(4, "big"))
    waiting = receive(network, 5000, source=1, target=0)
    deliver(network.ranks[0], hello, source=1)
    with pytest.raises(MessageMismatchError, match="rank 1 sends 9000 bytes a packet and rank 0 1440"):
        waiting.result(0)


def test_a_peer_that_gives_up_ends_everything_with_its_reason():
    network = Network(3)
    waiting = (
        receive(network, 5000),
        receive(network, 5000, source=2),
        send(network, payload_of(50), source=1, target=0),
    )
    network.ranks[2].liveness.abort("rank 2: CUDA is on fire")
    network.run(all_done(*waiting))
    for future in waiting:
        with pytest.raises(PeerAbortedError, match="rank 2 gave up: rank 2: CUDA is on fire"):
            future.result()
    with pytest.raises(PeerAbortedError):
        send(network, payload_of(50), source=1, target=0, key=MessageKey(9, 9)).result(0)
    with pytest.raises(PeerAbortedError):
        receive(network, 50, key=MessageKey(9, 9)).result(0)


def test_what_arrives_in_one_batch_with_a_reason_for_giving_up_is_taken():
    """The engine has acknowledged it, so the peer keeps no copy."""
    network = Network(2)
    first, second = network.ranks
    arriving = receive(network, 50, source=1, target=0)
    sending = send(network, payload_of(50), source=1, target=0)
    second.liveness.abort("rank 1: CUDA is on fire")
    second.pump(0.0)
    batch = [data for _, source, _, data in network.sent if source == 1]
    assert [wire.decode(data).type for data in batch] == [PacketType.ABORT, PacketType.DATA]
    network.events.clear()
    for data in batch:
        first.engine.take_in(memoryview(data), 0, ("10.0.0.1", 53696), 0.0)
    first.take_events()
    assert arriving.result(0).whole
    network.run(all_done(sending))
    with pytest.raises(PeerAbortedError):
        receive(network, 50, source=1, target=0, key=MessageKey(9, 9)).result(0)


def test_a_reason_for_giving_up_fits_a_packet():
    network = Network(2, options=TransportOptions(payload_bytes=64))
    waiting = receive(network, 500)
    network.ranks[0].liveness.abort("ü" * 5000)
    network.run(all_done(waiting))
    assert max(len(data) for *_, data in network.arrived) <= 64 + 32
    with pytest.raises(PeerAbortedError, match="üü"):
        waiting.result()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"congestion": "reno"}, "dctcp"),
        ({"payload_bytes": 0}, "payload_bytes"),
        ({"payload_bytes": 1441}, "multiple of 8"),
        ({"payload_bytes": 65008}, "payload_bytes"),
    ],
)
def test_options_that_cannot_work_are_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        TransportOptions(**fields)


def test_both_ends_know_the_same_message():
    assert KEY == (3, 1)
