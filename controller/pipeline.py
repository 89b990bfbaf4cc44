# SPDX-License-Identifier: Apache-2.0
"""The compiled program as P4Runtime messages.

This module encodes entries as messages, describes messages as text, and computes the difference of two sets of
messages: the changes to write, in an order that a switch accepts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finsy import P4Schema
from finsy.proto import p4i, p4r
from google.protobuf import text_format

from dlcp.error_text import nearest
from dlcp.switch import PROGRAM_FOLDER, Entries, Profile, TableEntry, Value, format_match, parse_match, parse_number


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
    schema
        The program's objects, as p4info describes them.
    config
        The P4Runtime configuration that installs it. Its cookie is the first 8 bytes of a SHA-256 over both files.

    Raises
    ------
    PipelineError
        A file is missing, or is not what the compiler writes.
    """

    def __init__(self, folder: Path = PROGRAM_FOLDER, name: str = "dlcp") -> None:
        path = folder / f"{name}.p4info.txtpb"
        try:
            blob = (folder / f"{name}.json").read_bytes()
            p4info = text_format.Parse(path.read_text(encoding="utf-8"), p4i.P4Info())
        except OSError as error:
            raise PipelineError(f"{error.filename}: {error.strerror}; `make p4` compiles the program") from None
        except text_format.ParseError as error:
            raise PipelineError(f"{path}: {error}") from None
        self.schema = P4Schema(p4info, blob)
        self.config = self.schema.get_pipeline_config()

    @property
    def cookie(self) -> int:
        """The number that identifies this program."""
        return self.schema.p4cookie

    def encode(self, entries: Entries) -> list[p4r.Entity]:
        """Return members, groups and table entries as messages. Ports are left out: P4Runtime does not configure them.

        Raises
        ------
        PipelineError
            An entry does not fit the program, or a table has too many.
        """
        for name, count in Counter(entry.table for entry in entries.entries).items():
            size = _named(self.schema.tables, name, "table").size
            if count > size:
                raise PipelineError(f"table {name} holds {size} entries; {count} are too many")
        entities: list[p4r.Entity] = []
        for profile in entries.profiles:
            entities += self._profile(profile)
        return entities + [p4r.Entity(table_entry=self._table_entry(entry)) for entry in entries.entries]

    def describe(self, entity: p4r.Entity) -> str:
        """Return an entity as readable text: its table, match and action."""
        try:
            return self._described(entity)
        except (ValueError, OverflowError):  # it does not fit the program
            return text_format.MessageToString(entity, as_one_line=True)

    def _described(self, entity: p4r.Entity) -> str:
        match entity.WhichOneof("entity"):
            case "table_entry":
                return self._describe_entry(entity.table_entry)
            case "action_profile_member":
                member = entity.action_profile_member
                profile = self.schema.action_profiles[member.action_profile_id].alias
                return f"{profile} member {member.member_id}: {self._describe_action(member.action)}"
            case "action_profile_group":
                group = entity.action_profile_group
                profile = self.schema.action_profiles[group.action_profile_id].alias
                members = ", ".join(str(member.member_id) for member in group.members)
                return f"{profile} group {group.group_id}: members {members}"
            case kind:
                return str(kind)

    def _profile(self, profile: Profile) -> list[p4r.Entity]:
        known = _named(self.schema.action_profiles, profile.profile, "action profile")
        count = len(profile.members)
        if count > known.size:
            raise PipelineError(f"action profile {profile.profile} holds {known.size} members; {count} are too many")
        entities = []
        for member in profile.members:
            action = self._action(member.action, member.params)
            encoded = p4r.ActionProfileMember(action_profile_id=known.id, member_id=member.id, action=action)
            entities.append(p4r.Entity(action_profile_member=encoded))
        for group in profile.groups:
            members = [p4r.ActionProfileGroup.Member(member_id=member, weight=1) for member in sorted(group.members)]
            full = p4r.ActionProfileGroup(action_profile_id=known.id, group_id=group.id, members=members)
            entities.append(p4r.Entity(action_profile_group=full))
        return entities

    def _table_entry(self, entry: TableEntry) -> p4r.TableEntry:
        table = _named(self.schema.tables, entry.table, "table")
        for name in entry.match:
            _named(table.match_fields, name, "field", f"table {entry.table}")
        encoded = p4r.TableEntry(table_id=table.id, priority=entry.priority)
        for field in table.match_fields:
            if field.name in entry.match:
                found = _encoded_match(field, entry.match[field.name], f"{entry.table}.{field.name}")
                encoded.match.extend([] if found is None else [found])
        if entry.action is not None:
            encoded.action.action.CopyFrom(self._action(entry.action, entry.params))
        elif entry.member is not None:
            encoded.action.action_profile_member_id = entry.member
        else:
            encoded.action.action_profile_group_id = entry.group or 0
        if entry.meter is not None:
            rates = entry.meter
            meter = p4r.MeterConfig(cir=rates.cir, cburst=rates.cburst, pir=rates.pir, pburst=rates.pburst)
            encoded.meter_config.CopyFrom(meter)
        return encoded

    def _action(self, name: str, params: Mapping[str, Value]) -> p4r.Action:
        action = _named(self.schema.actions, name, "action")
        for param in params:
            _named(action.params, param, "parameter", f"action {name}")
        encoded = p4r.Action(action_id=action.id)
        for known in action.params:
            if known.name not in params:
                raise PipelineError(f"action {name}: parameter {known.name} is missing")
            try:
                encoded.params.append(known.encode_param(parse_number(params[known.name])))
            except ValueError as error:
                raise PipelineError(f"{name}.{known.name}: {error}") from None
        return encoded

    def _describe_entry(self, entry: p4r.TableEntry) -> str:
        table = self.schema.tables[entry.table_id]
        words = [table.alias]
        for match in entry.match:
            field = table.match_fields[match.field_id]
            value: Any = field.decode_field(match)
            kind = str(match.WhichOneof("field_match_type"))
            words.append(f"{field.name}={format_match(value, kind, field.bitwidth)}")
        if entry.priority:
            words.append(f"priority {entry.priority}")
        target = entry.action.WhichOneof("type")
        if target == "action":
            words.append(f"-> {self._describe_action(entry.action.action)}")
        elif target is not None:
            words.append(f"-> {target.split('_')[2]} {getattr(entry.action, target)}")
        if entry.HasField("meter_config"):
            words.append(f"at {entry.meter_config.cir} B/s, burst {entry.meter_config.cburst} B")
        return " ".join(words)

    def _describe_action(self, message: p4r.Action) -> str:
        action = self.schema.actions[message.action_id]
        params = []
        for item in message.params:
            known = action.params[item.param_id]
            value = int.from_bytes(item.value, "big")
            params.append(f"{known.name}={format_match(value, 'exact', known.bitwidth)}")
        return f"{action.alias}({', '.join(params)})"


