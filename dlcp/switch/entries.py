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

Names are those of p4info, or the short ones if only one thing has it. Values are numbers, or strings: ``"0x1f"``,
``"10.0.0.1"``, ``"02:00:00:00:00:01"``; ``"VALUE/LENGTH"`` for longest-prefix fields, ``"VALUE&&&MASK"`` for ternary
ones, ``"LOW..HIGH"`` for ranges. A field of these three kinds that is left out matches anything. Meter rates are in
bytes/s and bursts in bytes, as in P4Runtime.
"""

import dataclasses
import ipaddress
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dlcp.document import Document
from dlcp.switch.cells import MeterConfig
from dlcp.switch.errors import EntryError
from dlcp.switch.profiles import Action, Group, Member
from dlcp.switch.program import Program
from dlcp.switch.queues import PortQueueing
from dlcp.switch.tables import Entry, Table

Value = int | str
"""A number as people write it."""

_MAC: Final = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}")
_SEPARATORS: Final = {"lpm": "/", "ternary": "&&&", "range": ".."}


class EntriesError(ValueError):
    """Entries that do not fit the program; the message says which of them and why."""


@dataclass(frozen=True)
class MeterRates:
    """Rates of a two-rate three-colour meter: bytes/s, bursts in bytes (packets/s and packets for a packet meter)."""

    cir: int
    cburst: int
    pir: int
    pburst: int


@dataclass(frozen=True)
class ProfileMember:
    """An action with its parameters that entries and groups refer to by ``id``."""

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
    """What a table does when nothing matches."""

    table: str
    action: str
    params: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class TableEntry:
    """One entry: exactly one of ``action``, ``member`` and ``group`` says what happens on a match."""

    table: str
    match: dict[str, Value] = field(default_factory=dict)
    action: str | None = None
    params: dict[str, Value] = field(default_factory=dict)
    member: int | None = None
    group: int | None = None
    priority: int = 0
    meter: MeterRates | None = None

    def __post_init__(self) -> None:
        """Refuse an entry that does nothing or two things."""
        given = [name for name in ("action", "member", "group") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"an entry has one of action, member and group; this one has {given or 'none'}")


@dataclass(frozen=True)
class Entries:
    """Everything that a control plane writes to one switch."""

    profiles: tuple[Profile, ...] = ()
    defaults: tuple[DefaultAction, ...] = ()
    entries: tuple[TableEntry, ...] = ()
    ports: dict[int, PortQueueing] = field(default_factory=dict)


def read(path: Path) -> tuple[Entries, Document]:
    """Read a file of entries; the document is for :func:`apply`, which names lines of it in its errors.

    Raises
    ------
    DocumentError
        The file cannot be read, or is not of the form shown above.
    """
    document = Document(path)
    return document.convert(Entries), document


def write(path: Path, entries: Entries) -> None:
    """Write a file that :func:`read` understands, one entry a line."""
    parts = []
    for name in ("profiles", "defaults", "entries"):
        items = [json.dumps(_plain(item)) for item in getattr(entries, name)]
        parts.append(f'  "{name}": [\n    ' + ",\n    ".join(items) + "\n  ]" if items else f'  "{name}": []')
    ports = [f'"{port}": {json.dumps(_plain(queueing))}' for port, queueing in sorted(entries.ports.items())]
    parts.append('  "ports": {\n    ' + ",\n    ".join(ports) + "\n  }" if ports else '  "ports": {}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def apply(entries: Entries, program: Program, document: Document | None = None) -> None:
    """Make these the entries of a program, in place of those it has. The ports are for the switch, not the program.

    Raises
    ------
    DocumentError, EntriesError
        An entry does not fit the program; the former with file and line, when ``document`` is given.
    """
    program.clear_entries()
    for index, profile in enumerate(entries.profiles):
        with _Place(document, "profiles", index):
            _apply_profile(profile, program)
    for index, default in enumerate(entries.defaults):
        with _Place(document, "defaults", index):
            program.tables[default.table].set_default(_action(default.action, default.params))
    for index, entry in enumerate(entries.entries):
        with _Place(document, "entries", index):
            _apply_entry(entry, program)


def dump(program: Program, ports: dict[int, PortQueueing] | None = None) -> Entries:
    """Return the entries, members and groups that a program has now; default actions are not among them."""
    profiles = []
    for name, profile in program.profiles.items():
        members = tuple(ProfileMember(id, action.name, dict(action.params)) for id, action in profile.members().items())
        groups = tuple(ProfileGroup(id, tuple(group)) for id, group in profile.groups().items())
        if members:
            profiles.append(Profile(name, members, groups))
    entries = tuple(
        _dump_entry(name, table, entry) for name, table in program.tables.items() for entry in table.entries()
    )
    return Entries(tuple(profiles), (), entries, dict(ports or {}))


def number(value: Value) -> int:
    """Return the number that was meant by ``5``, ``"5"``, ``"0x1f"``, ``"10.0.0.1"`` or ``"02:00:00:00:00:01"``.

    Raises
    ------
    EntriesError
        It is none of these.
    """
    if isinstance(value, int):
        return value
    try:
        if _MAC.fullmatch(value):
            return int(value.replace(":", ""), 16)
        return int(ipaddress.IPv4Address(value)) if value.count(".") == 3 else int(value, 0)
    except ValueError:
        raise EntriesError(f"{value!r} is no number, IPv4 address or Ethernet address") from None


def written(value: int | tuple[int, int], match: str, width: int) -> Value:
    """Return a match of a program's table as it is written in a file: the way back from :func:`match_value`."""
    if isinstance(value, int):
        return _written_number(value, width)
    low, second = value
    if match_value(low, match, width) == value:
        return _written_number(low, width)
    separator = _SEPARATORS[match]
    right = hex(second) if match == "ternary" else second
    return f"{_written_number(low, width)}{separator}{right}"


