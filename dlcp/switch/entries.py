# SPDX-License-Identifier: Apache-2.0
"""Table entries, action-profile members and port set-up as a JSON file.

An example, with every kind of thing in it::

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
ones, ``"LOW..HIGH"`` for ranges. An omitted field of these three kinds matches anything. Meter rates are in
bytes/s and bursts in bytes, as in P4Runtime (packets/s and packets for a packet meter).
"""

import dataclasses
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from dlcp.document import Document
from dlcp.switch.executor.cells import MeterConfig
from dlcp.switch.executor.model import EntryError
from dlcp.switch.executor.program import Program
from dlcp.switch.executor.tables import Action, GroupRef, MemberRef, Table, Target
from dlcp.switch.queues import PortQueueing

Value: TypeAlias = int | str
"""A number, or a string that `parse_number` accepts."""

_MAC: Final = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}")
_SEPARATORS: Final = {"lpm": "/", "ternary": "&&&", "range": ".."}


@dataclass(frozen=True)
class ProfileMember:
    """An action with its parameters; entries and groups refer to it by ``id``."""

    id: int
    action: str
    params: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class ProfileGroup:
    """Members among which the program's selector chooses."""

    id: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """The members and groups of one action profile."""

    profile: str
    members: tuple[ProfileMember, ...] = ()
    groups: tuple[ProfileGroup, ...] = ()


@dataclass(frozen=True)
class DefaultAction:
    """The action of a table when no entry matches."""

    table: str
    action: str
    params: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class TableEntry:
    """One entry, with exactly one of ``action``, ``member`` and ``group``."""

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

    @property
    def target(self) -> Target:
        """The action, member or group for a program's table; raises EntryError for an invalid parameter."""
        if self.action is not None:
            return parse_action(self.action, self.params)
        if self.member is not None:
            return MemberRef(self.member)
        assert self.group is not None
        return GroupRef(self.group)


@dataclass(frozen=True)
class Entries:
    """The complete configuration that a control plane writes to one switch."""

    profiles: tuple[Profile, ...] = ()
    defaults: tuple[DefaultAction, ...] = ()
    entries: tuple[TableEntry, ...] = ()
    ports: dict[int, PortQueueing] = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------------------- values


def parse_number(value: Value) -> int:
    """Parse ``5``, ``"5"``, ``"0x1f"``, ``"10.0.0.1"`` or ``"02:00:00:00:00:01"`` into a number.

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
        return int(ipaddress.IPv4Address(value)) if value.count(".") == 3 else int(value, 0)
    except ValueError:
        raise EntryError(f"{value!r} is not a number, IPv4 address or Ethernet address") from None


def parse_action(name: str, params: Mapping[str, Value]) -> Action:
    """Return an action for a program's tables, with its parameters parsed."""
    return Action(name, {param: parse_number(value) for param, value in params.items()})


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


def parse_matches(table: Table, match: Mapping[str, Value]) -> dict[str, int | tuple[int, int]]:
    """Parse the matches of all fields with `parse_match`; the table itself refuses unknown fields later."""
    fields = {key.name: (key.match, key.width) for key in table.definition.keys}
    return {name: parse_match(value, *fields[name]) if name in fields else 0 for name, value in match.items()}


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
    """Format 32- and 48-bit numbers as IPv4 and Ethernet addresses; return others unchanged."""
    if width == 32:
        return str(ipaddress.IPv4Address(value))
    if width == 48:
        return value.to_bytes(6, "big").hex(":")
    return value


# ------------------------------------------------------------------------------------------------------------ files


def read_entries(path: Path) -> tuple[Entries, Document]:
    """Read a file of entries; `apply_entries` uses the returned document to name lines in errors.

    Raises
    ------
    DocumentError
        The file cannot be read, or does not have the format shown above.
    """
    document = Document(path)
    return document.convert(Entries), document


def write_entries(path: Path, entries: Entries) -> None:
    """Write a file for `read_entries`, one entry per line."""
    parts = []
    for name in ("profiles", "defaults", "entries"):
        items = [json.dumps(_without_defaults(item)) for item in getattr(entries, name)]
        parts.append(f'  "{name}": [\n    ' + ",\n    ".join(items) + "\n  ]" if items else f'  "{name}": []')
    ports = [f'"{port}": {json.dumps(_without_defaults(item))}' for port, item in sorted(entries.ports.items())]
    parts.append('  "ports": {\n    ' + ",\n    ".join(ports) + "\n  }" if ports else '  "ports": {}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _without_defaults(item: Any) -> dict[str, Any]:
    """Return a dataclass as a dict without the fields that have their default value."""
    found = {}
    for part in dataclasses.fields(item):
        value = getattr(item, part.name)
        default = part.default_factory() if callable(part.default_factory) else part.default
        if value == default:
            continue
        if isinstance(value, tuple):
            value = [_without_defaults(inner) if dataclasses.is_dataclass(inner) else inner for inner in value]
        found[part.name] = _without_defaults(value) if dataclasses.is_dataclass(value) else value
    return found


# --------------------------------------------------------------------------------------------------------- programs


def apply_entries(entries: Entries, program: Program, document: Document | None = None) -> None:
    """Replace the entries of a program. ``entries.ports`` is ignored: it configures the switch, not the program.

    Raises
    ------
    DocumentError, EntryError
        An entry does not fit the program. DocumentError, with file and line, if ``document`` is given.
    """
    program.clear_entries()
    for index, profile in enumerate(entries.profiles):
        with _errors_at(document, "profiles", index):
            known = program.profiles[profile.profile]
            for member in profile.members:
                known.add_member(member.id, parse_action(member.action, member.params))
            for group in profile.groups:
                known.add_group(group.id, list(group.members))
    for index, default in enumerate(entries.defaults):
        with _errors_at(document, "defaults", index):
            program.tables[default.table].set_default(parse_action(default.action, default.params))
    for index, entry in enumerate(entries.entries):
        with _errors_at(document, "entries", index):
            insert_entry(entry, program)


def insert_entry(entry: TableEntry, program: Program) -> None:
    """Insert one entry with its meter; raises EntryError if it does not fit the program."""
    table = program.tables[entry.table]
    match = parse_matches(table, entry.match)
    table.insert(match, entry.target, entry.priority)
    if entry.meter is not None:
        table.set_meter(match, entry.meter, entry.priority)


@contextmanager
def _errors_at(document: Document | None, part: str, index: int) -> Iterator[None]:
    """Add the file, line and entry to errors raised in the ``with`` block."""
    try:
        yield
    except EntryError as error:
        if document is not None:
            raise document.error(str(error), (part, index)) from None
        raise EntryError(f"{part}[{index}]: {error}") from None