def _named(objects: Any, name: str, kind: str, where: str = "the program") -> Any:
    """Return one of finsy's P4EntityMap; raises PipelineError with the nearest name for an unknown one."""
    found = objects.get(name)
    if found is None:
        raise PipelineError(
            f"{where} has no {kind} {name!r}{nearest(name, [getattr(item, 'alias', item.name) for item in objects])}"
        )
    return found


def _encoded_match(field: Any, value: Value, where: str) -> p4r.FieldMatch | None:
    """Return the match of one field, in P4Runtime's canonical form; None if it matches anything."""
    kind = field.match_type.name.lower()
    try:
        found = parse_match(value, kind, field.bitwidth)
        if kind == "ternary" and not isinstance(found, int):
            found = found[0] & found[1], found[1]
        if kind == "range" and found == (0, (1 << field.bitwidth) - 1):
            return None
        encoded: p4r.FieldMatch | None = field.encode_field(found)
    except KeyError:
        raise PipelineError(f"{where}: match type {kind} is not supported") from None
    except ValueError as error:
        raise PipelineError(f"{where}: {error}") from None
    return encoded


Key = tuple[str, int, int, tuple[bytes, ...]]
"""An entity's identity: its kind, table or profile, number or priority, and matches."""

BATCH_UPDATES: Final = 1000
"""Most updates in one write request: about 100 kB, well below gRPC's message limit of 4 MB."""


KINDS: Final = {p4r.Update.INSERT: "insert", p4r.Update.MODIFY: "modify", p4r.Update.DELETE: "delete"}
"""Names of the kinds of update."""


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

    phases: tuple[tuple[p4r.Update, ...], ...]
    kept: int

    def __len__(self) -> int:
        return sum(map(len, self.phases))

    def __iter__(self) -> Iterator[p4r.Update]:
        for phase in self.phases:
            yield from phase

    def counts(self) -> dict[str, int]:
        """Return the numbers of entities inserted, modified and deleted."""
        found = Counter(KINDS[update.type] for update in self)
        return {kind: found[kind] for kind in KINDS.values()}

    def batches(self, updates_max: int = BATCH_UPDATES) -> Iterator[tuple[p4r.Update, ...]]:
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
    written: dict[str, list[p4r.Update]] = {kind: [] for kind in _IDENTITY}
    freed: list[p4r.Update] = []
    deleted: dict[str, list[p4r.Update]] = {kind: [] for kind in _IDENTITY}
    kept = 0
    for entity in wanted:
        key = key_of(entity)
        old = before.pop(key, None)
        if old is None:
            written[key[0]].append(p4r.Update(type=p4r.Update.INSERT, entity=entity))
        elif _same(entity, old):
            kept += 1
        else:
            written[key[0]].append(p4r.Update(type=p4r.Update.MODIFY, entity=entity))
    for key, entity in before.items():
        (freed if _stands_alone(entity) else deleted[key[0]]).append(
            p4r.Update(type=p4r.Update.DELETE, entity=_bare(entity))
        )
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
