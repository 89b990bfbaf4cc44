# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host exchange packets through memory: who finds whom, and what goes through, in which order, or not."""

import fcntl
import gc
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from dlcp.transport import (
    RELIABLE,
    LossBound,
    Membership,
    MessageKey,
    PeerSilentError,
    ReceiveRequest,
    SendRequest,
    TransportError,
    TransportOptions,
    bind_socket,
    shared_memory,
)
from dlcp.transport.engine import Engine
from dlcp.transport.shared_memory import RING_BYTES, Ring, SharedMemory, SharedMemoryRendezvous
from tests.transport.neighbouring import (
    LIMIT_S,
    TOKEN,
    bytes_of,
    data_packet,
    greeted,
    meet,
    neighbours,
    put_record,
    ring_from,
    start,
)
from tests.transport.network import plain_tags
from tests.waiting import until

pytestmark = pytest.mark.skipif(not shared_memory.supported(), reason="needs memfd_create and eventfd")
PAGE = 4096
HANDSHAKE = struct.Struct("=QqqqQQ")


def descriptors():
    gc.collect()  # what other tests have left must not be closed between two counts
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [2, 3, 12])
def test_all_who_are_here_find_each_other_and_leave_nothing_behind(count):
    before = descriptors()
    met = meet(count)
    for rank, shared in enumerate(met):
        assert shared.ranks == set(range(count)) - {rank}
    for shared in met:
        shared.close()
    assert descriptors() == before


def test_who_is_not_here_is_not_waited_for():
    with SharedMemoryRendezvous() as rendezvous:
        began_s = time.monotonic()
        shared = rendezvous.connect(0, {1: "dlcp-of-another-host"}, job=0, token=TOKEN, timeout_s=LIMIT_S)
    assert not shared.ranks
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_who_is_here_but_says_nothing_is_waited_for_until_the_deadline():
    before = descriptors()
    with SharedMemoryRendezvous() as rendezvous, SharedMemoryRendezvous() as silent:
        began_s = time.monotonic()
        shared = rendezvous.connect(0, {1: silent.name}, job=0, token=TOKEN, timeout_s=0.3)
        assert 0.3 <= time.monotonic() - began_s < LIMIT_S / 2
    assert not shared.ranks
    shared.close()
    assert descriptors() == before


def test_rings_that_only_one_side_wants_are_given_up():
    before = descriptors()
    first, second, third = meet(3)
    first.keep([1])
    second.keep([0])
    third.keep([])
    assert (first.ranks, second.ranks, third.ranks) == ({1}, {0}, frozenset())
    for shared in (first, second, third):
        shared.close()
    assert descriptors() == before


def handshake(rendezvous, said, *given):
    """Connect as a peer would, say something, and leave."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", given))
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as stranger:
        stranger.connect(f"\0{rendezvous.name}")
        stranger.sendmsg([said], [rights] if given else [])


def inbox(size=2 * PAGE + RING_BYTES, *, sealed=True):
    memory = os.memfd_create("inbox", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    if sealed:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


BAD_HANDSHAKES = {
    "another session": ({"token": TOKEN + 1}, {}),
    "another job": ({"job": 1}, {}),
    "an unknown rank": ({"rank": 5}, {}),
    "a place outside": ({"place": 1}, {}),
    "a place below": ({"place": -1}, {}),
    "a ring of no size": ({"size": 0}, {}),
    "a ring of an odd size": ({"size": 5000}, {}),
    "a ring larger than all": ({"size": 1 << 40}, {}),
    "memory that is too small": ({}, {"size": PAGE}),
    "more exported than there is": ({"exported": PAGE}, {}),
    "more exported than can be": ({"exported": -PAGE % (1 << 64)}, {}),
    "exported memory of an odd size": ({"exported": 64}, {"size": 3 * PAGE + RING_BYTES}),
    "memory that may shrink": ({}, {"sealed": False}),
}


@pytest.mark.parametrize("wrong", BAD_HANDSHAKES)
def test_a_handshake_that_is_wrong_is_refused(wrong):
    said, made = BAD_HANDSHAKES[wrong]
    said_all = {"token": TOKEN, "job": 0, "rank": 1, "place": 0, "size": RING_BYTES, "exported": 0} | said
    before = descriptors()
    memory, bell = inbox(**made), os.eventfd(0)
    with SharedMemoryRendezvous() as rendezvous, SharedMemoryRendezvous() as other:
        handshake(rendezvous, HANDSHAKE.pack(*said_all.values()), memory, bell)
        handshake(rendezvous, b"short", memory, bell)
        handshake(rendezvous, HANDSHAKE.pack(TOKEN, 0, 1, 0, RING_BYTES, 0) + b"long", memory, bell)
        handshake(rendezvous, HANDSHAKE.pack(TOKEN, 0, 1, 0, RING_BYTES, 0))
        handshake(rendezvous, HANDSHAKE.pack(TOKEN, 0, 1, 0, RING_BYTES, 0), memory)
        handshake(rendezvous, HANDSHAKE.pack(TOKEN, 0, 1, 0, RING_BYTES, 0), bell, bell)
        shared = rendezvous.connect(0, {1: other.name}, job=0, token=TOKEN, timeout_s=0.1)
        assert not shared.outward
        handshake(
            rendezvous, HANDSHAKE.pack(TOKEN, 0, 1, 0, RING_BYTES, 0), inbox(), bell
        )  # else the test could not fail
        shared.close()
        right = rendezvous.connect(0, {1: other.name}, job=0, token=TOKEN, timeout_s=LIMIT_S)
        assert right.ranks == {1}
        right.close()
    os.close(memory)
    os.close(bell)
    assert descriptors() == before + 1  # the memory of the last handshake


STRANGER = """
import os, socket, sys
os.setuid(65534)
if sys.argv[1] == "connect":
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.connect("\\0" + sys.argv[2])
        socket.send_fds(visitor, [bytes.fromhex(sys.argv[3])], [int(sys.argv[4]), int(sys.argv[5])])
else:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
        waiting.bind("\\0" + sys.argv[2])
        waiting.listen()
        waiting.settimeout(20)
        print("ready", flush=True)
        visitor, _ = waiting.accept()
        visitor.settimeout(20)
        print(len(visitor.recvmsg(1000, 1000)[0]), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_s_process_gets_into_no_rank_s_memory():
    memory, bell = inbox(), os.eventfd(0)
    said = HANDSHAKE.pack(TOKEN, 0, 1, 0, RING_BYTES, 0)
    with SharedMemoryRendezvous() as rendezvous, SharedMemoryRendezvous() as other:
        command = [sys.executable, "-c", STRANGER, "connect", rendezvous.name, said.hex(), str(memory), str(bell)]
        subprocess.run(command, pass_fds=[memory, bell], check=True, timeout=LIMIT_S)
        shared = rendezvous.connect(0, {1: other.name}, job=0, token=TOKEN, timeout_s=0.3)
        assert not shared.outward, "what it hands over is not taken"
        shared.close()
    os.close(memory)
    os.close(bell)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_no_memory_is_handed_to_another_user_s_process():
    name = f"dlcp-stranger-{os.getpid()}"
    command = [sys.executable, "-c", STRANGER, "wait", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger, SharedMemoryRendezvous() as mine:
        assert stranger.stdout.readline() == "ready\n"
        shared = mine.connect(0, {1: name}, job=0, token=TOKEN, timeout_s=0.3)
        assert not shared.inward
        assert stranger.stdout.readline() == "0\n", "it was told nothing"


@pytest.mark.parametrize("size", [1, 1440, 1441, 100_003, 3 * RING_BYTES + 17])
def test_messages_go_through_memory_both_ways(size):
    with neighbours(2) as (first, second):
        there, back = bytes_of(size, 1), bytes_of(size, 2)
        waiting = [
            (there, start(first, second, MessageKey(0, 0), there)),
            (back, start(second, first, MessageKey(0, 1), back)),
        ]
        for payload, (arrival, delivery) in waiting:
            np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)
            assert delivery.result(LIMIT_S).delivered.all()
            assert delivery.result(LIMIT_S).resent == 0
        assert not first.connection.refused + second.connection.refused


def test_many_messages_between_many_ranks_arrive_in_any_order():
    with neighbours(4) as ends:
        waiting = []
        for number in range(40):
            for sender in ends:
                for receiver in ends:
                    if sender is not receiver:
                        payload = bytes_of(
                            1 + (number * 7919) % 60_000, [number, sender.connection.rank, receiver.connection.rank]
                        )
                        waiting.append((payload, *start(sender, receiver, MessageKey(0, number), payload)))
        for payload, arrival, delivery in waiting:
            np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)
            assert delivery.result(LIMIT_S).delivered.all()


def test_a_sum_is_formed_from_what_comes_through_memory():
    with neighbours(3) as ends:
        values = [np.random.default_rng(rank).standard_normal(700_001).astype(np.float32) for rank in range(3)]
        total = values[0].copy()
        key = MessageKey(0, 0)
        summation = ends[0].connection.reduction(total, 2)
        arrivals = [
            ends[0].receive(
                ReceiveRequest(peer, key, total.nbytes, RELIABLE, "layer", reduction=summation, position=peer - 1)
            )
            for peer in (1, 2)
        ]
        for peer in (1, 2):
            tags = plain_tags(-(-total.nbytes // 1440))
            ends[peer].send(SendRequest(0, key, memoryview(values[peer].view(np.uint8)), tags, RELIABLE, "layer"))
        for arrival in arrivals:
            arrival.result(LIMIT_S)
        np.testing.assert_array_equal(total, ((values[0] + values[1]) + values[2]) / np.float32(3))


def test_a_reader_that_pauses_stops_its_writer_and_nothing_is_lost():
    with neighbours(2) as (first, second):
        goes_on = threading.Event()
        second.call(partial(goes_on.wait, LIMIT_S))
        payload = bytes_of(4 * RING_BYTES)
        arrival, delivery = start(first, second, MessageKey(0, 0), payload)
        time.sleep(0.3)  # nothing comes: that is what is tested
        assert not delivery.done()
        goes_on.set()
        np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)
        assert delivery.result(LIMIT_S).resent == 0


def test_what_may_be_lost_in_the_network_is_not_lost_in_memory():
    with neighbours(2) as (first, second):
        for number in range(20):
            payload = bytes_of(200_000, number)
            bound = LossBound(0.5, immediate=True)
            arrival, delivery = start(first, second, MessageKey(0, number), payload, bound)
            np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)
            assert delivery.result(LIMIT_S).delivered.all()


