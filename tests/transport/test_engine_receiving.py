# SPDX-License-Identifier: Apache-2.0
"""An engine's receiving side: the packets of a message, where their bytes go, completion, and events."""

import math

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import MessageKey
from dlcp.wire import ACK_WHOLE, PacketType
from tests.transport.bare_engine import KEY, SIZE, BareEngine
from tests.transport.network import TOKEN


def content(size, seed=0):
    return np.random.default_rng(seed).integers(1, 256, size, np.uint8)


def packet(payload, index):
    return payload[index * SIZE : (index + 1) * SIZE].tobytes()


# What belongs to a message --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [1, 40, SIZE - 1, SIZE])
def test_only_packets_of_the_right_size_fit(last):
    bare = BareEngine()
    message, *_ = bare.expect(3 * SIZE + last)
    refused = 0
    for index in (0, 2):
        for size in (0, 1, 39, 40, 41, SIZE - 1, SIZE + 1, 5 * SIZE):
            bare.take_data(index, 4, bytes(size))
            refused += 1
    for index, count, size in ((4, 4, SIZE), (4, 4, 40), (1 << 31, 4, SIZE), (3, 4, 0), (3, 4, SIZE + 1)):
        bare.take_data(index, count, bytes(size))
        refused += 1
    assert bare.engine.counters() == {"refused_malformed": refused}
    assert not bare.mismatches
    assert message.arrived == 0
    for index in range(4):
        bare.take_data(index, 4, bytes(last if index == 3 else SIZE))
    assert message.arrived == 4


@pytest.mark.parametrize(("index", "count", "size"), [(0, 5, SIZE), (3, 5, SIZE), (2, 3, 40), (3, 4, SIZE), (3, 4, 39)])
def test_data_of_another_size_than_the_posted_one_ends_the_receive(index, count, size):
    bare = BareEngine()
    bare.expect(3 * SIZE + 40)
    bare.take_data(0, 4)
    bare.take_data(index, count, bytes(size))
    assert [(event.peer, event.key, event.packets) for event in bare.mismatches] == [(1, KEY, count)]
    bare.take_data(1, 4)
    assert bare.engine.counters()["late"] == 1


def test_before_the_size_is_known_the_last_packet_may_have_any():
    bare = BareEngine()
    bare.take_data(3, 4, bytes(30))
    assert [(event.peer, event.key) for event in bare.unexpected] == [(1, KEY)]
    message, *_ = bare.expect(4 * SIZE, known=False)
    bare.take_data(3, 4, bytes(30))
    assert bare.engine.counters()["duplicate"] == 1
    for index in range(3):
        bare.take_data(index, 4)
    assert message.done.last_bytes == 30


def test_a_receive_of_another_size_than_what_has_come_is_refused():
    bare = BareEngine()
    bare.take_data(1, 4)
    bare.expect(5 * SIZE)
    assert bare.refused_with == 4
    bare.take_data(3, 4, bytes(30), key=MessageKey(1, 7))
    bare.expect(3 * SIZE + 31, key=MessageKey(1, 7))
    assert bare.refused_with == 4


def test_memory_for_what_comes_early_is_limited_and_given_back():
    bare = BareEngine(early_buffer_bytes=10 * SIZE)
    for number in range(4):
        bare.take_data(0, 3, key=MessageKey(1, number))
    assert len(bare.unexpected) == 3
    assert bare.engine.view.early_bytes == 9 * SIZE
    assert bare.engine.counters()["early_full"] == 1
    bare.expect(3 * SIZE, key=MessageKey(1, 0))
    assert bare.engine.view.early_bytes == 6 * SIZE
    bare.take_data(0, 3, key=MessageKey(1, 3))
    assert len(bare.unexpected) == 4
    bare.engine.begin_step(2, 0.0)
    assert bare.engine.view.early_bytes == 0


