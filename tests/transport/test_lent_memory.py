# SPDX-License-Identifier: Apache-2.0
"""Ranks of a host read a message in place if the sender has lent its memory."""

import time

import numpy as np
import pytest

from dlcp.collectives import Bucket, DirectAllReduce, RankContext, direct
from dlcp.transport import RELIABLE, MessageKey, ReceiveRequest, SendRequest, TransportError, shared_memory
from dlcp.transport.buffers import ExportedMemory
from dlcp.transport.shared_memory import RING_BYTES
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment
from dlcp.wire import PacketType
from tests.transport.neighbouring import (
    LENT_ROOM,
    LIMIT_S,
    TOKEN,
    bytes_of,
    data_packet,
    greeted,
    neighbours,
    put_record,
    ring_from,
)
from tests.transport.network import plain_tags
from tests.waiting import until

pytestmark = pytest.mark.skipif(not shared_memory.supported(), reason="needs memfd_create and eventfd")
LENT_BYTES = 8 << 20
BURST_BYTES = 40 * 1440
"""Of payload in a record, at least, where there is enough of it."""


def test_lent_memory_is_given_out_in_pieces_that_do_not_overlap():
    lent = ExportedMemory(np.zeros(1000, np.uint8))
    rng = np.random.default_rng(1)
    taken = []
    for number in range(500):
        if taken and rng.random() < 0.5:
            piece, owner = taken.pop(rng.integers(len(taken)))
            assert (piece == owner).all()
            lent.give(piece)
        else:
            piece = lent.take(size := int(rng.integers(1, 400)))
            if piece is None:
                continue
            assert piece.size == size
            assert (piece.ctypes.data - lent.memory.ctypes.data) % 64 == 0
            piece[:] = number % 251
            taken.append((piece, number % 251))
    for piece, _ in taken:
        lent.give(piece)
    assert lent.take(1001) is None
    assert lent.take(0) is None
    assert lent.take(1000).size == 1000
    assert lent.take(1) is None


def exchange(sender, receiver, key, payload, tail=b""):
    tail = np.frombuffer(tail, np.uint8)
    size = len(payload) + len(tail)
    arrival = receiver.receive(ReceiveRequest(sender.connection.rank, key, size, RELIABLE, "layer"))
    tags = plain_tags(-(-size // 1440))
    delivery = sender.send(
        SendRequest(receiver.connection.rank, key, memoryview(payload), tags, RELIABLE, "layer", tail)
    )
    np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, np.concatenate([payload, tail]))
    assert delivery.result(LIMIT_S).delivered.all()


def ring_bytes_for(sender, receiver, action):
    """Return how many bytes of the ring between two ranks an action takes."""
    written = ring_from(receiver, sender.connection.rank).marks[:8].view(np.uint64)
    before = int(written[0])
    action()
    return int(written[0]) - before


@pytest.mark.parametrize("size", [1, 1440, 1441, 100_003, 5 * RING_BYTES + 17])
def test_lent_bytes_arrive_and_are_not_copied_into_the_ring(size):
    with neighbours(2, export_bytes=LENT_BYTES) as (first, second):
        greeted(first, 1)
        for number, place in enumerate([0, 7, len(first.connection.exported.memory) - size]):
            payload = first.connection.exported.memory[place : place + size]
            payload[:] = bytes_of(size, number)
            taken = ring_bytes_for(
                first, second, lambda n=number, p=payload: exchange(first, second, MessageKey(0, n), p)
            )
            assert taken <= (size // BURST_BYTES + 2) * (LENT_ROOM + 64)
        assert not first.connection.refused + second.connection.refused


def test_other_bytes_are_copied_also_where_memory_is_lent():
    with neighbours(2, export_bytes=LENT_BYTES) as (first, second):
        size = 1_000_000
        beside = bytes_of(size)
        assert ring_bytes_for(first, second, lambda: exchange(first, second, MessageKey(0, 0), beside)) > size
        assert len(second.connection.exported.memory) >= LENT_BYTES
        assert ring_bytes_for(second, first, lambda: exchange(second, first, MessageKey(0, 1), beside)) > size


@pytest.mark.parametrize("tail", [1, 32, 1440, 5000])
@pytest.mark.parametrize("size", [1, 1439, 1440, 200_000])
def test_what_follows_the_lent_bytes_arrives_behind_them(size, tail):
    with neighbours(2, export_bytes=LENT_BYTES) as (first, second):
        payload = first.connection.exported.memory[:size]
        payload[:] = bytes_of(size, 1)
        exchange(first, second, MessageKey(0, 0), payload, bytes_of(tail, 2).tobytes())


def test_lent_bytes_go_to_others_through_sockets():
    with neighbours(3, apart=[{0, 2}], export_bytes=LENT_BYTES) as (first, second, third):
        payload = first.connection.exported.memory[:1_000_003]
        payload[:] = bytes_of(len(payload), 3)
        exchange(first, second, MessageKey(0, 0), payload)
        exchange(first, third, MessageKey(0, 1), payload)


def test_a_rank_without_neighbours_lends_nothing():
    with neighbours(2, apart=[{0, 1}], export_bytes=LENT_BYTES) as ends:
        assert not any(len(end.connection.exported.memory) for end in ends)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token": TOKEN + 1}, "token"),
        ({"job": 1}, "job"),
        ({"sender": 2}, "sender"),
        ({"kind": PacketType.PROBE}, "malformed"),
    ],
)
def test_a_header_of_lent_bytes_is_refused_for_what_it_would_be_in_the_network(changes, reason):
    with neighbours(2, export_bytes=LENT_BYTES) as (first, _):
        greeted(first, 1)
        put_record(ring_from(first, 1), 32, 32, data_packet(**changes)[:32], message_bytes=100)
        until(lambda: first.connection.refused[reason] == 1)


