# SPDX-License-Identifier: Apache-2.0
"""Short sequences of packets that break a promise, from registers and entries that are part of the attack.

They use two messages with the same slot, whose owners are computed as switches do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Final, NamedTuple

import z3
from formulas import MESSAGE_BITS, Machine
from promises import BOUND, PROMISES, SLOT_IDLE_US, Message, given_up

from dlcp.switch import Action, Entries, MemberRef, MeterConfig, Profile, TableEntry
from dlcp.switch.executor import model
from dlcp.switch.executor.hashes import csum16, pack


class AttackPacket(NamedTuple):
    """A packet of an attack: its bytes, where and when it comes, and the packets left in its queue when it leaves."""

    data: bytes
    port: int
    time_us: int
    left_behind: int


@dataclass(frozen=True)
class Attack:
    """A way to break a promise: registers and entries that allow it, and packets that all come before the first leaves.

    Parameters
    ----------
    registers
        For each register, its value, and the cells that differ from it.
    message, budget
        The message that loses more than its budget; None for other promises.
    """

    promise: str
    registers: Mapping[str, tuple[int, Mapping[int, int]]]
    entries: Entries
    packets: tuple[AttackPacket, ...]
    message: tuple[int, ...] | None
    budget: int | None


PACKETS_MAX: Final = 3
"""Packets of an attack on the bound: two of the message, and one in between that disturbs its slot."""


def find_attack(program: model.ProgramDef, promise: str) -> Attack | None:
    """Return an attack on a promise, or None if there is none of PACKETS_MAX packets (which proves nothing)."""
    for count in range(1, PACKETS_MAX + 1 if promise == BOUND else 2):
        packets: list[Machine] = []
        for number in range(count):
            registers = packets[-1].queued.registers if packets else None
            packets.append(Machine(program, f"packet{number}", registers, COLLIDING))
        solver = z3.SolverFor("QF_AUFBV")
        for packet in packets:
            solver.add(packet.sane, packet.routed, packet.wrong_checksum == 0, *map(z3.Not, packet.short.values()))
            solver.add(z3.Or(*(_is_of(packet, numbers) for numbers in COLLIDING)))
            solver.add(*(z3.ULE(item.colour, 2) for item in packet.lookups.values() if item.colour is not None))
        solver.add(*_consistent(packets))
        for one, other in pairwise(packets):
            solver.add(z3.ULE(one.time_us, other.time_us), z3.ULE(other.time_us - packets[0].time_us, SLOT_IDLE_US))
        message, budget = Message(*map(z3.BitVecVal, COLLIDING[0], MESSAGE_BITS.values())), z3.BitVec("budget", 16)
        if promise == BOUND:
            one, none = z3.BitVecVal(1, 17), z3.BitVecVal(0, 17)
            lost = none
            for packet in packets:
                lost += z3.If(z3.And(message.has(packet), given_up(packet)), one, none)
            mine = [z3.Implies(message.has(item), item.field(item.before, "dlcp.budget") == budget) for item in packets]
            solver.add(*mine, z3.UGT(lost, z3.ZeroExt(1, budget)))
        else:
            solver.add(PROMISES[promise](packets[0]))
        if solver.check() == z3.sat:
            found = solver.model()
            numbers = COLLIDING[0] if promise == BOUND else None
            limit = _number(found, budget) if promise == BOUND else None
            sent = tuple(_packet(found, packet) for packet in packets)
            return Attack(promise, _registers(found, packets[0]), _entries(found, packets), sent, numbers, limit)
    return None


COLLIDING: Final = ((7, 0, 0, 0), (7, 26501, 0, 0))
"""Two messages with the same slot: job, step, message and sender. Attacks consist of their packets."""


def _is_of(packet: Machine, numbers: Sequence[int]) -> Any:
    names = zip(MESSAGE_BITS, numbers, strict=True)
    return z3.And(*(packet.field(packet.before, f"dlcp.{name}") == number for name, number in names))


def _consistent(packets: Sequence[Machine]) -> Iterator[Any]:
    """Yield what entries impose: packets with the same key find the same."""
    for one, other in combinations(packets, 2):
        for name, mine in one.lookups.items():
            theirs = other.lookups[name]
            same = [left == right for left, right in zip(one.keys(name), other.keys(name), strict=True)]
            found = [mine.hit == theirs.hit, mine.action == theirs.action]
            for left, right in zip(mine.arguments, theirs.arguments, strict=True):
                found += [first == second for first, second in zip(left, right, strict=True)]
            if mine.colour is not None:
                found.append(mine.colour == theirs.colour)
            yield z3.Implies(z3.And(*same), z3.And(*found))


def _number(found: Any, value: Any) -> int:
    return int(found.eval(value, model_completion=True).as_long())


def _holds(found: Any, value: Any) -> bool:
    answer = found.eval(value, model_completion=True)
    assert z3.is_true(answer) or z3.is_false(answer), answer
    return bool(z3.is_true(answer))


def _packet(found: Any, packet: Machine) -> AttackPacket:
    data = b""
    ended = False
    for name in packet.program.emitted:
        parsed = _holds(found, packet.parsed.valid[name])
        ended |= parsed and name == "udp"
        if parsed or (ended and name == "dlcp"):
            fields = packet.program.headers[name].fields.values()
            values = [_number(found, packet.before.fields[item]) for item in fields]
            part = bytearray(pack(values, [item.width for item in fields]))
            if name == "ipv4":
                part[10:12] = bytes(2)
                part[10:12] = csum16(bytes(part)).to_bytes(2, "big")
            data += part
    where = _number(found, packet.port), _number(found, packet.time_us), _number(found, packet.left_behind)
    return AttackPacket(data + bytes(8), *where)


def _registers(found: Any, packet: Machine) -> dict[str, tuple[int, dict[int, int]]]:
    contents: dict[str, tuple[int, dict[int, int]]] = {}
    for name, array in packet.before.registers.items():
        cells: dict[int, int] = {}
        value = found.eval(array, model_completion=True)
        while z3.is_store(value):
            value, index, cell = value.children()
            cells.setdefault(index.as_long(), cell.as_long())
        contents[name] = value.children()[0].as_long(), cells
    return contents


def _entries(found: Any, packets: Sequence[Machine]) -> Entries:
    """Return the entries that let the packets find what they find."""
    entries: dict[tuple[str, tuple[int, ...]], TableEntry] = {}
    members: dict[str, list[Action]] = {}
    for packet in packets:
        for name, lookup in packet.lookups.items():
            number = _number(found, lookup.action)
            table = packet.table(name)
            if not _holds(found, packet.met(name)) or not _holds(found, lookup.hit) or number >= len(table.actions):
                continue
            keys = tuple(_number(found, key) for key in packet.keys(name))
            definition = table.actions[number]
            values = [_number(found, value) for value in lookup.arguments[number]]
            names = [parameter.name for parameter in definition.parameters]
            target: Any = Action(definition.name, dict(zip(names, values, strict=True)))
            if table.profile is not None:
                known = members.setdefault(table.profile, [])
                if target not in known:
                    known.append(target)
                target = MemberRef(known.index(target) + 1)
            match = {key.name: _match(key, value) for key, value in zip(table.keys, keys, strict=True)}
            meter = None
            if lookup.colour is not None:
                meter = {0: None, 1: MeterConfig(0, 0, 0, 1 << 20)}.get(
                    _number(found, lookup.colour), MeterConfig(0, 0, 0, 0)
                )
            priority = int(table.match in ("ternary", "range"))
            entries[name, keys] = TableEntry(table.name, match, target, priority, meter)
    profiles = [Profile(name, tuple(enumerate(known, 1)), ()) for name, known in members.items()]
    return Entries(tuple(profiles), entries=tuple(entries.values()))


def _match(key: model.Key, value: int) -> int | tuple[int, int]:
    if key.match == "exact":
        return value
    return value, {"lpm": key.width, "ternary": (1 << key.width) - 1}.get(key.match, value)