def test_messages_of_all_peers_and_steps_are_told_apart():
    bare = BareEngine(peers=(1, 2, 200))
    rng = np.random.default_rng(3)
    keys = [(rank, MessageKey(step, number)) for rank in (1, 2, 200) for step in (0, 1, 0xFFFF) for number in
            (0, 1, 2, 0x8000, 0xFFFF, *range(100, 150))]  # fmt: skip
    expected = {(rank, key): bare.expect(2 * SIZE, rank=rank, key=key) for rank, key in keys}
    payloads = {key: content(2 * SIZE, number) for number, key in enumerate(keys)}
    packets = [(*name, index) for name in keys for index in range(2)]
    rng.shuffle(packets)
    for rank, key, index in packets:
        key = MessageKey(int(key[0]), int(key[1]))
        name = (int(rank), key)
        bare.take_data(int(index), 2, packet(payloads[name], int(index)), key=key, rank=int(rank))
    assert not bare.unexpected
    assert len(bare.settled) == len(keys)
    for name, (message, buffer, _) in expected.items():
        assert message.arrived == 2
        assert buffer.tobytes() == payloads[name].tobytes()


def test_what_is_not_for_this_session_is_counted():
    bare = BareEngine()
    message, *_ = bare.expect(2 * SIZE)
    good = wire.Header(PacketType.DATA, 0, 4, 0, 0, 1, 0, *KEY, 1, 0, 2, TOKEN)
    for header, source, reason in (
        (good._replace(token=TOKEN ^ 1 << 63), 1, "token"),
        (good._replace(job=2), 1, "job"),
        (good._replace(sender=0), 1, "sender"),
        (good._replace(sender=2), 1, "sender"),
        (good._replace(sender=0xFFFF), 1, "sender"),
        (good, 2, "sender"),
    ):
        before = bare.engine.counters().get(f"refused_{reason}", 0)
        bare.engine.take_in(memoryview(header.encode() + bytes(SIZE)), 0, (f"10.0.0.{source}", 53696), 5.0)
        assert bare.engine.counters()[f"refused_{reason}"] == before + 1
    bare.engine.take_in(memoryview(good.encode() + bytes(SIZE)), 0, ("10.0.0.1", 53697), 5.0)
    assert bare.engine.counters()["refused_sender"] == 5
    for size in range(32):
        bare.engine.take_in(memoryview(good.encode()[:size]), 0, ("10.0.0.1", 53696), 5.0)
    for kind in {first for first in range(256) if first >> 4 != 1 or not 1 <= first & 15 <= 9}:
        bare.engine.take_in(memoryview(bytes([kind]) + good.encode()[1:]), 0, ("10.0.0.1", 53696), 5.0)
    assert bare.engine.counters()["refused_malformed"] == 32 + 256 - 9
    assert message.arrived == 0
    assert bare.flow.heard_s == 0
    bare.take_data(0, 2, now_s=6.0)
    assert bare.flow.heard_s == 6.0


@pytest.mark.parametrize("kind", [PacketType.HELLO, PacketType.HELLO_ACK, PacketType.ABORT])
@pytest.mark.parametrize("payload", [b"", b"\1", bytes(range(200))])
def test_what_is_about_a_peer_is_handed_on(kind, payload):
    bare = BareEngine()
    bare.take(kind, payload, index=7, count=9, now_s=3.0)
    ((peer, datagram, now_s),) = bare.controls
    header = wire.decode(datagram)
    assert (peer, header.type, header.index, header.count, now_s) == (1, kind, 7, 9, 3.0)
    assert datagram[wire.HEADER_BYTES :] == payload


# Where its bytes go ---------------------------------------------------------------------------------------------------


def test_what_is_missing_stays_as_it_was():
    bare = BareEngine()
    message, buffer, _ = bare.expect(3 * SIZE + 50, fill=7, ratio=0.5)
    bare.take_data(2, 4, bytes([9]) * SIZE, layer=77)
    bare.take_data(3, 4, bytes([5]) * 50, layer=88, protected=True)
    assert bare.probe(4, 1) == [(PacketType.STOP, [False, False, True, True])]
    assert buffer.tolist() == [7] * 2 * SIZE + [9] * SIZE + [5] * 50
    assert message.done.delivered.tolist() == [False, False, True, True]
    assert message.done.layer.tolist() == [0, 0, 77, 88]
    assert message.done.delivered.dtype == np.bool_
    assert message.done.layer.dtype == np.uint8