def test_lent_bytes_that_do_not_fit_their_message_are_refused():
    with neighbours(2, export_bytes=LENT_BYTES) as (first, _):
        greeted(first, 1)
        arrival = first.receive(ReceiveRequest(1, MessageKey(0, 0), 2880, RELIABLE, "layer"))
        first.flush(LIMIT_S)  # it waits
        put_record(ring_from(first, 1), 32, 32, data_packet(packets=5)[:32], message_bytes=7200)
        with pytest.raises(TransportError, match="layer"):
            arrival.result(LIMIT_S)
        assert first.connection.refused["malformed"] == 1


@pytest.mark.parametrize(
    ("place", "message_bytes", "index", "segment", "size"),
    [
        (LENT_BYTES, 1, 0, 32, 32),
        (LENT_BYTES - 99, 100, 0, 32, 32),
        (-100, 100, 0, 32, 32),
        ((1 << 63) - 1, 100, 0, 32, 32),
        (0, (1 << 63) - 1, 0, 32, 32),
        (0, -1, 0, 32, 32),
        (0, 1440, 1, 32, 32),
        (0, 100, 0xFFFFFFFF, 32, 32),
        (0, 100, 0, 33, 32),
        (0, 100, 0, 32, LENT_ROOM + 32),
    ],
)
def test_a_record_of_bytes_that_are_not_lent_is_refused_and_its_ring_read_no_more(
    place, message_bytes, index, segment, size
):
    with neighbours(2, silence_s=1.0, export_bytes=LENT_BYTES) as (first, second):
        assert len(second.connection.exported.memory) == LENT_BYTES
        greeted(first, 1)
        first.receive(ReceiveRequest(1, MessageKey(0, 0), 1440 * 5, RELIABLE, "layer"))
        header = data_packet(index, max(5, index))[:32]
        put_record(ring_from(first, 1), size, segment, header, place, message_bytes)
        until(lambda: first.connection.refused["malformed"] == 1)
        with pytest.raises(TransportError):
            exchange(second, first, MessageKey(0, 1), bytes_of(5000))
        assert first.connection.refused["malformed"] == 1


def test_a_rank_that_lent_nothing_is_not_read_from():
    with neighbours(2, silence_s=1.0) as (first, _):
        greeted(first, 1)
        put_record(ring_from(first, 1), 32, 32, data_packet()[:32], message_bytes=100)
        until(lambda: first.connection.refused["malformed"] == 1)


def reduce_and_spoil(ends, steps, *, value_type=ValueType.FLOAT32, lent=False, count=200_000, settle=lambda: None):
    """Average buckets, and overwrite each as soon as it is done, while each rank's thread pauses now and then.

    ``settle`` is called after each step.
    """
    rng = np.random.default_rng(5)
    reducers = [DirectAllReduce(RankContext(end.connection, range(len(ends)))) for end in ends]
    segments = [Segment(Layer("layer", 0), 0, count)]
    for step in range(steps):
        shares = [value_type.narrow(rng.integers(-8, 9, count).astype(np.float32)) for _ in ends]
        waiting = []
        for end, reducer, share in zip(ends, reducers, shares, strict=True):
            reducer.begin_step(step)
            mine = end.connection.exported.memory[: share.nbytes].view(share.dtype) if lent else np.empty_like(share)
            mine[:] = share
            for when_s in rng.random(3) * 0.02:
                end.call(lambda end=end, s=when_s: end.connection.call_later(s, lambda: time.sleep(0.01)))
            done = reducer.start(step, 0, Bucket(mine, value_type, segments, exported=lent, exact=True))
            kept = []

            def keep_and_spoil(future, kept=kept):
                kept.append(future.result().copy())
                future.result().view(np.uint8)[:] = 0x7F

            done.add_done_callback(keep_and_spoil)
            waiting.append((done, kept))
        total = sum(value_type.widen(share) for share in shares) / np.float32(len(ends))
        for done, kept in waiting:
            done.result(LIMIT_S)
            until(lambda kept=kept: kept)
            np.testing.assert_array_equal(kept[0], value_type.narrow(total))
        settle()


@pytest.mark.parametrize("value_type", [ValueType.FLOAT32, ValueType.FLOAT16], ids=lambda kind: kind.value)
@pytest.mark.parametrize("apart", [[], [{0, 2}]], ids=["all neighbours", "two of them not"])
def test_a_lent_bucket_that_is_done_may_be_overwritten_at_once(monkeypatch, value_type, apart):
    monkeypatch.setattr(direct, "PATIENCE_S", 0.0)
    with neighbours(3, apart=apart, export_bytes=LENT_BYTES) as ends:
        reduce_and_spoil(ends, 12, value_type=value_type, lent=True)


@pytest.mark.parametrize("apart", [[], [{0, 3}]], ids=["all neighbours", "two of them not"])
def test_neighbours_read_one_copy_of_a_result_which_is_used_again(apart):
    with neighbours(4, apart=apart, export_bytes=LENT_BYTES) as ends:

        def settle():
            for end in ends:
                until(lambda end=end: end.connection.all_confirmed and not end.connection.exported._taken)

        reduce_and_spoil(ends, 12, settle=settle)
        for end in ends:
            assert np.flatnonzero(end.connection.exported.memory)[-1] < 1.5 * 50_000 * 4, (
                "each step takes the memory of the one before"
            )


def test_where_too_little_is_lent_results_are_copied_for_each():
    with neighbours(3, export_bytes=4096) as ends:
        reduce_and_spoil(ends, 2)
        assert not any(end.connection.exported.memory.any() for end in ends)
