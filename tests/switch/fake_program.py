# SPDX-License-Identifier: Apache-2.0
"""A program small enough to understand at once, for tests of the switch around it."""

import os

from dlcp.switch import LoopbackHost, internet_checksum, udp_headers
from dlcp.switch.ports import PortCounters, ReceivedFrames


class FakeProgram:
    """Sends 10.0.0.n to port n, by DSCP's upper three bits as queue; marks ECN above ``mark_depth``."""

    def __init__(self, mark_depth=None, drop_in_egress=lambda packet: False):
        self.mark_depth = mark_depth
        self.drop_in_egress = drop_in_egress
        self.seen = []

    def ingress(self, packet, port, now_us):
        if len(packet) < 34 or packet[12:14] != b"\x08\x00" or packet[30:33] != bytes([10, 0, 0]):
            return 511, 0, None
        return packet[33], packet[15] >> 5, ("carry", port, now_us)

    def egress(self, packet, carry, port, enq_us, deq_delta_us, enq_depth, deq_depth, now_us):
        self.seen.append((carry, port, enq_us, deq_delta_us, enq_depth, deq_depth, now_us))
        if self.drop_in_egress(packet):
            return 0
        if self.mark_depth is not None and packet[15] & 3 and deq_depth > self.mark_depth:
            packet[15] |= 3
            packet[24:26] = bytes(2)
            packet[24:26] = internet_checksum(packet[14:34]).to_bytes(2, "big")
        return len(packet)


class FakePorts:
    """Ports that a test fills and empties by hand."""

    def __init__(self, *ports):
        self.counters = {port: PortCounters() for port in ports}
        self.sent = []
        self._waiting = ReceivedFrames()
        self._read, self._write = os.pipe()

    def describe(self, port):
        return f"test {port}"

    def filenos(self):
        return [self._read]

    def come_in(self, port, packets):
        self._waiting.ports += [port] * len(packets)
        self._waiting.packets += packets
        os.write(self._write, b"x" * len(packets))

    def receive(self, fileno, limit):
        burst, waiting = ReceivedFrames(), self._waiting
        burst.ports, waiting.ports = waiting.ports[:limit], waiting.ports[limit:]
        burst.packets, waiting.packets = waiting.packets[:limit], waiting.packets[limit:]
        os.read(fileno, len(burst.packets))
        return burst

    def send(self, port, packets):
        self.sent += [(port, bytes(packet)) for packet in packets]

    def refresh(self):
        pass

    def close(self):
        os.close(self._read)
        os.close(self._write)


def frame(target, queue=1, ecn=0, size=958, source=1):
    """Return a UDP frame of 42 + ``size`` bytes from host ``source`` to host ``target`` (1 is the first)."""
    one, other = LoopbackHost.numbered(source - 1), LoopbackHost.numbered(target - 1)
    headers = udp_headers(one.mac, other.mac, one.address, other.address, 53696, 53696, queue << 5 | ecn, size)
    return bytearray(headers) + bytes(size)