@pytest.mark.parametrize("tail_bytes", [0, 1, 49, 50, 51, SIZE + 49, SIZE + 50, 2 * SIZE, 3 * SIZE + 50])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_what_does_not_fit_the_buffer_goes_to_the_tail(tail_bytes, order):
    bare = BareEngine()
    size = 3 * SIZE + 50
    payload = content(size)
    message, buffer, tail = bare.expect(size, tail_bytes=tail_bytes)
    for index in order:
        bare.take_data(index, 4, packet(payload, index))
    assert np.concatenate([buffer, tail]).tobytes() == payload.tobytes()
    assert message.arrived == 4


@pytest.mark.parametrize("tail_bytes", [0, 30, 50, 51, 2 * SIZE])
@pytest.mark.parametrize("there", [(), (3,), (0, 2), (1, 3), (0, 1, 2, 3)])
def test_what_came_early_moves_to_where_it_belongs(tail_bytes, there):
    bare = BareEngine()
    size = 3 * SIZE + 50
    payload = content(size)
    for index in there:
        bare.take_data(index, 4, packet(payload, index))
    message, buffer, tail = bare.expect(size, tail_bytes=tail_bytes, fill=3)
    now = np.concatenate([buffer, tail])
    for index in range(4):
        part = now[index * SIZE : (index + 1) * SIZE]
        assert part.tobytes() == packet(payload, index) if index in there else (part == 3).all()
    for index in set(range(4)) - set(there):
        bare.take_data(index, 4, packet(payload, index))
    assert np.concatenate([buffer, tail]).tobytes() == payload.tobytes()
    assert message.done.delivered.all()


def test_a_duplicate_changes_nothing():
    bare = BareEngine()
    message, buffer, _ = bare.expect(4 * SIZE, ratio=0.26)
    bare.take_data(1, 4, bytes([1]) * SIZE, layer=5, protected=True)
    bare.take_data(1, 4, bytes([2]) * SIZE, layer=6, protected=True)
    assert (message.arrived, buffer[SIZE]) == (1, 1)
    counters = bare.engine.counters()
    assert (counters["data"], counters["duplicate"]) == (1, 1)
    assert bare.probe(4, 2) == [(PacketType.BITMAP, [False, True, False, False])]
    for index in (0, 2):
        bare.take_data(index, 4)
    assert not bare.settled, "one protected packet has not come, however often the other has"
    bare.take_data(3, 4, protected=True)
    assert message.done.layer[1] == 5


# When it is complete --------------------------------------------------------------------------------------------------


def test_enough_takes_the_share_and_every_protected_packet_and_a_question():
    bare = BareEngine()
    message, *_ = bare.expect(10 * SIZE, ratio=0.2)
    for index in range(8):
        bare.take_data(index, 10, protected=index == 0)
    assert bare.probe(10, 2) == [(PacketType.BITMAP, [True] * 8 + [False] * 2)], "a protected packet is missing"
    assert not bare.settled
    bare.take_data(8, 10, protected=True)
    assert message.done.delivered.sum() == 9
    bare.take_data(9, 10)
    assert len(bare.settled) == 1, "it is complete only once"
    assert bare.engine.view.stopping_count
    assert bare.probe(10, 2) == [(PacketType.STOP, [True] * 9 + [False])]
    bare.take(PacketType.STOP_ACK, step=KEY.step, message=KEY.message)
    assert not bare.engine.view.stopping_count


def test_a_sender_with_more_to_send_does_not_end_it():
    bare = BareEngine()
    bare.expect(10 * SIZE, ratio=0.5)
    for index in range(8):
        bare.take_data(index, 10)
    assert bare.probe(10, more=True) == [(PacketType.BITMAP, [True] * 8 + [False] * 2)]
    assert not bare.settled
    assert bare.probe(10) == [(PacketType.STOP, [True] * 8 + [False] * 2)]
    assert bare.settled


