# SPDX-License-Identifier: Apache-2.0
"""Table entries, action-profile members and port set-up as a JSON file.

An example with all parts::

    {
      "profiles": [
        {"profile": "route_selector",
         "members": [{"id": 1, "action": "to_next_hop", "params": {"port": 1, "mac": "02:00:00:00:00:01"}}],
         "groups": [{"id": 1, "members": [1]}]}
      ],
      "entries": [
        {"table": "ipv4_route", "match": {"ipv4_dst": "10.0.0.1/32"}, "group": 1},
        {"table": "job_share", "match": {"job": 7, "control": 0, "eg_port": 1}, "action": "metered",
         "meter": {"cir": 12500000, "cburst": 50000, "pir": 12500000, "pburst": 50000}},
        {"table": "classify", "match": {"job": "0x10&&&0xf0"}, "priority": 1,
         "action": "set_class", "params": {"queue": 3, "drop_class": 0}}
      ],
      "ports": {"1": {"rate_bps": 100000000, "depth_packets": 64}}
    }

Names are those of p4info, or their last parts where these are unique. Values are numbers, or strings: ``"0x1f"``,
``"10.0.0.1"``, ``"02:00:00:00:00:01"``; ``"VALUE/LENGTH"`` for longest-prefix fields, ``"VALUE&&&MASK"`` for ternary
ones, ``"LOW..HIGH"`` for ranges. A plain value of these three kinds matches only itself, so that ``"10.0.0.1"`` is
``"10.0.0.1/32"``, and an omitted field matches anything. Meter rates are in bytes/s and bursts in bytes, as in
P4Runtime (packets/s and packets for a packet meter).
"""

import dataclasses
import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from dlcp.inputs.document import Document, converted
from dlcp.switch.executor import model
from dlcp.switch.executor.model import Action, EntryError, GroupRef, MemberRef, MeterConfig, Named, TableEntry, Target
from dlcp.switch.executor.program import Program
from dlcp.switch.queues import PortQueueing

Value: TypeAlias = int | str
"""A number, or a string that `parse_number` accepts."""

_T = TypeVar("_T")
_S = TypeVar("_S")
_MAC: Final = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}")
_SEPARATORS: Final = {"lpm": "/", "ternary": "&&&", "range": ".."}


@dataclass(frozen=True)
class Profile:
    """The members and groups of one action profile, each with its id; a group has the ids of its members."""

    profile: str
    members: tuple[tuple[int, Action], ...] = ()
    groups: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Entries:
    """The complete configuration that a control plane writes to one switch; ``defaults`` are by table."""

    profiles: tuple[Profile, ...] = ()
    defaults: tuple[tuple[str, Action], ...] = ()
    entries: tuple[TableEntry, ...] = ()
    ports: dict[int, PortQueueing] = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------------------- values


def parse_number(value: Value) -> int:
    """Parse ``5``, ``"5"``, ``"0x1f"``, ``"10.0.0.1"``, ``"fd00::1"`` or ``"02:00:00:00:00:01"`` into a number.

    Raises
    ------
    EntryError
        The value has none of these forms.
    """
    if isinstance(value, int):
        return value
    try:
        if _MAC.fullmatch(value):
            return int(value.replace(":", ""), 16)
        return int(ipaddress.ip_address(value)) if value.count(".") == 3 or ":" in value else int(value, 0)
    except ValueError:
        raise EntryError(f"{value!r} is not a number, IP address or Ethernet address") from None


def parse_match(value: Value, match: str, width: int) -> int | tuple[int, int]:
    """Parse the match of one field for a program's tables.

    Parameters
    ----------
    value
        As in the file.
    match
        ``exact``, ``lpm``, ``ternary`` or ``range``.
    width
        Width of the field in bits.

    Returns
    -------
    The number for an exact field; else (value, prefix length), (value, mask) or (low, high). A plain number matches
    only itself.
    """
    if match == "exact":
        return parse_number(value)
    first, separator, second = str(value).partition(_SEPARATORS[match])
    low = parse_number(first) if separator else parse_number(value)
    if separator:
        return low, parse_number(second)
    return low, {"lpm": width, "ternary": (1 << width) - 1, "range": low}[match]


