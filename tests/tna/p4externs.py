# SPDX-License-Identifier: Apache-2.0
"""The externs of TNA that ``p4/tna`` uses, after ``tna.p4`` and its manual."""

import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.tna.p4syntax import Tree
from tests.tna.p4tokens import P4Error
from tests.tna.p4values import INTRINSIC, Scope, Struct, Value, Width, joined, to_bytes

if TYPE_CHECKING:
    from tests.tna.p4machine import Machine


class TooShortError(Exception):
    """The packet ends within a header."""


class Extern:
    """Something that keeps state, or computes, under a name."""


class Register(Extern):
    def __init__(self, machine: "Machine", kind: Tree) -> None:
        self.kind, self._machine = kind[1], machine
        self.cells: dict[int, Any] = {}

    def cell(self, index: int) -> Any:
        if index not in self.cells:
            made = self._machine.source.structs.get(self.kind[0])
            self.cells[index] = (
                Struct(self._machine, self.kind[0]) if made else Value(0, self._machine.width(self.kind))
            )
        return self.cells[index]


class RegisterAction(Extern):
    def __init__(self, machine: "Machine", kind: Tree, register: Register, scope: Scope, body: Any) -> None:
        self._machine, self._register, self._scope = machine, register, scope
        self._parameters, self._body = body
        self._result = machine.width(kind[3]) if len(kind) > 3 else None

    def execute(self, index: Value) -> Value:
        """Run it on a cell; twice for one packet is what no chip does."""
        if self._machine.accessed.get(id(self._register)):
            raise P4Error("a packet accesses a register twice")
        self._machine.accessed[id(self._register)] = True
        scope = Scope(self._scope)
        name = self._parameters[0][2]
        cell = self._register.cell(index.number)
        scope.declare(name, cell, None if isinstance(cell, Struct) else cell.width)
        if len(self._parameters) > 1:
            scope.declare(self._parameters[1][2], Value(0, self._result), self._result)
        scope.declare("this", self, None)
        self._machine.run(self._body, scope)
        self._register.cells[index.number] = scope.find(name)
        return scope.find(self._parameters[1][2]) if len(self._parameters) > 1 else Value(0, (1, False))

    def predicate(self, first: Value, second: Value) -> Value:
        """Return one bit of four: which of the two conditions hold."""
        return Value(1 << (bool(first.number) | bool(second.number) << 1), (8, False))


class Hash(Extern):
    def __init__(self, machine: "Machine", kind: Tree, algorithm: str) -> None:
        self._width, self._algorithm = machine.width(kind[1]), algorithm
        self.always = 0
        """Bits that are set in whatever it gives."""

    def get(self, values: list[Value]) -> Value:
        whole = joined(values)
        number = whole.number if self._algorithm == "IDENTITY" else zlib.crc32(to_bytes(whole))
        return Value(number | self.always, (whole.bits, False)).to(self._width)


class Counter(Extern):
    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self.cells: dict[int, list[int]] = defaultdict(lambda: [0, 0])

    def count(self, index: Value) -> None:
        if self._machine.accessed.get(id(self)):
            raise P4Error("a packet is counted twice by one array")
        self._machine.accessed[id(self)] = True
        cell = self.cells[index.number]
        cell[0] += 1
        cell[1] += self._machine.frame_bytes


@dataclass
class Bucket:
    """A meter of an entry: committed and peak rate in bytes/s, with what is left of either burst."""

    rates: tuple[int, int, int, int]
    left: list[float] = field(default_factory=list)
    filled_s: float | None = None

    def color(self, size: int, now_s: float) -> int:
        """Return green (0), yellow (1) or red (3) for a frame, as RFC 2698 has it."""
        cir, cburst, pir, pburst = self.rates
        if self.filled_s is None:
            self.left = [float(cburst), float(pburst)]
        else:
            since_s = now_s - self.filled_s
            self.left = [min(cburst, self.left[0] + cir * since_s), min(pburst, self.left[1] + pir * since_s)]
        self.filled_s = now_s
        if self.left[1] < size:
            return 3
        self.left[1] -= size
        if self.left[0] < size:
            return 1
        self.left[0] -= size
        return 0