def match_value(value: Value, match: str, width: int) -> int | tuple[int, int]:
    """Return a match as a program's tables take it.

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
    itself only.
    """
    if match == "exact":
        return number(value)
    first, separator, second = str(value).partition(_SEPARATORS[match])
    low = number(first) if separator else number(value)
    if separator:
        return low, number(second)
    return low, {"lpm": width, "ternary": (1 << width) - 1, "range": low}[match]


class _Place:
    """Names the file, line and entry in whatever goes wrong inside the ``with`` block."""

    def __init__(self, document: Document | None, part: str, index: int) -> None:
        self._document, self._part, self._index = document, part, index

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, EntryError | EntriesError):
            if self._document is not None:
                raise self._document.error(str(error), (self._part, self._index)) from None
            raise EntriesError(f"{self._part}[{self._index}]: {error}") from None


def _apply_profile(profile: Profile, program: Program) -> None:
    known = program.profiles[profile.profile]
    for member in profile.members:
        known.add_member(member.id, _action(member.action, member.params))
    for group in profile.groups:
        known.add_group(group.id, list(group.members))


def _apply_entry(entry: TableEntry, program: Program) -> None:
    table = program.tables[entry.table]
    fields = {key.name: (key.match, key.width) for key in table.definition.keys}
    match = {
        # A field that the table has not got is for the table to refuse.
        name: match_value(value, *fields[name]) if name in fields else 0
        for name, value in entry.match.items()
    }
    target: Action | Member | Group
    if entry.action is not None:
        target = _action(entry.action, entry.params)
    elif entry.member is not None:
        target = Member(entry.member)
    else:
        assert entry.group is not None  # a TableEntry has one of the three
        target = Group(entry.group)
    table.insert(match, target, entry.priority)
    if entry.meter is not None:
        table.set_meter(match, MeterConfig(*dataclasses.astuple(entry.meter)), entry.priority)


def _dump_entry(name: str, table: Table, entry: Entry) -> TableEntry:
    fields = {key.name: (key.match, key.width) for key in table.definition.keys}
    match = {field: written(value, *fields[field]) for field, value in entry.match.items()}
    config = table.get_meter(entry.match, entry.priority) if table.definition.meter else None
    meter = MeterRates(config.cir, config.cburst, config.pir, config.pburst) if config else None
    target = entry.target
    if isinstance(target, Action):
        return TableEntry(name, match, target.name, dict(target.params), priority=entry.priority, meter=meter)
    if isinstance(target, Member):
        return TableEntry(name, match, member=target.id, priority=entry.priority, meter=meter)
    return TableEntry(name, match, group=target.id, priority=entry.priority, meter=meter)


def _written_number(value: int, width: int) -> Value:
    """Return addresses in the way people know them, other numbers as they are."""
    if width == 32:
        return str(ipaddress.IPv4Address(value))
    if width == 48:
        return value.to_bytes(6, "big").hex(":")
    return value


def _action(name: str, params: dict[str, Value]) -> Action:
    return Action(name, {param: number(value) for param, value in params.items()})


def _plain(item: Any) -> dict[str, Any]:
    """Return a dataclass as a dict without what is as it would be anyway."""
    plain = {}
    for part in dataclasses.fields(item):
        value = getattr(item, part.name)
        default = part.default_factory() if callable(part.default_factory) else part.default
        if value == default:
            continue
        if isinstance(value, tuple):
            value = [_plain(inner) if dataclasses.is_dataclass(inner) else inner for inner in value]
        plain[part.name] = _plain(value) if dataclasses.is_dataclass(value) else value
    return plain
