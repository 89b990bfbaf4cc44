# SPDX-License-Identifier: Apache-2.0
"""One engine without protocol, clock or socket, and what it is given and gives."""

import struct

import numpy as np

from dlcp import wire
from dlcp.tags import PacketTags
from dlcp.transport import LossBound, MessageKey, TransportOptions
from dlcp.transport.native import NativeEngine
from dlcp.transport.plain import PlainEngine
from dlcp.transport.sending import packets_of
from dlcp.wire import Flag, Header, PacketType
from tests.transport.network import TOKEN, Network

SIZE = 96
"""Bytes of payload a packet."""
KEY = MessageKey(1, 2)
NOTHING = np.zeros(0, np.uint8)
ENTRY = struct.Struct(">IHIQ")
EVER = float("inf")


class BareEngine:
    """Rank 0's engine; what it sends is kept in ``sent`` as (rank, datagram, type of service)."""

    def __init__(self, *, peers=(1,), size=SIZE, tagged=True, window=1000.0, compiled=None):
        self.sent, self.controls, self.unknown, self.settled, self.taken = [], [], [], [], []
        self.takes = lambda datagram: True
        self.on_unknown = lambda rank, header, size, now_s: None
        self.on_settled = lambda message: None
        self.size = size
        make = NativeEngine if (Network.compiled if compiled is None else compiled) else PlainEngine
        self.engine = make(
            0,
            {peer: (f"10.0.0.{peer}", 53696) for peer in peers},
            job=1,
            token=TOKEN,
            payload_bytes=size,
            tagged=tagged,
            on_control=lambda rank, header, payload, now_s: self.controls.append((rank, header, bytes(payload))),
            on_unknown=self._hear,
            on_settled=self._settle,
            on_taken=lambda rank, key, now_s: self.taken.append((rank, key)),
            sock=None,
            emit=self._emit,
            now_s=0.0,
        )
        self._engine = self.engine
        self.ranks = [self]  # for the fixture to release
        if Network.made is not None:
            Network.made.append(self)
        for flow in self.engine.flows.values():
            flow.window, flow.largest_window = window, 1 << 20

    def _emit(self, rank, datagram, tos):
        if not self.takes(datagram):
            return False
        self.sent.append((rank, datagram, tos))
        return True

    def _hear(self, rank, header, size, now_s):
        self.unknown.append((rank, header, size))
        return self.on_unknown(rank, header, size, now_s)

    def _settle(self, message, now_s):
        self.settled.append(message)
        self.on_settled(message)

    @property
    def flow(self):
        return self.engine.flows[1]

    # Sending ----------------------------------------------------------------------------------------------------------

    def send(self, tags, *, ratio=0.0, key=KEY, short_by=0, tail_bytes=0, rank=1, ecn_capable=True, seed=0):
        """Queue a message of as many packets as there are tags; return it and its bytes."""
        count = len(tags.queue)
        size = count * self.size - short_by
        whole = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        packets = packets_of(
            Header(PacketType.DATA, 0, 0, 0, 0, 1, 0, *key, 0, 0, count, TOKEN),
            whole[: size - tail_bytes].copy(),
            whole[size - tail_bytes :].copy(),
            tags,
            LossBound(ratio),
            TransportOptions(payload_bytes=self.size),
            ecn_capable=ecn_capable,
        )
        return self.engine.send(rank, key, packets, 0.0), whole

    def pump(self, now_s=0.0, burst=64):
        """Let one burst leave; return the packets in it."""
        self.flow.burst = burst
        before = len(self.sent)
        self.engine.pump(now_s)
        return [wire.decode(datagram).index for _, datagram, _ in self.sent[before:]]

    def pump_all(self, now_s=0.0, burst=64):
        indices = []
        while burst_of := self.pump(now_s, burst):
            indices += burst_of
        return indices

    def acknowledge(self, now_s, *indices, key=KEY, marked=0, ago_us=0, rank=1):
        """Tell that packets have arrived."""
        blocks = {}
        for index in indices:
            blocks[index // 64] = blocks.get(index // 64, 0) | 1 << index % 64
        payload = b"".join(ENTRY.pack(*key, block, bits) for block, bits in blocks.items())
        self.take(PacketType.ACK, payload, step=ago_us, count=marked, rank=rank, now_s=now_s)

    def lose(self, message, indices, now_s=0.0):
        """Let a bitmap tell that of what is flying everything but ``indices`` has arrived."""
        arrived = np.ones(message.packets, np.bool_)
        arrived[list(indices)] = False
        return self.engine.take_bitmap(message, 0, arrived, EVER, now_s)

    # Receiving --------------------------------------------------------------------------------------------------------

    def expect(self, size, *, key=KEY, rank=1, tail_bytes=0, required=None, immediate=False, fill=0):
        """Wait for a message; return it, its buffer and its tail."""
        packets = -(-size // self.size)
        buffer, tail = np.full(size - tail_bytes, fill, np.uint8), np.full(tail_bytes, fill, np.uint8)
        message = self.engine.expect(rank, key, packets, buffer, tail)
        self.engine.wait(message, required or packets, immediate, size - (packets - 1) * self.size, 0.0)
        return message, buffer, tail

    def take(self, kind, payload=b"", *, step=KEY.step, message=KEY.message, index=0, count=1, flags=0, layer=0, rank=1,
             tos=0, now_s=0.0):  # fmt: skip
        """Take in one packet of a peer."""
        header = Header(kind, flags, 4, 0, layer, 1, 0, step, message, rank, index, count, TOKEN)
        self.engine.take_in(memoryview(header.encode() + payload), tos, (f"10.0.0.{rank}", 53696), now_s)

    def take_data(self, index, count, payload=None, *, key=KEY, protected=False, **fields):
        flags = Flag.PROTECTED if protected else 0
        payload = bytes([index % 255 + 1]) * self.size if payload is None else payload
        self.take(PacketType.DATA, payload, step=key.step, message=key.message, index=index, count=count, flags=flags,
                  **fields)  # fmt: skip

    def acknowledgements(self):
        """What has been acknowledged: for each packet, its header and entries (key, block, bits)."""
        found = []
        for _, datagram, _ in self.sent:
            header = wire.decode(datagram)
            if header.type is PacketType.ACK:
                entries = [(MessageKey(*e[:2]), *e[2:]) for e in ENTRY.iter_unpack(datagram[wire.HEADER_BYTES :])]
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