class DirectMeter(Extern):
    def __init__(self, machine: "Machine") -> None:
        self._machine = machine

    def execute(self) -> Value:
        bucket = self._machine.matched.bucket
        color = 0 if bucket is None else bucket.color(self._machine.frame_bytes, self._machine.now_ns / 1e9)
        return Value(color, (8, False))


class Checksum(Extern):
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was given: each packet has its own."""
        self._added: list[Value] = []
        self._rest = 0

    def add(self, values: Any) -> None:
        self._added += values.flat if isinstance(values, Struct) else values

    def subtract(self, values: list[Value]) -> None:
        self._rest = ones_sum([Value(self._rest, (16, False)), Value(0xFFFF ^ ones_sum(values), (16, False))])

    def verify(self) -> Value:
        return Value(int(ones_sum(self._added) != 0xFFFF), (1, False))

    def get(self) -> Value:
        return Value(self._rest, (16, False))

    def update(self, values: list[Value], zeros_as_ones: Value | None = None) -> Value:
        found = 0xFFFF ^ ones_sum(values)
        return Value(0xFFFF if zeros_as_ones and zeros_as_ones.number and not found else found, (16, False))


def ones_sum(values: list[Value]) -> int:
    """Return the sum of 16-bit words in ones' complement."""
    data = to_bytes(joined(values))
    total = sum(int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big") for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


class Mirror(Extern):
    def __init__(self, machine: "Machine", kind: int) -> None:
        self._machine, self.kind = machine, kind

    def emit(self, session: Value, values: list[Value], header: str) -> None:
        """Send a copy of the packet, cut to the header of this name."""
        made = Struct(self._machine, header)
        widened = [value.to(made.widths[name]) for name, value in zip(made.order, values, strict=True)]
        self._machine.mirrored.append((session.number, to_bytes(joined(widened))))


class Selector(Extern):
    """An action selector; its hash is that of the selector fields."""


class PacketIn(Extern):
    def __init__(self, data: bytes, intrinsic: dict[str, int], port: int) -> None:
        self.data, self.at, self._intrinsic, self._port = data, 0, intrinsic, port

    def extract(self, into: Struct) -> None:
        if into.name in INTRINSIC:
            for name in into.order:
                into.put(name, Value(self._intrinsic.get(name, 0)))
            return
        values = self.bits(sum(into.widths[name][0] for name in into.order))
        for name in into.order:
            width = into.widths[name]
            values, number = divmod_left(values, width[0])
            into.put(name, Value(number))
        into.valid = True

    def bits(self, count: int, *, keep: bool = False) -> tuple[int, int]:
        """Return the next bits, and how many they are; without ``keep`` they are taken, up to a whole byte."""
        size = -(-count // 8)
        taken = self.data[self.at : self.at + size]
        if len(taken) < size:
            raise TooShortError
        self.at += 0 if keep else size
        return int.from_bytes(taken, "big") >> 8 * size - count, count

    def lookahead(self, width: Width) -> Value:
        return Value(self.bits(width[0], keep=True)[0], width)

    def unpack(self, machine: "Machine", name: str) -> Struct:
        """Return the driver's data for the port: here ports have the fabric's numbers."""
        made = Struct(machine, name)
        made.put(made.order[0], Value(self._port))
        return made


class PacketOut(Extern):
    def __init__(self) -> None:
        self.data = b""

    def emit(self, what: Struct) -> None:
        for each in [what] if what.header else what.flat:
            if each.valid:
                self.data += to_bytes(joined(each.flat))


def divmod_left(values: tuple[int, int], width: int) -> tuple[tuple[int, int], int]:
    """Take the first bits of some; return what is left, and them."""
    number, count = values
    return (number & (1 << count - width) - 1, count - width), number >> count - width
