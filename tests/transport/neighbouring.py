# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host, in one process, that reach each other through memory."""

import os
import threading
from contextlib import ExitStack, closing, contextmanager

import numpy as np

from dlcp.transport import RELIABLE, Endpoint, Membership, ReceiveRequest, SendRequest, TransportOptions, bind_socket
from dlcp.transport.shared_memory import SharedMemoryRendezvous
from dlcp.wire import Header, PacketType
from tests.transport.network import plain_tags
from tests.waiting import until

LIMIT_S = 20
TOKEN = 77
LENT_ROOM = 16384
"""The size of a record of lent packets in a ring (dlcp/native/ring.c)."""


def bytes_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def at_once(*actions):
    """Do things in threads; return what came of them."""
    results = [None] * len(actions)

    def do(number, action):
        results[number] = action()

    threads = [threading.Thread(target=do, args=item) for item in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


def meet(count, *, export_bytes=0, **changes):
    """Let ranks meet, each with the name of each other's rendezvous."""
    with ExitStack() as steps:
        rendezvous = [steps.enter_context(SharedMemoryRendezvous(export_bytes)) for _ in range(count)]
        common = {"job": 0, "token": TOKEN, "timeout_s": LIMIT_S, **changes}

        def meet_others(rank):
            names = {peer: step.name for peer, step in enumerate(rendezvous) if peer != rank}
            return lambda: rendezvous[rank].connect(rank, names, **common)

        return at_once(*map(meet_others, range(count)))


@contextmanager
def neighbours(count, *, silence_s=10.0, apart=(), export_bytes=0):
    """Endpoints that reach each other through memory only, except for pairs ``apart``: other addresses lead nowhere."""
    shared = meet(count, export_bytes=export_bytes)
    sockets = [bind_socket("127.0.0.1", [0]) for _ in range(count)]
    with closing(bind_socket("127.0.0.1", [0])) as nowhere, ExitStack() as ends:
        made = []
        for rank in range(count):
            others = [peer for peer in range(count) if peer != rank]
            away = {peer for peer in others if {rank, peer} in apart}
            shared[rank].keep([peer for peer in others if peer not in away])
            addresses = {peer: (sockets[peer] if peer in away else nowhere).getsockname() for peer in others}
            options = TransportOptions(silence_s=silence_s)
            members = Membership(rank, addresses, token=TOKEN)
            end = Endpoint(members, sockets[rank], options=options, shared=shared[rank])
            ends.callback(end.close, "the test is over")
            made.append(end)
        for end in made:
            end.greet(LIMIT_S)
        yield made


def start(sender, receiver, key, payload, bound=RELIABLE):
    tags = plain_tags(-(-len(payload) // 1440))
    return (
        receiver.receive(ReceiveRequest(sender.connection.rank, key, len(payload), bound, "layer")),
        sender.send(SendRequest(receiver.connection.rank, key, memoryview(payload), tags, bound, "layer")),
    )


def ring_from(end, peer):
    return end.connection.engine._shared.inward[peer]


def greeted(end, peer):
    """Wait until an end has read all that a peer wrote for it: greetings, if nothing else was sent."""
    marks = ring_from(end, peer).marks
    until(lambda: np.array_equal(marks[:8], marks[64:72]), "greetings stay in the ring")


def data_packet(index=0, packets=1, **changes):
    fields = {"token": TOKEN, "job": 0, "sender": 1, "kind": PacketType.DATA} | changes
    kind, job, sender, token = (fields[name] for name in ("kind", "job", "sender", "token"))
    return Header(kind, 0, 4, 0, 7, job, 0, 0, 0, sender, index, packets, token).encode() + bytes(100)


def put_record(ring, size, segment, content=b"", place=0, message_bytes=0, written=0):
    """Write a record as a peer would, from the ring's beginning on; nothing else may be under way.

    With ``message_bytes`` it holds headers only, and what they belong to is at ``place`` in lent memory. ``written`` is
    what it says it has written behind the record's head, if that is not what it has.
    """
    marks = ring.marks[:8].view(np.uint64)
    at = int(marks[0]) % len(ring.data)
    ring.data[at : at + 8].view(np.uint32)[:] = size, segment
    ring.data[at + 8 : at + 24].view(np.int64)[:] = place, message_bytes
    ring.data[at + 64 : at + 64 + len(content)] = np.frombuffer(content, np.uint8)
    room = LENT_ROOM if message_bytes else -(-len(content) // 64) * 64
    marks[0] += np.uint64(64 + (written or room))
    os.eventfd_write(ring.bell, 1)