def test_others_are_reached_through_sockets_beside():
    with neighbours(3, apart=[{0, 2}]) as ends:
        assert [end.connection.local_peers for end in ends] == [{1}, {0, 2}, {1}]
        for number, (sender, receiver) in enumerate([(0, 1), (0, 2), (2, 0), (2, 1), (1, 0), (1, 2)]):
            payload = bytes_of(2_000_001, number)
            arrival, _ = start(ends[sender], ends[receiver], MessageKey(0, number), payload)
            np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)


def test_a_neighbour_that_falls_silent_is_named_though_its_memory_is_there():
    with neighbours(2, silence_s=1.0) as (first, second):
        over = threading.Event()
        second.call(partial(over.wait, LIMIT_S))
        arrival = first.receive(ReceiveRequest(1, MessageKey(3, 0), 5000, RELIABLE, "conv1"))
        with pytest.raises(PeerSilentError, match=r"step 3: rank 1 has been silent .* rank 0 waited for conv1"):
            arrival.result(LIMIT_S)
        over.set()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (data_packet(token=TOKEN + 1), "token"),
        (data_packet(job=1), "job"),
        (data_packet(sender=2), "sender"),
        (data_packet()[:20], "malformed"),
        (b"\xff" * 200, "malformed"),
    ],
)
def test_a_datagram_in_memory_is_refused_for_what_it_would_be_in_the_network(content, reason):
    with neighbours(2) as (first, _):
        greeted(first, 1)
        put_record(ring_from(first, 1), len(content), len(content), content)
        until(lambda: first.connection.refused[reason] == 1)


@pytest.mark.parametrize(
    ("size", "segment", "written"),
    [(RING_BYTES, 1472, 0), (0xFFFFFFFF, 1472, 0), (3000, 0, 0), (5000, 1472, 0), (70_000, 70_000, 70_016),
     (0, 0, 2 * RING_BYTES - 64)],
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused_and_its_ring_read_no_more(size, segment, written):
    with neighbours(2, silence_s=1.0) as (first, second):
        greeted(first, 1)
        put_record(ring_from(first, 1), size, segment, written=written)
        until(lambda: first.connection.refused["malformed"] == 1)
        arrival, _ = start(second, first, MessageKey(0, 0), bytes_of(5000))
        with pytest.raises(TransportError):
            arrival.result(LIMIT_S)
        assert first.connection.refused["malformed"] == 1


@pytest.fixture
def sharing():
    """Rank 0's engine, and the ring to rank 1, of a page, in memory that goes on behind it."""
    memory = np.frombuffer(mmap.mmap(-1, 64 * PAGE), np.uint8)
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    inward, outward = (Ring.within(memory, index, PAGE, bell) for index in (0, 1))
    with closing(bind_socket("127.0.0.1", [0])) as sock:
        common = {"options": TransportOptions(), "sock": sock, "now_s": time.monotonic()}
        shared = SharedMemory({1: inward}, {1: outward})
        engine = Engine(Membership(0, {1: ("127.0.0.1", 9)}, token=TOKEN), {1: True}, shared=shared, **common)
        engine.flows[1].window, engine.flows[1].largest_window = 1000, 1000
        request = SendRequest(1, MessageKey(0, 0), memoryview(bytes(64_000)), plain_tags(45), RELIABLE, "layer")
        engine.send(request, RELIABLE, time.monotonic())
        yield engine, outward, memory
        engine.release()


def test_a_reader_that_takes_what_was_never_written_has_nothing_written_behind_its_ring(sharing):
    engine, ring, memory = sharing
    ring.marks[64:72].view(np.uint64)[0] = 1 << 40
    assert engine.pump(time.monotonic()) == 0
    assert not memory[5 * PAGE :].any()


def test_who_is_told_of_room_and_has_nothing_to_send_any_more_sleeps(sharing):
    engine, ring, _ = sharing
    starving = ring.marks[128:132].view(np.uint32)
    assert engine.pump(time.monotonic()) == 0
    assert starving[0] == 1
    engine.stop()
    starving[0] = 0
    began_s = time.thread_time()
    engine.turn(time.monotonic() + 0.1)
    assert time.thread_time() - began_s < 0.02, "processor time of this thread, and no other's: it does not spin"
