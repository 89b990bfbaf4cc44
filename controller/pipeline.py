# SPDX-License-Identifier: Apache-2.0
"""The compiled program as P4Runtime messages.

This module encodes entries as messages, describes messages as text, and computes the difference of two sets of
messages: the changes to write, in an order that a switch accepts.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from finsy.proto import p4r
from google.protobuf import text_format

from dlcp.error_text import nearest
from dlcp.switch import PROGRAM_FOLDER, Entries, Profile, TableEntry, Value, format_match, parse_match, parse_number

_MATCHES: Final = {2: "exact", 3: "lpm", 4: "ternary", 5: "range"}
"""Values of p4info's ``MatchField.MatchType``."""


class PipelineError(ValueError):
    """A program that cannot be read, or an entry that does not fit it; the message names it and the reason."""


class CompiledProgram:
    """A compiled program.

    Parameters
    ----------
    folder
        Holds ``NAME.json`` and ``NAME.p4info.txtpb``.
    name
        The program's name.

    Attributes
    ----------
    p4info
        The program's P4Runtime description.
    config
        The P4Runtime configuration that installs it. Its cookie is the first 8 bytes of the SHA-256 of both files.

    Raises
    ------
    PipelineError
        A file is missing, or is not what the compiler writes.
    """

    def __init__(self, folder: Path = PROGRAM_FOLDER, name: str = "dlcp") -> None:
        try:
            blob = (folder / f"{name}.json").read_bytes()
            text = (folder / f"{name}.p4info.txtpb").read_bytes()
        except OSError as error:
            raise PipelineError(f"{error.filename}: {error.strerror}; `make p4` compiles the program") from None
        self.config = p4r.ForwardingPipelineConfig(p4_device_config=blob)
        try:
            text_format.Parse(text, self.config.p4info)
        except text_format.ParseError as error:
            raise PipelineError(f"{folder / name}.p4info.txtpb: {error}") from None
        digest = hashlib.sha256(text + b"\0" + blob).digest()
        self.config.cookie.cookie = int.from_bytes(digest[:8], "big")
        self.p4info = self.config.p4info
        self.tables = _by_alias(self.p4info.tables)
        self.actions = _by_alias(self.p4info.actions)
        self.profiles = _by_alias(self.p4info.action_profiles)
        self.counters = _by_alias(self.p4info.counters)
        self.registers = _by_alias(self.p4info.registers)
        self._names = {
            item.preamble.id: item
            for items in (self.tables, self.actions, self.profiles, self.counters, self.registers)
            for item in items.values()
        }

    @property
    def cookie(self) -> int:
        """The number that identifies this program."""
        return int(self.config.cookie.cookie)

    def encode(self, entries: Entries) -> list[p4r.Entity]:
        """Return members, groups and table entries as messages. Ports are left out: P4Runtime does not configure them.

        Raises
        ------
        PipelineError
            An entry does not fit the program, or a table has too many.
        """
        self._check_room(entries)
        entities: list[p4r.Entity] = []
        for profile in entries.profiles:
            entities += self._profile(profile)
        entities += [p4r.Entity(table_entry=self._table_entry(entry)) for entry in entries.entries]
        return entities

    def describe(self, entity: p4r.Entity) -> str:
        """Return an entity as readable text: its table, match and action."""
        kind = entity.WhichOneof("entity")
        if kind == "table_entry":
            return self._describe_entry(entity.table_entry)
        if kind == "action_profile_member":
            member = entity.action_profile_member
            return f"{self.name_of(member.action_profile_id)} member {member.member_id}: {self._action(member.action)}"
        if kind == "action_profile_group":
            group = entity.action_profile_group
            members = ", ".join(str(member.member_id) for member in group.members)
            return f"{self.name_of(group.action_profile_id)} group {group.group_id}: members {members}"
        return f"{kind}"

    def name_of(self, number: int) -> str:
        """Return the short name for a P4Runtime id."""
        item = self._names.get(number)
        return item.preamble.alias if item is not None else f"id {number:#x}"

    def _check_room(self, entries: Entries) -> None:
        for table, count in Counter(entry.table for entry in entries.entries).items():
            size = _named(self.tables, table, "table").size
            if count > size:
                raise PipelineError(f"table {table} holds {size} entries; {count} are too many")
        for profile in entries.profiles:
            size = _named(self.profiles, profile.profile, "action profile").size
            if len(profile.members) > size:
                raise PipelineError(
                    f"action profile {profile.profile} holds {size} members; {len(profile.members)} are too many"
                )

    def _profile(self, profile: Profile) -> list[p4r.Entity]:
        info = _named(self.profiles, profile.profile, "action profile")
        profile_id = info.preamble.id
        entities = []
        for member in profile.members:
            action = self._encode_action(member.action, member.params)
            encoded = p4r.ActionProfileMember(action_profile_id=profile_id, member_id=member.id, action=action)
            entities.append(p4r.Entity(action_profile_member=encoded))
        for group in profile.groups:
            members = [p4r.ActionProfileGroup.Member(member_id=member, weight=1) for member in sorted(group.members)]
            full = p4r.ActionProfileGroup(action_profile_id=profile_id, group_id=group.id, members=members)
            entities.append(p4r.Entity(action_profile_group=full))
        return entities

    def _table_entry(self, entry: TableEntry) -> p4r.TableEntry:
        table = _named(self.tables, entry.table, "table")
        keys = {field.name: field for field in table.match_fields}
        encoded = p4r.TableEntry(table_id=table.preamble.id, priority=entry.priority)
        for name in entry.match:
            _named(keys, name, "field", f"table {entry.table}")
        for name, key in keys.items():
            if name in entry.match:
                _add_match(encoded, key, entry.match[name], entry.table)
        if entry.action is not None:
            encoded.action.action.CopyFrom(self._encode_action(entry.action, entry.params))
        elif entry.member is not None:
            encoded.action.action_profile_member_id = entry.member
        else:
            encoded.action.action_profile_group_id = entry.group or 0
        if entry.meter is not None:
            rates = entry.meter
            encoded.meter_config.CopyFrom(
                p4r.MeterConfig(cir=rates.cir, cburst=rates.cburst, pir=rates.pir, pburst=rates.pburst)
            )
        return encoded

    def _encode_action(self, name: str, params: Mapping[str, Value]) -> p4r.Action:
        info = _named(self.actions, name, "action")
        known = {param.name: param for param in info.params}
        for param in params:
            _named(known, param, "parameter", f"action {name}")
        missing = [param for param in known if param not in params]
        if missing:
            raise PipelineError(f"action {name}: parameter {missing[0]} is missing")
        encoded = [
            p4r.Action.Param(
                param_id=param.id,
                value=_octets(parse_number(params[param.name]), param.bitwidth, f"{name}.{param.name}"),
            )
            for param in known.values()
        ]
        return p4r.Action(action_id=info.preamble.id, params=encoded)

    def _describe_entry(self, entry: p4r.TableEntry) -> str:
        table = self._names.get(entry.table_id)
        keys = {field.id: field for field in table.match_fields} if table is not None else {}
        words = [self.name_of(entry.table_id)]
        for match in entry.match:
            key = keys.get(match.field_id)
            words.append(f"{key.name}={_written_match(match, key)}" if key is not None else f"field {match.field_id}")
        if entry.priority:
            words.append(f"priority {entry.priority}")
        target = entry.action.WhichOneof("type")
        if target == "action":
            words.append(f"-> {self._action(entry.action.action)}")
        elif target is not None:
            words.append(f"-> {target.split('_')[2]} {getattr(entry.action, target)}")
        if entry.HasField("meter_config"):
            words.append(f"at {entry.meter_config.cir} B/s, burst {entry.meter_config.cburst} B")
        return " ".join(words)

    def _action(self, action: p4r.Action) -> str:
        info = self._names.get(action.action_id)
        params = {param.id: param for param in info.params} if info is not None else {}
        parts = []
        for param in action.params:
            known = params.get(param.param_id)
            value = _int(param.value)
            parts.append(
                f"{known.name}={format_match(value, 'exact', known.bitwidth)}" if known is not None else str(value)
            )
        return f"{self.name_of(action.action_id)}({', '.join(parts)})"