def test_a_whole_message_is_complete_without_a_question():
    bare = BareEngine()
    message, *_ = bare.expect(10 * SIZE, ratio=0.5)
    for index in range(10):
        assert not bare.settled
        bare.take_data(index, 10)
    assert message.done.delivered.all()
    assert not bare.engine.view.stopping_count, "the acknowledgement tells the sender; no STOP is needed"
    assert bare.probe(10) == [(PacketType.STOP, [])], "if that is lost, it asks"


def test_enough_cannot_be_known_before_the_sender_has_said_how_many_are_protected():
    bare = BareEngine()
    bare.expect(10 * SIZE, ratio=0.5, immediate=True)
    for index in range(7):
        bare.take_data(index, 10)
    assert not bare.settled
    assert bare.probe(10) == [(PacketType.STOP, [True] * 7 + [False] * 3)]
    assert len(bare.settled) == 1


def test_immediate_mode_needs_no_question_once_it_is_known():
    bare = BareEngine()
    bare.probe(10, 1)
    bare.expect(10 * SIZE, ratio=0.5, immediate=True)
    for index in range(4):
        bare.take_data(index, 10, protected=index == 2)
    assert not bare.settled
    bare.take_data(4, 10)
    assert len(bare.settled) == 1


def test_without_a_posted_receive_nothing_is_complete():
    bare = BareEngine()
    for index in range(3):
        bare.take_data(index, 3)
    assert bare.probe(3) == [(PacketType.BITMAP, [True] * 3)]
    assert not bare.settled
    message, *_ = bare.expect(3 * SIZE)
    assert message.done.delivered.all()


def test_what_is_complete_is_remembered_until_its_step_is_over():
    bare = BareEngine(silence_s=2.0)
    for number in range(50):
        key = MessageKey(1, number)
        bare.expect(9 * SIZE, key=key)
        for index in range(9):
            bare.take_data(index, 9, key=key, now_s=number * 1.0)
        bare.tick(number + 0.5)
    assert len(bare.settled) == 50
    bare.take_data(3, 9, now_s=50.0)
    assert (bare.engine.counters()["late"], bare.unexpected) == (1, [])
    acknowledged = {(key.message, block) for _, entries in bare.acknowledgements() for key, block, _ in entries}
    assert acknowledged == {(number, ACK_WHOLE) for number in range(50)}
    bare.engine.begin_step(2, 60.0)
    bare.take_data(3, 9, now_s=60.0)
    assert bare.engine.counters()["refused_stale"] == 1
    bare.take_data(3, 9, key=MessageKey(2, 0), now_s=60.0)
    assert len(bare.unexpected) == 1


def test_what_is_forgotten_may_come_again():
    bare = BareEngine()
    bare.expect(SIZE)
    bare.take_data(0, 1)
    bare.take_data(0, 1)
    assert (bare.engine.counters()["late"], bare.unexpected) == (1, [])
    bare.engine.forget(1, KEY)
    bare.take_data(0, 1)
    assert len(bare.unexpected) == 1


# What is acknowledged -------------------------------------------------------------------------------------------------


def test_eight_packets_are_acknowledged_at_once_and_fewer_after_a_millisecond():
    bare = BareEngine()
    bare.expect(200 * SIZE)
    assert bare.tick(1.0) == math.inf
    for index in range(7):
        bare.take_data(index, 200, now_s=1.0)
    assert bare.tick(1.0) == pytest.approx(1.001)
    assert bare.sent == []
    bare.take_data(7, 200, now_s=1.0002)
    assert bare.tick(1.0003) == math.inf
    ((header, entries),) = bare.acknowledgements()
    assert entries == [(KEY, 0, 0xFF)]
    assert (header.index, header.count, header.sender, header.queue) == (1_000_200, 0, 0, 7)
    assert header.step == pytest.approx(100, abs=1), "microseconds since the newest packet"
    bare.take_data(8, 200, now_s=2.0)
    assert bare.tick(2.0) == pytest.approx(2.001)
    assert bare.tick(2.0011) == math.inf
    assert set(bare.acknowledgements()[-1][1]) == {(KEY, 0, 0x1FF)}


