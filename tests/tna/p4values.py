# SPDX-License-Identifier: Apache-2.0
"""Values of the P4 in ``p4/tna``: numbers of some width, headers and structs, and names in scope.

Numbers are Python's; an operation gives as many bits as its operands have. Unwritten values read as zero.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.tna.p4syntax import Tree
from tests.tna.p4tokens import P4Error

if TYPE_CHECKING:
    from tests.tna.p4machine import Machine

Width = tuple[int, bool]
"""Bits, and whether signed."""
INTRINSIC = {
    "ingress_intrinsic_metadata_t": {"ingress_port": 9, "ingress_mac_tstamp": 48},
    "ingress_intrinsic_metadata_from_parser_t": {"parser_err": 16},
    "ingress_intrinsic_metadata_for_deparser_t": {"drop_ctl": 3, "mirror_type": 3},
    "ingress_intrinsic_metadata_for_tm_t": {"ucast_egress_port": 9, "qid": 5, "packet_color": 2},
    "egress_intrinsic_metadata_t": {"deq_qdepth": 19},
    "egress_intrinsic_metadata_for_deparser_t": {"drop_ctl": 3, "mirror_type": 3},
}
"""The fields of tna.p4 that the program reads or writes."""
CONSTANTS = {"PARSER_ERROR_OK": (0, 16), "PARSER_ERROR_PARTIAL_HDR": (2, 16)}
"""Of tna.p4: number and bits."""
WIDTHS = {"bool": 1, "PortId_t": 9, "QueueId_t": 5, "MirrorId_t": 10, "MirrorType_t": 3}


class Value(NamedTuple):
    number: int
    width: Width | None = None
    """None: a number without a width of its own."""

    @property
    def bits(self) -> int:
        """How many."""
        if self.width is None:
            raise P4Error(f"{self.number} has no width")
        return self.width[0]

    def to(self, width: Width | None) -> "Value":
        """Return it with another width: bits beyond it are lost."""
        if width is None:
            return self
        bits, signed = width
        number = int(self.number) & (1 << bits) - 1
        return Value(number - (1 << bits) if signed and number >> bits - 1 else number, width)


class Struct:
    """A header or struct: fields with widths, other structs among them."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self.name, self.valid, self.header = name, False, False
        self.fields: dict[str, Any] = {}
        self.widths: dict[str, Width] = {}
        self.order: list[str] = []
        if name in INTRINSIC:
            members: list[tuple[str, Tree]] = [
                (each, ("bit", ("number", bits, None))) for each, bits in INTRINSIC[name].items()
            ]
        elif name in machine.source.structs:
            self.header, given = machine.source.structs[name]
            members = [(each, kind) for each, kind, _ in given]
        else:  # of tna.p4, and never looked at
            members = []
        for each, kind in members:
            self.order.append(each)
            if kind[0] in machine.source.structs:
                self.fields[each] = Struct(machine, kind[0])
            else:
                self.widths[each] = machine.width(kind)
                self.fields[each] = Value(0, self.widths[each])

    def put(self, name: str, value: Value) -> None:
        """Write a field."""
        self.fields[name] = value.to(self.widths[name])

    @property
    def flat(self) -> list[Value]:
        """All its fields."""
        return [self.fields[name] for name in self.order]


def joined(values: list[Value]) -> Value:
    """Return the bits of some values, one after the other."""
    number = bits = 0
    for value in values:
        number = number << value.bits | value.number & (1 << value.bits) - 1
        bits += value.bits
    return Value(number, (bits, False))


def to_bytes(value: Value) -> bytes:
    """Return the bits of a value as bytes, zeros at the end."""
    size = -(-value.bits // 8)
    return (value.number << 8 * size - value.bits).to_bytes(size, "big")


class Scope:
    """Names in force, and those around them."""

    def __init__(self, outer: "Scope | None" = None) -> None:
        self._outer = outer
        self._values: dict[str, Any] = {}
        self._widths: dict[str, Width | None] = {}

    def declare(self, name: str, value: Any, width: Width | None) -> None:
        self._values[name], self._widths[name] = value, width

    def _owner(self, name: str) -> "Scope | None":
        scope: Scope | None = self
        while scope is not None and name not in scope._values:
            scope = scope._outer
        return scope

    def find(self, name: str) -> Any:
        owner = self._owner(name)
        return None if owner is None else owner._values[name]

    def put(self, name: str, value: Value) -> None:
        owner = self._owner(name)
        if owner is None:
            raise P4Error(f"no variable {name}")
        owner._values[name] = value.to(owner._widths[name])
