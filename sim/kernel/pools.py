# SPDX-License-Identifier: Apache-2.0
"""Packets and records of packets: taken, given back, and linked."""

from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.state import Number, Rows
from dlcp.sim.kernel.world import packets_of, records_of


@call
def take_packet(w: Rows) -> Number:
    """Return an unused packet; there is one, for the loop is left before the pool runs out."""
    packets = packets_of(w)
    packet = w.free_packet
    w.free_packet = packets[packet].next
    w.free_packets -= 1
    return packet


@call
def give_packet(w: Rows, packet: int) -> None:
    """Give a packet back."""
    packets = packets_of(w)
    packets[packet].next = w.free_packet
    w.free_packet = packet
    w.free_packets += 1


@call
def give_record(w: Rows, record: int) -> None:
    """Give a record back; its serial number will match no answer."""
    records = records_of(w)
    records[record].serial = -1
    records[record].next = w.free_record
    w.free_record = record
    w.free_records += 1


@call
def unlink(w: Rows, s: Rows, queue: int, record: int) -> None:
    """Take a record out of the packets that are on the way."""
    records = records_of(w)
    r = records[record]
    if r.previous >= 0:
        records[r.previous].next = r.next
    else:
        s.first[queue] = r.next
    if r.next >= 0:
        records[r.next].previous = r.previous
    else:
        s.last[queue] = r.previous