@pytest.mark.parametrize(("tagged", "queue", "tos"), [(True, 7, wire.dscp(7, False) << 2), (False, 1, 0)])
def test_acknowledgements_travel_with_the_control_packets(tagged, queue, tos):
    bare = BareEngine(tagged=tagged)
    bare.expect(200 * SIZE)
    bare.take_data(0, 200, now_s=1.0)
    bare.tick(2.0)
    ((rank, datagram, got),) = bare.sent
    assert (rank, got, wire.decode(datagram).queue) == (1, tos, queue)


def test_duplicates_are_acknowledged_too_and_marks_counted():
    bare = BareEngine()
    bare.expect(200 * SIZE)
    for tos in (0, 1, 2, 3, 0b10011111):
        bare.take_data(5, 200, tos=tos, now_s=1.0)
    bare.tick(2.0)
    ((header, entries),) = bare.acknowledgements()
    assert entries == [(KEY, 0, 1 << 5)]
    assert (header.index, header.count) == (1_000_000, 2)


def test_the_next_acknowledgement_repeats_what_the_last_one_told_first():
    bare = BareEngine()
    bare.expect(1000 * SIZE)
    blocks = [(0,), (1,), (2, 3), (4,)]
    for number, chosen in enumerate(blocks):
        for block in chosen:
            bare.take_data(64 * block + 63, 1000, now_s=1.0 + number)
        bare.tick(1.5 + number)
    told = [[block for _, block, _ in entries] for _, entries in bare.acknowledgements()]
    assert told == [[0], [0, 1], [1, 2, 3], [2, 3, 4]]
    assert all(bits == 1 << 63 for _, entries in bare.acknowledgements() for _, _, bits in entries)


@pytest.mark.parametrize("size", [64, 96, 1440])
def test_many_blocks_take_several_acknowledgements(size):
    bare = BareEngine(size=size)
    bare.expect(64 * 200 * size)
    for block in range(200):
        bare.take_data(64 * block + block % 64, 64 * 200, now_s=1.0)
    bare.tick(1.0)
    found = bare.acknowledgements()
    assert max(len(datagram) for _, datagram, _ in bare.sent) <= 32 + size
    assert {(block, bits) for _, entries in found for _, block, bits in entries} == {
        (block, 1 << block % 64) for block in range(200)
    }
    assert {header.index for header, _ in found} == {1_000_000}
    assert len(found) >= 200 // (size // 18)
    bare.tick(9.0)
    assert len(bare.acknowledgements()) == len(found), "once is enough"


def test_a_complete_message_is_acknowledged_at_once():
    bare = BareEngine()
    bare.expect(3 * SIZE)
    for index in range(3):
        bare.take_data(index, 3, now_s=1.0)
    assert len(bare.acknowledgements()) == 1


def test_peers_are_acknowledged_apart():
    bare = BareEngine(peers=(1, 2))
    bare.expect(100 * SIZE, rank=1)
    bare.expect(100 * SIZE, rank=2)
    for index in range(12):
        bare.take_data(index, 100, rank=1 if index < 8 else 2, tos=3, now_s=1.0)
    assert bare.tick(1.0) == pytest.approx(1.001)
    assert [rank for rank, _, _ in bare.sent] == [1]
    bare.tick(1.002)
    assert [rank for rank, _, _ in bare.sent] == [1, 2]
    assert [header.count for header, _ in bare.acknowledgements()] == [8, 4]


def test_numbers_stay_after_the_release():
    bare = BareEngine()
    _, buffer, _ = bare.expect(4 * SIZE)
    bare.take_data(1, 4)
    bare.engine.release()
    assert bare.engine.counters() == {"data": 1}
    assert bare.flow.flying == 0
    assert buffer[SIZE] == 2
    bare.take_data(2, 4)
    assert buffer[2 * SIZE] == 0
