# SPDX-License-Identifier: Apache-2.0
"""Where the state of a program lives: lookup structures and rows of each table, and flat arrays for the rest.

A table's entry is the place of its row in the table's rows: the number of its action (its position among the table's
actions) and the arguments. Row 0 is the default entry, so an entry other than 0 is a hit.

Tables with an action profile have rows of one cell: a place in the profile's ``groups``, which holds (members, place in
``choices``) of a group or of a single member; ``choices`` holds places in ``members``, whose rows are as above. Group 0
has no members: the entry of a table without a default member.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dlcp.switch.errors import UnsupportedFeature
from dlcp.switch.executor.model import Control, Key, ProgramDef, TableDef

FLAT: Final = ("registers", "packets_counted", "bytes_counted", "meter_rates", "meter_tokens")
"""The arrays for what is no table."""


@dataclass(frozen=True, slots=True)
class TableSlot:
    """Names of a table's variables and arrays, and the cells of a row."""

    number: int
    stride: int

    @property
    def index(self) -> str:
        """The lookup structure."""
        return f"T{self.number}"

    @property
    def rows(self) -> str:
        """The rows."""
        return f"R{self.number}"

    @property
    def entry(self) -> str:
        """The variable for the entry found."""
        return f"e{self.number}"

    @property
    def action(self) -> str:
        """The variable for the number of the action."""
        return f"a{self.number}"

    @property
    def member(self) -> str:
        """The variable for the member chosen."""
        return f"m{self.number}"

    @staticmethod
    def shifts(table: TableDef) -> Iterator[tuple[Key, int]]:
        """Return each key with its place in the combined key; an LPM field is the lowest."""
        order = sorted(table.keys, key=lambda key: key.match == "lpm")
        shift = sum(key.width for key in order)
        for key in order:
            shift -= key.width
            yield key, shift


@dataclass(frozen=True, slots=True)
class ProfileSlot:
    """Names of an action profile's arrays, and the cells of a member's row."""

    number: int
    stride: int

    @property
    def groups(self) -> str:
        """The groups."""
        return f"D{self.number}"

    @property
    def choices(self) -> str:
        """The members of groups."""
        return f"G{self.number}"

    @property
    def members(self) -> str:
        """The members' rows."""
        return f"M{self.number}"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All slots, where each object starts within the flat arrays, and how many cells those have."""

    tables: Mapping[str, TableSlot]
    profiles: Mapping[str, ProfileSlot]
    registers: Mapping[str, int]
    counters: Mapping[str, int]
    meters: Mapping[str, int]
    register_cells: int
    counter_cells: int
    meter_cells: int

    def structures(self) -> list[str]:
        """Return the names of all tables' and profiles' arrays, in the order in which `compiled` packs them."""
        names = [name for slot in self.tables.values() for name in (slot.index, slot.rows)]
        return names + [name for slot in self.profiles.values() for name in (slot.groups, slot.choices, slot.members)]


def visible_tables(program: ProgramDef) -> list[TableDef]:
    """Return the tables that have entries or a default that can be changed."""
    pipelines: tuple[Control, ...] = (program.ingress, program.egress)
    return [
        node
        for pipeline in pipelines
        for node in pipeline.nodes.values()
        if isinstance(node, TableDef) and not node.hidden
    ]


def lay_out(program: ProgramDef) -> StateLayout:
    """Give everything its place."""
    tables = {}
    users: dict[str, int] = {}
    for number, table in enumerate(visible_tables(program)):
        widest = max((len(action.parameters) for action in table.actions), default=0)
        if table.profile is not None:
            if table.profile in users:
                raise UnsupportedFeature("an action profile that two tables share", f"action profile {table.profile}")
            users[table.profile] = widest
            widest = 0
        tables[table.name] = TableSlot(number, 1 + widest)
    profiles = {name: ProfileSlot(number, 1 + users.get(name, 0)) for number, name in enumerate(program.profiles)}
    registers, register_cells = _bases({item.name: item.size for item in program.registers.values()})
    counters, counter_cells = _bases({item.name: item.size for item in program.counters.values()})
    meters, meter_cells = _bases({item.name: item.size for item in program.meters.values()})
    return StateLayout(tables, profiles, registers, counters, meters, register_cells, counter_cells, meter_cells)


def _bases(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    bases, total = {}, 0
    for name, size in sizes.items():
        bases[name] = total
        total += size
    return bases, total
