# SPDX-License-Identifier: Apache-2.0
"""The compiled program as P4Runtime messages.

This module encodes entries as messages, describes messages as text, and computes the difference of two sets of
messages: the changes to write, in an order that a switch accepts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from finsy import (
    P4ActionProfileGroup,
    P4ActionProfileMember,
    P4IndirectAction,
    P4Member,
    P4MeterConfig,
    P4Schema,
    P4TableAction,
    P4TableEntry,
    P4TableMatch,
)
from finsy.p4schema import P4MatchType
from finsy.proto import p4i, p4r
from google.protobuf import text_format

from dlcp.switch import PROGRAM_FOLDER, Action, Entries, GroupRef, MemberRef, TableEntry, format_match


class PipelineError(ValueError):
    """A program that cannot be read, or an entry that does not fit it; the message names it and the reason."""


class CompiledProgram:
    """A compiled program.

    Parameters
    ----------
    folder
        Holds ``dlcp.json`` and ``dlcp.p4info.txtpb``.

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

    def __init__(self, folder: Path = PROGRAM_FOLDER) -> None:
        path = folder / "dlcp.p4info.txtpb"
        try:
            blob = (folder / "dlcp.json").read_bytes()
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
        try:
            for name, count in Counter(entry.table for entry in entries.entries).items():
                _check_size(f"table {name}", self.schema.tables[name].size, count, "entries")
            for profile in entries.profiles:
                size = self.schema.action_profiles[profile.profile].size
                _check_size(f"action profile {profile.profile}", size, len(profile.members), "members")
            return [entity.encode(self.schema) for entity in self._entities(entries)]
        except ValueError as error:
            raise PipelineError(str(error)) from None

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
                action = P4TableAction.decode_action(member.action, self.schema)
                return f"{profile} member {member.member_id}: {self._describe_action(action)}"
            case "action_profile_group":
                group = entity.action_profile_group
                profile = self.schema.action_profiles[group.action_profile_id].alias
                members = ", ".join(str(member.member_id) for member in group.members)
                return f"{profile} group {group.group_id}: members {members}"
            case kind:
                return str(kind)

    def _describe_entry(self, message: p4r.TableEntry) -> str:
        table = self.schema.tables[message.table_id]
        entry = P4TableEntry.decode_entry(message, self.schema)
        words = [table.alias]
        for name, value in (entry.match or {}).items():
            field = table.match_fields[name]
            kind = cast(P4MatchType, field.match_type).name.lower()
            words.append(f"{name}={format_match(value, kind, field.bitwidth)}")
        if entry.priority:
            words.append(f"priority {entry.priority}")
        match entry.action:
            case P4TableAction() as action:
                words.append(f"-> {self._describe_action(action)}")
            case P4IndirectAction(group_id=None) as action:
                words.append(f"-> member {action.member_id}")
            case P4IndirectAction() as action:
                words.append(f"-> group {action.group_id}")
        if entry.meter_config:
            words.append(f"at {entry.meter_config.cir} B/s, burst {entry.meter_config.cburst} B")
        return " ".join(words)

    def _describe_action(self, action: P4TableAction) -> str:
        known = self.schema.actions[action.name].params
        params = (f"{name}={format_match(value, 'exact', known[name].bitwidth)}" for name, value in action.args.items())
        return f"{action.name}({', '.join(params)})"

    def _entities(self, entries: Entries) -> Iterator[P4ActionProfileMember | P4ActionProfileGroup | P4TableEntry]:
        for profile in entries.profiles:
            for number, action in profile.members:
                yield P4ActionProfileMember(profile.profile, member_id=number, action=self._action(action))
            for number, members in profile.groups:
                weighted = [P4Member(member, weight=weight) for member, weight in sorted(Counter(members).items())]
                yield P4ActionProfileGroup(profile.profile, group_id=number, members=weighted)
        for entry in entries.entries:
            match entry.target:
                case Action() as action:
                    target: P4TableAction | P4IndirectAction = self._action(action)
                case MemberRef(number):
                    target = P4IndirectAction(member_id=number)
                case GroupRef(number):
                    target = P4IndirectAction(group_id=number)
            meter = P4MeterConfig(**asdict(entry.meter)) if entry.meter else None
            match = P4TableMatch(self._canonical(entry))
            yield P4TableEntry(entry.table, match=match, action=target, priority=entry.priority, meter_config=meter)

    def _action(self, action: Action) -> P4TableAction:
        """Return finsy's form of an action. finsy reports unknown parameters, but not missing ones."""
        known = {param.name: param for param in self.schema.actions[action.name].params}
        if action.params.keys() < known.keys():
            missing = next(name for name in known if name not in action.params)
            raise ValueError(f"action {action.name}: parameter {missing} is missing")
        for name in action.params.keys() & known.keys():
            try:
                known[name].encode_param(action.params[name])
            except ValueError as error:
                raise ValueError(f"{action.name}.{name}: {error}") from None
        return P4TableAction(action.name, **action.params)

    def _canonical(self, entry: TableEntry) -> dict[str, Any]:
        """Return an entry's match with no bits outside of ternary masks, as P4Runtime requires."""
        fields = self.schema.tables[entry.table].match_fields
        ternary = {field.name for field in fields if field.match_type is P4MatchType.TERNARY}
        return {
            name: (value[0] & value[1], value[1]) if name in ternary and isinstance(value, tuple) else value
            for name, value in entry.match.items()
        }


def _check_size(where: str, size: int, count: int, what: str) -> None:
    if count > size:
        raise ValueError(f"{where} holds {size} {what}; {count} are too many")


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
