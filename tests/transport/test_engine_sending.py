# SPDX-License-Identifier: Apache-2.0
"""An engine's sending side: the order of packets, and the window."""

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import LossBound, MessageKey
from dlcp.wire import Flag, PacketType
from tests.native.tagging_oracle import send_order
from tests.transport.bare_engine import KEY, SIZE, BareEngine, tags_of
from tests.transport.network import TOKEN

RTT_S = 0.02


def indices_of(sent):
    return [wire.decode(datagram).index for _, datagram, _ in sent]


# What leaves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("short_by", "tail_bytes"), [(0, 0), (40, 0), (95, 0), (0, 8), (40, 100), (40, 300), (0, 96)])
def test_packets_are_as_the_wire_format_has_them(short_by, tail_bytes):
    bare = BareEngine()
    rng = np.random.default_rng(1)
    count = 150
    tags = tags_of(rng.integers(2, 7, count), rng.integers(0, 8, count), rng.random(count) < 0.1)
    tags.layer[:] = rng.integers(0, 256, count)
    _, payload = bare.send(tags, ratio=0.2, short_by=short_by, tail_bytes=tail_bytes)
    order = bare.pump_all()
    droppable = ~tags.protected & (tags.drop_class > 0)
    expected = wire.pack(
        count,
        packet_type=PacketType.DATA,
        flags=np.where(tags.protected, int(Flag.PROTECTED), 0),
        queue=tags.queue,
        drop_class=np.where(droppable, tags.drop_class, 0),
        layer=tags.layer,
        job=1,
        budget=LossBound(0.2).allowed(count),
        step=KEY.step,
        message=KEY.message,
        sender=0,
        index=np.arange(count),
        count=count,
        token=TOKEN,
    )
    assert sorted(order) == list(range(count))
    for index, (rank, datagram, tos) in zip(order, bare.sent, strict=True):
        assert rank == 1
        assert datagram[:32] == expected[index].tobytes()
        assert datagram[32:] == payload[index * SIZE : (index + 1) * SIZE].tobytes()
        assert tos == wire.dscp(int(tags.queue[index]), bool(droppable[index])) << 2 | 2


def test_packets_leave_in_the_order_that_the_tags_ask_for():
    bare = BareEngine()
    queue = np.random.default_rng(0).integers(2, 7, 300).astype(np.uint8)
    message, _ = bare.send(tags_of(queue), ratio=0.5)
    order = bare.pump_all()
    assert order == send_order(queue, np.ones(300, np.bool_), KEY.step * 31 + KEY.message).tolist()
    assert (np.diff(queue[order].astype(int)) <= 0).all()
    assert (message.sent, message.resent, message.unsent, message.flying) == (300, 0, 0, 300)


@pytest.mark.parametrize("short_by", [0, 1])
def test_a_burst_has_one_type_of_service_and_ends_with_the_short_packet(short_by):
    bare = BareEngine()
    rng = np.random.default_rng(2)
    tags = tags_of(rng.integers(2, 7, 200), rng.integers(0, 8, 200))
    message, _ = bare.send(tags, ratio=0.3, short_by=short_by)
    for again in (False, True):
        while True:
            before = len(bare.sent)
            if not bare.pump(burst=7):
                break
            burst = bare.sent[before:]
            assert 1 <= len(burst) <= 7
            assert len({(tos, datagram[2] >> 5) for _, datagram, tos in burst}) == 1
            assert {len(datagram) for _, datagram, _ in burst[:-1]} <= {32 + SIZE}
        assert not message.unsent
        if not again:
            bare.lose(message, range(200))


def test_a_burst_fits_the_largest_datagram():
    bare = BareEngine(size=9000)
    bare.send(tags_of([4] * 20))
    assert len(bare.pump()) == 65000 // 9032


def test_messages_go_by_queue_then_by_layer_then_by_age():
    bare = BareEngine()
    plans = [(3, 10), (5, 200), (5, 20), (5, 20), (6, 255), (3, 9)]
    for number, (queue, layer) in enumerate(plans):
        bare.send(tags_of([queue] * 3, layer=layer), key=MessageKey(1, number))
    bare.pump_all()
    order = [wire.decode(datagram).message for _, datagram, _ in bare.sent]
    assert order == [number for number in (4, 2, 3, 1, 5, 0) for _ in range(3)]


def test_a_message_is_as_urgent_as_its_next_packet():
    bare = BareEngine()
    bare.send(tags_of([6, 6, 2, 2]), key=MessageKey(1, 0))
    bare.send(tags_of([4, 4]), key=MessageKey(1, 1))
    bare.pump_all()
    assert [wire.decode(datagram).message for _, datagram, _ in bare.sent] == [0, 0, 1, 1, 0, 0]
    message, _ = bare.send(tags_of([5, 2]), key=MessageKey(1, 2))
    bare.pump_all()
    bare.send(tags_of([3, 3]), key=MessageKey(1, 3))
    bare.lose(message, [0])
    bare.pump_all()
    assert [wire.decode(datagram).message for _, datagram, _ in bare.sent[-3:]] == [2, 3, 3], (
        "what is sent again counts"
    )