def format_match(value: int | tuple[int, int], match: str, width: int) -> Value:
    """Format the match of a field for a file: the inverse of `parse_match`."""
    if isinstance(value, int):
        return _format_number(value, width)
    low, second = value
    if parse_match(low, match, width) == value:
        return _format_number(low, width)
    right = hex(second) if match == "ternary" else second
    return f"{_format_number(low, width)}{_SEPARATORS[match]}{right}"


def _format_number(value: int, width: int) -> Value:
    """Format 32-, 128- and 48-bit numbers as IPv4, IPv6 and Ethernet addresses; return others unchanged."""
    if width == 32:
        return str(ipaddress.IPv4Address(value))
    if width == 48:
        return value.to_bytes(6, "big").hex(":")
    if width == 128:
        return str(ipaddress.IPv6Address(value))
    return value


# ------------------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True, kw_only=True)
class _FileAction:
    action: str
    params: dict[str, Value] = field(default_factory=dict)

    def parsed(self) -> Action:
        return Action(self.action, {name: parse_number(value) for name, value in self.params.items()})


@dataclass(frozen=True, kw_only=True)
class _FileMember(_FileAction):
    id: int


@dataclass(frozen=True, kw_only=True)
class _FileDefault(_FileAction):
    table: str


@dataclass(frozen=True)
class _FileGroup:
    id: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class _FileProfile:
    profile: str
    members: tuple[_FileMember, ...] = ()
    groups: tuple[_FileGroup, ...] = ()

    def parsed(self) -> Profile:
        members = tuple((member.id, member.parsed()) for member in self.members)
        return Profile(self.profile, members, tuple((group.id, group.members) for group in self.groups))


@dataclass(frozen=True)
class _FileEntry:
    table: str
    match: dict[str, Value] = field(default_factory=dict)
    action: str | None = None
    params: dict[str, Value] = field(default_factory=dict)
    member: int | None = None
    group: int | None = None
    priority: int = 0
    meter: MeterConfig | None = None

    def __post_init__(self) -> None:
        """Refuse an entry without exactly one target."""
        given = [name for name in ("action", "member", "group") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"an entry has one of action, member and group; this one has {given or 'none'}")

    def parsed(self, table: model.TableDef) -> TableEntry:
        keys = Named("field", {key.name: key for key in table.keys}, f"table {table.name}")
        match = {name: parse_match(value, keys[name].match, keys[name].width) for name, value in self.match.items()}
        target: Target = MemberRef(self.member) if self.member is not None else GroupRef(self.group or 0)
        if self.action is not None:
            target = _FileAction(action=self.action, params=self.params).parsed()
        return TableEntry(self.table, match, target, self.priority, self.meter)


@dataclass(frozen=True)
class _File:
    profiles: tuple[_FileProfile, ...] = ()
    defaults: tuple[_FileDefault, ...] = ()
    entries: tuple[_FileEntry, ...] = ()
    ports: dict[int, PortQueueing] = field(default_factory=dict)


def read_entries(path: Path, definition: model.ProgramDef) -> tuple[Entries, Document]:
    """Read a file of entries for a program; `apply_entries` uses the returned document to name lines in errors.

    Raises
    ------
    DocumentError
        The file cannot be read, does not have the format shown above, or names an unknown table or field.
    """
    document = Document(path)
    return _parsed(document.convert(_File), definition, document), document


def read_ports(path: Path) -> dict[int, PortQueueing]:
    """Return the queueing of each port in a file of the format shown above; its entries are ignored.

    Raises
    ------
    DocumentError
        The file cannot be read, or does not have that format.
    """
    return Document(path).convert(_File).ports


