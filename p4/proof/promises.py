# SPDX-License-Identifier: Apache-2.0
"""What the switch program promises: of each promise, whether a packet breaks it, as a formula.

One promise is about a whole message: of it, no more packets are given up outside the excess queue than the budget in
its packets. Its proof is by induction over the packets that a switch handles, of this message and of all others, in any
order. It needs that packets are handled one at a time, as BMv2's ingress does, and that a message's packets come within
SLOT_IDLE_US of each other.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import z3
from formulas import MESSAGE_BITS, WORK_BITS, Machine, text_of

from dlcp.switch.executor import model
from dlcp.wire import HEADER_BYTES, UDP_PORT_BASE, UDP_PORT_COUNT, VERSION, PacketType, Queue

SLOTS: Final = 1 << 16
SLOT_IDLE_US: Final = 1_000_000
SLOT_OWNED: Final = 1 << 31


class Message(NamedTuple):
    """The message whose losses are counted."""

    job: Any
    step: Any
    message: Any
    sender: Any

    def has(self, packet: Machine) -> Any:
        """Return whether a packet is one of the message's."""
        same = [packet.field(packet.before, f"dlcp.{name}") == value for name, value in self._asdict().items()]
        return z3.And(is_dlcp(packet), *same)


def any_message() -> Message:
    """Return a message with arbitrary numbers."""
    return Message(*(z3.BitVec(f"message.{name}", bits) for name, bits in MESSAGE_BITS.items()))


def is_dlcp(packet: Machine) -> Any:
    """Return whether a packet is one of DLCP's, as hosts see it: by its bytes, whatever the parser makes of them."""

    def value(name: str) -> Any:
        return packet.field(packet.before, name)

    def whole(*headers: str) -> Any:
        return z3.And(*(z3.Not(packet.short[header]) for header in headers))

    tagged = value("ethernet.ether_type") == 0x8100
    kind = z3.If(tagged, value("vlan.ether_type"), value("ethernet.ether_type"))
    ipv4 = [whole("ipv4"), kind == 0x0800, value("ipv4.version") == 4, value("ipv4.ihl") == 5]
    ipv4 += [value("ipv4.frag_offset") == 0, value("ipv4.protocol") == 17]
    ipv6 = [whole("ipv6"), kind == 0x86DD, value("ipv6.version") == 6, value("ipv6.next_header") == 17]
    port = value("ports.dst_port")
    return z3.And(
        whole("ethernet", "ports", "udp", "dlcp"),
        z3.Implies(tagged, whole("vlan")),
        z3.Or(z3.And(*ipv4), z3.And(*ipv6)),
        z3.UGE(port, UDP_PORT_BASE),
        z3.ULT(port, UDP_PORT_BASE + UDP_PORT_COUNT),
        z3.UGE(value("udp.length_"), 8 + HEADER_BYTES),
        value("dlcp.version") == VERSION,
    )


def dropped_by_policy(packet: Machine) -> Any:
    """Return whether a packet is dropped that is whole and has a route."""
    return z3.And(packet.dropped, packet.routed)


def given_up(packet: Machine) -> Any:
    """Return whether a packet is dropped by policy outside the excess queue, or trimmed."""
    return z3.Or(z3.And(dropped_by_policy(packet), packet.queue != int(Queue.EXCESS)), packet.trimmed)


def breaks_protection(packet: Machine) -> Any:
    """Return whether a packet is given up that is not a gradient's, or not from a trusted port, or protected."""

    def value(name: str) -> Any:
        return packet.field(packet.before, f"dlcp.{name}")

    drop_class = z3.If(
        packet.chose("classify", "set_class"),
        packet.argument("classify", "set_class", "drop_class"),
        value("drop_class"),
    )
    may = [is_dlcp(packet), packet.chose("port_trust", "trust"), value("type") == int(PacketType.DATA), drop_class != 0]
    may += [value(name) == 0 for name in ("protected", "retransmission", "trimmed")]
    return z3.And(z3.Or(dropped_by_policy(packet), packet.trimmed), z3.Not(z3.And(*may)))


_REWRITTEN: Final = frozenset(
    {
        "ethernet.dst_addr",
        "ethernet.src_addr",
        "ipv4.ttl",
        "ipv4.ecn",
        "ipv4.hdr_checksum",
        "ipv6.hop_limit",
        "ipv6.ecn",
    }
)
"""Fields that a router changes in any packet."""
_CLEARED: Final = frozenset({"vlan.pcp", "ipv4.dscp", "ipv6.dscp", "dlcp.queue", "dlcp.drop_class", "udp.checksum"})
"""Fields that are cleared, or corrected for it, if tags come from a port that is not trusted."""


def _changed(packet: Machine, allowed: frozenset[str]) -> Any:
    """Return whether a field of a valid header changes on the way through the switch, other than those allowed."""
    changes = [packet.sent.size != packet.before.size]
    for header in packet.program.headers.values():
        if header.metadata:
            continue
        valid = packet.parsed.valid[header.name]
        changes.append(packet.sent.valid[header.name] != valid)
        changes += [
            z3.And(valid, packet.sent.fields[item] != packet.before.fields[item])
            for item in header.fields.values()
            if text_of(item).partition("[")[0] not in allowed
        ]
    return z3.Or(*changes)


def breaks_other_traffic(packet: Machine) -> Any:
    """Return whether a packet that is not DLCP's is treated otherwise than by a router, or than as ordinary traffic."""
    wrong = z3.Or(packet.queue != int(Queue.ORDINARY), _changed(packet, _REWRITTEN))
    forwarded = z3.Not(packet.dropped)
    return z3.And(z3.Not(is_dlcp(packet)), z3.Or(dropped_by_policy(packet), z3.And(forwarded, wrong)))