def test_every_peer_gets_its_burst():
    bare = BareEngine(peers=(1, 2, 5))
    for rank in (1, 2, 5):
        bare.send(tags_of([4] * 3), rank=rank)
    assert bare.engine.pump(0.0) == 9
    bare.drain()
    assert [rank for rank, _, _ in bare.sent] == [1] * 3 + [2] * 3 + [5] * 3


# Windows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "largest", "flying"), [(7.9, 100, 7), (20.0, 12, 12), (1.0, 1, 1)])
def test_no_more_is_on_the_wire_than_the_window_admits(window, largest, flying):
    bare = BareEngine()
    bare.flow.window, bare.flow.largest_window = window, largest
    message, _ = bare.send(tags_of([4] * 50))
    bare.pump_all()
    assert bare.flow.flying == message.flying == len(bare.sent) == flying
    bare.acknowledge(RTT_S, indices_of(bare.sent)[0])
    bare.pump_all(RTT_S)
    assert len(bare.sent) == flying + 1


def test_a_window_of_less_than_a_packet_admits_one_now_and_then():
    bare = BareEngine(window=4.0)
    bare.send(tags_of([4] * 50))
    first = bare.pump_all(1.0)
    bare.acknowledge(1.0 + RTT_S, *first)
    assert bare.flow.smoothed_rtt_s == pytest.approx(RTT_S, abs=1e-6)
    bare.flow.window = 0.25
    for when, leaves in ((1.05, 0), (1.079, 0), (1.081, 1), (1.081, 0), (1.5, 0)):
        assert len(bare.pump_all(when)) == leaves, when
    bare.acknowledge(1.5, indices_of(bare.sent)[-1])
    assert len(bare.pump_all(1.5)) == 1


def test_a_mute_flow_keeps_its_data():
    bare = BareEngine()
    bare.send(tags_of([4] * 5))
    bare.flow.mute = True
    assert bare.pump_all() == []
    bare.engine.send_control(1, PacketType.ABORT, b"control")
    bare.drain()
    ((rank, datagram, tos),) = bare.sent
    assert (rank, datagram[32:], tos) == (1, b"control", wire.dscp(7, False) << 2)
    bare.flow.mute = False
    assert len(bare.pump_all()) == 5


@pytest.mark.parametrize("resent", [False, True])
def test_what_the_socket_refuses_is_not_skipped(resent):
    bare = BareEngine()
    message, _ = bare.send(tags_of([3] * 5))
    if resent:
        bare.pump_all()
        bare.lose(message, range(5))
        bare.sent.clear()
    numbers = (message.sent, message.resent, message.unsent, message.flying)
    bare.engine.view.room = 0
    assert bare.engine.pump(1.0) == -1
    assert (message.sent, message.resent, message.unsent, message.flying) == numbers
    bare.engine.view.room = -1
    assert sorted(bare.pump_all(2.0)) == list(range(5))
    assert message.resent == (5 if resent else 0)


def test_what_is_complete_leaves_room_for_others():
    bare = BareEngine(window=20.0)
    message, _ = bare.send(tags_of([4] * 30))
    other, _ = bare.send(tags_of([2] * 30), key=MessageKey(1, 9))
    bare.pump_all()
    assert (bare.flow.flying, message.flying) == (20, 20)
    for _ in range(2):
        bare.take(PacketType.STOP, step=KEY.step, message=KEY.message, count=30, now_s=RTT_S)
        assert (bare.flow.flying, message.flying, message.unsent, message.sent) == (0, 0, 0, 20)
    assert [wire.decode(data).type for _, data, _ in bare.sent[-2:]] == [PacketType.STOP_ACK] * 2
    bare.acknowledge(RTT_S, *range(20))
    assert bare.flow.flying == 0
    assert len(bare.confirmed) == 1
    assert len(bare.pump_all()) == 20
    assert other.flying == 20


def test_a_message_can_be_sent_on_from_a_copy():
    bare = BareEngine()
    message, payload = bare.send(tags_of([4] * 6), tail_bytes=150)
    bare.pump(burst=3)
    copy = payload[:-150].copy()
    copy[:] ^= 255
    assert bare.engine.detach(1, KEY, copy)
    bare.pump_all()
    bare.lose(message, range(6))
    bare.pump_all()
    now = np.concatenate([copy, payload[-150:]])
    for place, (_, datagram, _) in enumerate(bare.sent):
        index = wire.decode(datagram).index
        source = payload if place < 3 else now
        assert datagram[32:] == source[index * SIZE : (index + 1) * SIZE].tobytes()
