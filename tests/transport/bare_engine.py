# SPDX-License-Identifier: Apache-2.0
"""One engine without protocol, clock or socket, and its inputs and outputs."""

import numpy as np

from dlcp import wire
from dlcp.transport import LossBound, Membership, MessageKey, ReceiveRequest, SendRequest, TransportOptions
from dlcp.transport.engine import Arrived, ControlPacket, Datagram, Engine, Mismatch, Reported, Sent, Unexpected
from dlcp.values.tags import PacketTags
from dlcp.wire import ACK_ENTRY, Flag, Header, PacketType
from tests.transport.network import TOKEN

SIZE = 96
"""Bytes of payload a packet."""
KEY = MessageKey(1, 2)
NOTHING = np.zeros(0, np.uint8)


class Outgoing:
    """The state of a message that is being sent."""

    def __init__(self, bare, rank, key, packets):
        self.bare, self.rank, self.key, self.packets = bare, rank, key, packets

    def _sent(self):
        datagrams = [wire.decode(data) for rank, data, _ in self.bare.all_sent if rank == self.rank]
        return [h for h in datagrams if h.type is PacketType.DATA and (h.step, h.message) == self.key]

    sent = property(lambda self: len(self._sent()))
    resent = property(lambda self: sum(bool(header.flags & Flag.RETRANSMISSION) for header in self._sent()))
    flying = property(lambda self: self.bare.engine.sending(self.rank, self.key)[1])
    unsent = property(lambda self: self.bare.engine.sending(self.rank, self.key)[2])

    @property
    def delivered(self):
        done = [event for event in self.bare.confirmed if (event.peer, event.key) == (self.rank, self.key)]
        return int(done[-1].delivered.sum()) if done else self.bare.engine.sending(self.rank, self.key)[0]


class Incoming:
    """The state of a message that is being received."""

    def __init__(self, bare, rank, key):
        self.bare, self.rank, self.key = bare, rank, key

    @property
    def done(self):
        """The engine's event about it; None so far."""
        found = [event for event in self.bare.settled if (event.peer, event.key) == (self.rank, self.key)]
        return found[-1] if found else None

    @property
    def arrived(self):
        return int(self.done.delivered.sum()) if self.done else self.bare.engine.receiving(self.rank, self.key)[0]