def breaks_trust(packet: Machine) -> Any:
    """Return whether tags from a port that is not trusted have an effect, here or at a later switch."""
    clear = [
        packet.field(packet.sent, "dlcp.queue") == int(Queue.ORDINARY),
        packet.field(packet.sent, "dlcp.drop_class") == 0,
    ]
    clear += [
        z3.Implies(packet.parsed.valid[header], packet.field(packet.sent, f"{header}.{name}") == 0)
        for header, name in (("ipv4", "dscp"), ("ipv6", "dscp"), ("vlan", "pcp"))
    ]
    wrong = z3.Or(packet.queue != int(Queue.ORDINARY), z3.Not(z3.And(*clear)), _changed(packet, _REWRITTEN | _CLEARED))
    forwarded, untrusted = z3.Not(packet.dropped), z3.Not(packet.chose("port_trust", "trust"))
    return z3.And(is_dlcp(packet), untrusted, z3.Or(dropped_by_policy(packet), z3.And(forwarded, wrong)))


def breaks_ecn(packet: Machine) -> Any:
    """Return whether an ECN field changes otherwise than to a mark, and in a packet that can carry one."""
    ways = []
    for header in ("ipv4", "ipv6"):
        before, after = (packet.field(state, f"{header}.ecn") for state in (packet.before, packet.sent))
        raised = z3.Or(after == before, z3.And(before != 0, after == 3))
        ways.append(z3.And(packet.parsed.valid[header], z3.Not(raised)))
    return z3.And(z3.Not(packet.dropped), z3.Or(*ways))


def breaks_trimming(packet: Machine) -> Any:
    """Return whether a trimmed packet keeps more than its headers, or has a wrong length, tag or queue."""
    bytes_ = z3.BitVecVal(14 + 8 + HEADER_BYTES, WORK_BITS)
    for header, more in (("vlan", 4), ("ipv4", 20), ("ipv6", 40)):
        bytes_ = bytes_ + z3.If(packet.parsed.valid[header], z3.BitVecVal(more, WORK_BITS), z3.BitVecVal(0, WORK_BITS))

    def value(name: str) -> Any:
        return packet.field(packet.sent, name)

    right = [
        z3.Or(packet.sent.size == bytes_, z3.And(packet.before.size < bytes_, packet.sent.size == packet.before.size))
    ]
    right += [packet.queue == int(Queue.CONTROL), value("dlcp.trimmed") == 1, value("dlcp.queue") == int(Queue.CONTROL)]
    right += [value("udp.length_") == 8 + HEADER_BYTES]
    right += [z3.Implies(packet.parsed.valid["ipv4"], value("ipv4.total_len") == 20 + 8 + HEADER_BYTES)]
    right += [z3.Implies(packet.parsed.valid["ipv6"], value("ipv6.payload_len") == 8 + HEADER_BYTES)]
    return z3.And(packet.trimmed, z3.Not(z3.And(*right)))


PROMISES: Final[dict[str, Callable[[Machine], Any]]] = {
    "protection": breaks_protection,
    "other traffic": breaks_other_traffic,
    "trust": breaks_trust,
    "ecn": breaks_ecn,
    "trimming": breaks_trimming,
}
"""Promises about single packets: each function returns whether a packet breaks its promise."""
BOUND: Final = "bound"
"""The promise about messages; see `bound_breaks`."""


def bound_breaks(program: model.ProgramDef) -> Any:
    """Return a formula that holds if the bound on a message's losses can be broken.

    The induction: after any number of packets, either none of the message's has been given up, or the message owns its
    slot, has used it since its first packet came, and as many drops are counted there as packets were given up. If
    that holds before a packet, it holds after it, and the losses are within the budget. z3 looks for a packet after
    which one of the two is false.
    """
    message, given, budget = any_message(), z3.BitVec("given", 17), z3.BitVec("budget", 16)
    first_us, before_us = z3.BitVec("first_us", 48), z3.BitVec("before_us", 48)
    packet = Machine(program, "packet")
    owner = _owner(message)

    def holds(registers: Mapping[str, Any], count: Any, now_us: Any) -> Any:
        slot = owner & (SLOTS - 1)
        held, used_us, spent = (registers[_register(program, name)][slot] for name in ("owner", "used_us", "spent"))
        since_use, since_first = z3.Extract(31, 0, now_us) - used_us, z3.Extract(31, 0, now_us - first_us)
        counted = z3.UGE(z3.ZeroExt(1, spent), count)
        return z3.Or(count == 0, z3.And(held == owner, counted, z3.ULE(since_use, since_first)))

    mine = message.has(packet)
    count = given + z3.If(z3.And(mine, given_up(packet)), z3.BitVecVal(1, 17), z3.BitVecVal(0, 17))
    limit = z3.ZeroExt(1, budget)
    window = [z3.ULE(first_us, before_us), z3.ULE(before_us, packet.time_us)]
    window += [z3.ULE(packet.time_us - first_us, SLOT_IDLE_US), z3.ULE(first_us, packet.time_us)]
    return z3.And(
        packet.sane,
        *window,
        holds(packet.before.registers, given, before_us),
        z3.ULE(given, limit),
        z3.Implies(mine, z3.ULE(packet.field(packet.before, "dlcp.budget"), budget)),
        z3.Not(z3.And(holds(packet.queued.registers, count, packet.time_us), z3.ULE(count, limit))),
    )


def _register(program: model.ProgramDef, name: str) -> str:
    return next(item for item in program.registers if item.endswith(f"slot_{name}"))


def _owner(message: Message) -> Any:
    """Return the owner that the program writes into the message's slot."""
    joined = z3.Concat(*message)
    return z3.Function(f"crc32.{joined.size()}", joined.sort(), z3.BitVecSort(32))(joined) | SLOT_OWNED