def _by_alias(items: Iterable[Any]) -> dict[str, Any]:
    return {item.preamble.alias: item for item in items}


def _named(known: Mapping[str, Any], name: str, kind: str, where: str = "the program") -> Any:
    if name not in known:
        raise PipelineError(f"{where} has no {kind} {name!r}{nearest(name, known)}")
    return known[name]


def _octets(value: int, width: int, where: str) -> bytes:
    """Return a number in the fewest octets that hold it: P4Runtime's canonical form."""
    if not 0 <= value < 1 << width:
        raise PipelineError(f"{where}: {value} does not fit {width} bits")
    return value.to_bytes((value.bit_length() + 7) // 8 or 1, "big")


def _add_match(entry: p4r.TableEntry, key: Any, value: Value, table: str) -> None:
    """Add a field to an entry. One that matches anything is left out, as P4Runtime requires."""
    kind = _MATCHES.get(key.match_type)
    where = f"{table}.{key.name}"
    if kind is None:
        raise PipelineError(f"{where}: p4info's match type {key.match_type} is not supported")
    found = parse_match(value, kind, key.bitwidth)
    if isinstance(found, int):
        entry.match.add(field_id=key.id).exact.value = _octets(found, key.bitwidth, where)
        return
    first, second = found
    if kind == "lpm" and second:
        kept = first >> (key.bitwidth - second) << (key.bitwidth - second)
        field = entry.match.add(field_id=key.id).lpm
        field.value, field.prefix_len = _octets(kept, key.bitwidth, where), second
    elif kind == "ternary" and second:
        ternary = entry.match.add(field_id=key.id).ternary
        ternary.value, ternary.mask = (_octets(part, key.bitwidth, where) for part in (first & second, second))
    elif kind == "range" and (first or second != (1 << key.bitwidth) - 1):
        span = entry.match.add(field_id=key.id).range
        span.low, span.high = (_octets(part, key.bitwidth, where) for part in (first, second))


def _written_match(match: p4r.FieldMatch, key: Any) -> Value:
    kind = match.WhichOneof("field_match_type")
    if kind == "exact":
        return format_match(_int(match.exact.value), kind, key.bitwidth)
    if kind == "lpm":
        return format_match((_int(match.lpm.value), match.lpm.prefix_len), kind, key.bitwidth)
    if kind == "ternary":
        return format_match((_int(match.ternary.value), _int(match.ternary.mask)), kind, key.bitwidth)
    return format_match((_int(match.range.low), _int(match.range.high)), "range", key.bitwidth)


def _int(octets: bytes) -> int:
    return int.from_bytes(octets, "big")


Key = tuple[str, int, int, tuple[bytes, ...]]
"""An entity's identity: its kind, table or profile, number or priority, and matches."""

BATCH_UPDATES: Final = 1000
"""Most updates in one write request: about 100 kB, well below gRPC's message limit of 4 MB."""


class ChangeKind(Enum):
    """A kind of change to an entity."""

    INSERT = "insert"
    MODIFY = "modify"
    DELETE = "delete"


class Change(NamedTuple):
    """An entity and the change to it."""

    action: ChangeKind
    entity: p4r.Entity


@dataclass(frozen=True)
class Difference:
    """Changes in the order in which they must be written.

    Parameters
    ----------
    phases
        Changes of one phase may take effect in any order, as P4Runtime allows within one request. The phases insert an
        entity before the entities that refer to it, and delete it after them.
    kept
        Number of entities that are already correct.
    """

    phases: tuple[tuple[Change, ...], ...]
    kept: int

    def __len__(self) -> int:
        return sum(map(len, self.phases))

    def __iter__(self) -> Iterator[Change]:
        for phase in self.phases:
            yield from phase

    def counts(self) -> dict[str, int]:
        """Return the numbers of entities inserted, modified and deleted."""
        found = {action.value: 0 for action in ChangeKind}
        for change in self:
            found[change.action.value] += 1
        return found

    def batches(self, updates_max: int = BATCH_UPDATES) -> Iterator[tuple[Change, ...]]:
        """Yield the changes in groups, one for each write request."""
        for phase in self.phases:
            for start in range(0, len(phase), updates_max):
                yield phase[start : start + updates_max]


_IDENTITY: Final = {
    "action_profile_member": ("action_profile_id", "member_id"),
    "action_profile_group": ("action_profile_id", "group_id"),
    "table_entry": ("table_id", "priority", "match"),
}
"""The fields that identify an entity of each kind. A kind comes before the kinds that refer to it."""


def difference(wanted: Iterable[p4r.Entity], found: Iterable[p4r.Entity]) -> Difference:
    """Return the changes that turn ``found`` into ``wanted``.

    Counters, hit times and other fields that only the switch sets are ignored.
    """
    before = {key_of(entity): entity for entity in found}
    written: dict[str, list[Change]] = {kind: [] for kind in _IDENTITY}
    freed: list[Change] = []
    deleted: dict[str, list[Change]] = {kind: [] for kind in _IDENTITY}
    kept = 0
    for entity in wanted:
        key = key_of(entity)
        old = before.pop(key, None)
        if old is None:
            written[key[0]].append(Change(ChangeKind.INSERT, entity))
        elif _same(entity, old):
            kept += 1
        else:
            written[key[0]].append(Change(ChangeKind.MODIFY, entity))
    for key, entity in before.items():
        (freed if _stands_alone(entity) else deleted[key[0]]).append(Change(ChangeKind.DELETE, _bare(entity)))
    phases = [freed, *(written[kind] for kind in _IDENTITY)]
    phases += [deleted[kind] for kind in reversed(_IDENTITY)]
    return Difference(tuple(tuple(phase) for phase in phases if phase), kept)


def key_of(entity: p4r.Entity) -> Key:
    """Return an entity's identity.

    Raises
    ------
    ValueError
        A fabric does not use entities of this kind.
    """
    kind = entity.WhichOneof("entity")
    if kind not in _IDENTITY:
        raise ValueError(f"{kind}: a fabric does not use entities of this kind")
    own = getattr(entity, kind)
    first, second = (getattr(own, field) for field in _IDENTITY[kind][:2])
    matches = own.match if kind == "table_entry" else ()
    return kind, first, second, tuple(sorted(match.SerializeToString(deterministic=True) for match in matches))


def _same(wanted: p4r.Entity, found: p4r.Entity) -> bool:
    """Return whether an entity is as wanted. A meter that the wanted entity lacks is ignored."""
    kind = str(wanted.WhichOneof("entity"))
    ours, theirs = getattr(wanted, kind), getattr(found, kind)
    if kind == "action_profile_group":
        return _members(ours) == _members(theirs)
    if kind == "table_entry" and ours.HasField("meter_config") and ours.meter_config != theirs.meter_config:
        return False
    return bool(ours.action == theirs.action)


def _stands_alone(entity: p4r.Entity) -> bool:
    """Return whether an entry has only exact matches, so that it can be deleted first to make room in a full table.

    Other entries must stay until their replacements are written: without a route, a shorter prefix would match.
    """
    matches = entity.table_entry.match
    return bool(matches) and all(match.WhichOneof("field_match_type") == "exact" for match in matches)


def _members(group: p4r.ActionProfileGroup) -> list[tuple[int, int]]:
    return sorted((member.member_id, member.weight) for member in group.members)


def _bare(entity: p4r.Entity) -> p4r.Entity:
    """Return an entity with its identifying fields only: a deletion may hold no others."""
    kind = str(entity.WhichOneof("entity"))
    own = getattr(entity, kind)
    return p4r.Entity(**{kind: type(own)(**{field: getattr(own, field) for field in _IDENTITY[kind]})})