def write_ports(path: Path, ports: Mapping[int, PortQueueing]) -> None:
    """Write a file for `read_ports`, replacing it atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    content = {"ports": {str(port): dataclasses.asdict(queueing) for port, queueing in ports.items()}}
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def parse_entries(content: Mapping[str, Any], definition: model.ProgramDef) -> Entries:
    """Return the entries in the content of a file; raises ValueError as `read_entries` does."""
    return _parsed(converted(content, _File), definition, None)


def _parsed(file: _File, definition: model.ProgramDef, document: Document | None) -> Entries:
    tables = _tables(definition)
    return Entries(
        _each("profiles", file.profiles, _FileProfile.parsed, document),
        _each("defaults", file.defaults, lambda default: (default.table, default.parsed()), document),
        _each("entries", file.entries, lambda entry: entry.parsed(tables[entry.table]), document),
        file.ports,
    )


def write_entries(path: Path, entries: Entries, definition: model.ProgramDef) -> None:
    """Write the entries of a program into a file for `read_entries`, one entry per line."""
    tables = _tables(definition)
    actions = Named("action", {action.name: action for table in tables.values() for action in table.actions})

    def target(target: Target) -> dict[str, Any]:
        if not isinstance(target, Action):
            return {"member" if isinstance(target, MemberRef) else "group": target.id}
        widths = {parameter.name: parameter.width for parameter in actions[target.name].parameters}
        params = {name: format_match(value, "exact", widths[name]) for name, value in target.params.items()}
        return {"action": target.name} | ({"params": params} if params else {})

    def line(entry: TableEntry) -> dict[str, Any]:
        keys = {key.name: key for key in tables[entry.table].keys}
        match = {name: format_match(item, keys[name].match, keys[name].width) for name, item in entry.match.items()}
        said = {"table": entry.table, "match": match} | target(entry.target)
        said |= {"priority": entry.priority} if entry.priority else {}
        return said | ({"meter": dataclasses.asdict(entry.meter)} if entry.meter else {})

    profiles = [
        {
            "profile": profile.profile,
            "members": [{"id": number} | target(action) for number, action in profile.members],
            "groups": [{"id": number, "members": members} for number, members in profile.groups],
        }
        for profile in entries.profiles
    ]
    defaults = [{"table": table} | target(action) for table, action in entries.defaults]
    items = {"profiles": profiles, "defaults": defaults, "entries": [line(entry) for entry in entries.entries]}
    parts = [
        f'"{name}": [' + ",".join(f"\n    {json.dumps(each)}" for each in lines) + "\n  ]"
        for name, lines in items.items()
    ]
    usual = dataclasses.asdict(PortQueueing())
    ports = [
        f'\n    "{port}": '
        + json.dumps({name: value for name, value in dataclasses.asdict(item).items() if value != usual[name]})
        for port, item in sorted(entries.ports.items())
    ]
    parts.append('"ports": {' + ",".join(ports) + "\n  }")
    path.write_text("{\n  " + ",\n  ".join(parts) + "\n}\n", encoding="utf-8")


def _tables(definition: model.ProgramDef) -> Named[model.TableDef]:
    return Named("table", {table.name: table for table in model.visible_tables(definition)})


# --------------------------------------------------------------------------------------------------------- programs


def apply_entries(entries: Entries, program: Program, document: Document | None = None) -> None:
    """Replace the entries of a program. ``entries.ports`` is ignored: it configures the switch, not the program.

    Raises
    ------
    DocumentError, EntryError
        An entry does not fit the program. DocumentError, with file and line, if ``document`` is given.
    """

    def add_profile(profile: Profile) -> None:
        known = program.profiles[profile.profile]
        for number, action in profile.members:
            known.add_member(number, action)
        for number, members in profile.groups:
            known.add_group(number, members)

    program.clear_entries()
    tables = program.tables
    _each("profiles", entries.profiles, add_profile, document)
    _each("defaults", entries.defaults, lambda default: tables[default[0]].set_default(default[1]), document)
    _each(
        "entries",
        entries.entries,
        lambda entry: tables[entry.table].insert(entry.match, entry.target, entry.priority, entry.meter),
        document,
    )


def _each(part: str, items: Iterable[_T], function: Callable[[_T], _S], document: Document | None) -> tuple[_S, ...]:
    """Return what a function returns for each item; errors name the item, and its file and line."""
    found = []
    for index, item in enumerate(items):
        try:
            found.append(function(item))
        except EntryError as error:
            if document is not None:
                raise document.error(str(error), (part, index)) from None
            raise EntryError(f"{part}[{index}]: {error}") from None
    return tuple(found)