class BareEngine:
    """Rank 0's engine; what it sends is kept in ``sent`` as (rank, datagram, type of service)."""

    def __init__(self, *, peers=(1,), size=SIZE, tagged=True, window=1000.0, **options):
        self.sent, self.all_sent, self.paths = [], [], []
        self.controls, self.unexpected, self.settled, self.confirmed, self.reports = [], [], [], [], []
        self.mismatches = []
        self.size = size
        self.engine = Engine(
            Membership(0, {peer: (f"10.0.0.{peer}", 53696) for peer in peers}, job=1, token=TOKEN),
            dict.fromkeys(peers, True),
            options=TransportOptions(payload_bytes=size, tagged=tagged, **options),
            sock=None,
            now_s=0.0,
        )
        for flow in self.engine.flows.values():
            flow.window, flow.largest_window = window, 1 << 20

    def drain(self):
        """Take the engine's events."""
        kinds = {Arrived: self.settled, Sent: self.confirmed, ControlPacket: self.controls, Unexpected: self.unexpected,
                 Mismatch: self.mismatches}  # fmt: skip
        for event in self.engine.take_events():
            if isinstance(event, Datagram):
                self.sent.append(tuple(event[:3]))
                self.all_sent.append(tuple(event[:3]))
                self.paths.append(event.path)
            elif isinstance(event, Reported):
                self.reports.append(event.report)
            elif type(event) in kinds:
                kinds[type(event)].append(event)

    @property
    def flow(self):
        return self.engine.flows[1]

    # Sending ----------------------------------------------------------------------------------------------------------

    def send(self, tags, *, ratio=0.0, key=KEY, short_by=0, tail_bytes=0, rank=1, seed=0, immediate=False):
        """Queue a message of as many packets as there are tags; return it and its bytes."""
        count = len(tags.queue)
        size = count * self.size - short_by
        whole = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        payload = whole[: size - tail_bytes].copy()
        bound = LossBound(ratio, immediate)
        request = SendRequest(rank, key, payload.data, tags, bound, "layer", whole[size - tail_bytes :].copy())
        self.kept = [*getattr(self, "kept", []), request]
        self.engine.send(request, bound, 0.0)
        self.drain()
        return Outgoing(self, rank, key, count), whole

    def pump(self, now_s=0.0, burst=64):
        """Let one burst leave; return the packets in it."""
        self.flow.burst = burst
        before = len(self.sent)
        self.engine.pump(now_s)
        self.drain()
        return [wire.decode(datagram).index for _, datagram, _ in self.sent[before:]]

    def pump_all(self, now_s=0.0, burst=64):
        indices = []
        while burst_of := self.pump(now_s, burst):
            indices += burst_of
        return indices

    def tick(self, now_s):
        due_s = self.engine.tick(now_s)
        self.drain()
        return due_s

    def report(self, now_s):
        """Return the engine's report at a time, if any."""
        self.reports.clear()
        self.tick(now_s)
        return self.reports[-1] if self.reports else None

    def acknowledge(self, now_s, *indices, key=KEY, marked=0, late=0, ago_us=0, rank=1, arrived_s=0.0):
        """Tell that packets have arrived, the newest at a time of the receiver's clock, and how many ``late`` ones."""
        blocks = {}
        for index in indices:
            blocks[index // 64] = blocks.get(index // 64, 0) | 1 << index % 64
        payload = b"".join(ACK_ENTRY.pack(*key, block, bits) for block, bits in blocks.items())
        arrived_us = int(arrived_s * 1e6) % 2**32
        self.take(PacketType.ACK, payload, step=ago_us, message=late, index=arrived_us, count=marked, rank=rank,
                  now_s=now_s)  # fmt: skip

    def ask(self, now_s):
        """Make the engine probe for missing packets; its packets are not kept in ``sent``."""
        before = len(self.sent)
        self.tick(now_s)
        kinds = [wire.decode(datagram).type for _, datagram, _ in self.sent[before:]]
        assert kinds
        assert set(kinds) == {PacketType.PROBE}
        del self.sent[before:]

    @property
    def questions(self):
        """The numbers of all questions that have been asked."""
        headers = [wire.decode(datagram) for _, datagram, _ in self.all_sent]
        return [header.budget for header in headers if header.type is PacketType.PROBE]

    def answer(self, message, arrived, now_s, first=0, question=None):
        """Let the receiver say which packets of a message have arrived, in answer to the last question or another."""
        question = (self.questions or [0])[-1] if question is None else question
        bitmap = np.packbits(np.asarray(arrived, np.bool_)).tobytes()
        self.take(PacketType.BITMAP, bitmap, step=message.key.step, message=message.key.message, index=first,
                  count=message.packets, budget=question, now_s=now_s)  # fmt: skip

    def lose(self, message, indices, now_s=1.0):
        """Let a bitmap report that all packets in flight but ``indices`` have arrived."""
        arrived = np.ones(message.packets, np.bool_)
        arrived[list(indices)] = False
        self.ask(now_s)
        self.answer(message, arrived, now_s)

    # Receiving --------------------------------------------------------------------------------------------------------

    def expect(self, size, *, key=KEY, rank=1, tail_bytes=0, ratio=0.0, immediate=False, fill=0, known=True):
        """Post a receive; return the message, its buffer and its tail."""
        packets = -(-size // self.size)
        buffer, tail = np.full(size - tail_bytes, fill, np.uint8), np.full(tail_bytes, fill, np.uint8)
        bound = LossBound(ratio, immediate)
        request = ReceiveRequest(rank, key, size if known else None, bound, "layer", buffer, tail)
        self.kept = [*getattr(self, "kept", []), request]
        self.refused_with = self.engine.receive(request, packets, buffer, bound, 0.0)
        self.drain()
        return Incoming(self, rank, key), buffer, tail

    def take(self, kind, payload=b"", *, step=KEY.step, message=KEY.message, index=0, count=1, flags=0, layer=0, rank=1,
             tos=0, budget=0, now_s=0.0):  # fmt: skip
        """Take in one packet of a peer."""
        header = Header(kind, flags, 4, 0, layer, 1, budget, step, message, rank, index, count, TOKEN)
        self.engine.take_in(memoryview(header.encode() + payload), tos, (f"10.0.0.{rank}", 53696), now_s)
        self.drain()

    def probe(self, packets, protected=0, *, more=False, key=KEY, now_s=0.0):
        """Let the sender probe; return the answers, (type, bitmap), without acknowledgements."""
        before = len(self.sent)
        self.take(PacketType.PROBE, b"\1" if more else b"", step=key.step, message=key.message, index=protected,
                  count=packets, now_s=now_s)  # fmt: skip
        answers = []
        for _, datagram, _ in self.sent[before:]:
            header = wire.decode(datagram)
            if header.type is not PacketType.ACK:
                bits = np.unpackbits(np.frombuffer(datagram[wire.HEADER_BYTES :], np.uint8))[:packets]
                answers.append((header.type, bits.astype(np.bool_).tolist()))
        return answers

    def take_data(self, index, count, payload=None, *, key=KEY, protected=False, **fields):
        flags = Flag.PROTECTED if protected else 0
        payload = bytes([index % 255 + 1]) * self.size if payload is None else payload
        self.take(PacketType.DATA, payload, step=key.step, message=key.message, index=index, count=count, flags=flags,
                  **fields)  # fmt: skip

    def acknowledgements(self):
        """Acknowledgements: for each packet, its header and entries (key, block, bits)."""
        found = []
        for _, datagram, _ in self.sent:
            header = wire.decode(datagram)
            if header.type is PacketType.ACK:
                entries = [(MessageKey(*e[:2]), *e[2:]) for e in ACK_ENTRY.iter_unpack(datagram[wire.HEADER_BYTES :])]
                found.append((header, entries))
        return found


def tags_of(queue, drop_class=None, protected=None, layer=0):
    count = len(queue)
    return PacketTags(
        np.array(queue, np.uint8),
        np.array([7] * count if drop_class is None else drop_class, np.uint8),
        np.full(count, layer, np.uint8),
        np.zeros(count, np.bool_) if protected is None else np.array(protected, np.bool_),
    )
