# SPDX-License-Identifier: Apache-2.0
"""What has to be written to a switch so that it holds what it should, and nothing else."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from finsy.proto import p4r

Key = tuple[str, int, int, tuple[bytes, ...]]
"""What tells an entity from others: its kind, table or profile, number or priority, and matches."""

BATCH_UPDATES: Final = 1000
"""Updates in one write request. Chosen by us: some 100 kB, well below gRPC's limit of 4 MB for a message."""


class Action(Enum):
    """What is done to an entity."""

    INSERT = "insert"
    MODIFY = "modify"
    DELETE = "delete"


class Change(NamedTuple):
    """One entity and what is done to it."""

    action: Action
    entity: p4r.Entity


@dataclass(frozen=True)
class Difference:
    """Changes in the order in which they have to be written.

    Parameters
    ----------
    phases
        Changes of one phase may take effect in any order, as P4Runtime has it within one request. What is referred to
        is there before what refers to it, and goes after it.
    kept
        How many entities are right already.
    """

    phases: tuple[tuple[Change, ...], ...]
    kept: int

    def __len__(self) -> int:
        return sum(map(len, self.phases))

    def __iter__(self) -> Iterator[Change]:
        for phase in self.phases:
            yield from phase

    def counts(self) -> dict[str, int]:
        """Return how many entities are inserted, modified and deleted."""
        found = {action.value: 0 for action in Action}
        for change in self:
            found[change.action.value] += 1
        return found

    def batches(self, updates_max: int = BATCH_UPDATES) -> Iterator[tuple[Change, ...]]:
        """Return the changes in groups, one for each write request."""
        for phase in self.phases:
            for start in range(0, len(phase), updates_max):
                yield phase[start : start + updates_max]


_REFERRED_FIRST: Final = ("action_profile_member", "action_profile_group", "table_entry")


def difference(wanted: Iterable[p4r.Entity], found: Iterable[p4r.Entity]) -> Difference:
    """Return what turns ``found`` into ``wanted``.

    Counters, hit times and other things that a switch tells of an entry without having been told do not count.
    """
    before = {key_of(entity): entity for entity in found}
    written: dict[str, list[Change]] = {kind: [] for kind in _REFERRED_FIRST}
    freed: list[Change] = []
    deleted: dict[str, list[Change]] = {kind: [] for kind in _REFERRED_FIRST}
    kept = 0
    for entity in wanted:
        key = key_of(entity)
        old = before.pop(key, None)
        if old is None:
            written[key[0]].append(Change(Action.INSERT, entity))
        elif _same(entity, old):
            kept += 1
        else:
            written[key[0]].append(Change(Action.MODIFY, entity))
    for key, entity in before.items():
        (freed if _stands_alone(entity) else deleted[key[0]]).append(Change(Action.DELETE, _bare(entity)))
    phases = [freed, *(written[kind] for kind in _REFERRED_FIRST)]
    phases += [deleted[kind] for kind in reversed(_REFERRED_FIRST)]
    return Difference(tuple(tuple(phase) for phase in phases if phase), kept)


def key_of(entity: p4r.Entity) -> Key:
    """Return what tells an entity from others.

    Raises
    ------
    ValueError
        It is none of those that a fabric needs.
    """
    kind = entity.WhichOneof("entity")
    if kind == "table_entry":
        entry = entity.table_entry
        matches = tuple(sorted(match.SerializeToString(deterministic=True) for match in entry.match))
        return kind, entry.table_id, entry.priority, matches
    if kind == "action_profile_member":
        member = entity.action_profile_member
        return kind, member.action_profile_id, member.member_id, ()
    if kind == "action_profile_group":
        group = entity.action_profile_group
        return kind, group.action_profile_id, group.group_id, ()
    raise ValueError(f"{kind} is not an entity that a fabric writes")


def _same(wanted: p4r.Entity, found: p4r.Entity) -> bool:
    """Say whether an entity does what it should. A meter that nobody asked for does not count."""
    kind = wanted.WhichOneof("entity")
    if kind == "table_entry":
        ours, theirs = wanted.table_entry, found.table_entry
        if ours.HasField("meter_config") and ours.meter_config != theirs.meter_config:
            return False
        return bool(ours.action == theirs.action)
    if kind == "action_profile_member":
        return bool(wanted.action_profile_member.action == found.action_profile_member.action)
    return _members(wanted.action_profile_group) == _members(found.action_profile_group)


def _stands_alone(entity: p4r.Entity) -> bool:
    """Say whether no other entry can take the place of one: it can go first, which makes room in a full table.

    Of routes a shorter prefix may take over, so what replaces one has to be there before it goes.
    """
    matches = entity.table_entry.match
    return bool(matches) and all(match.WhichOneof("field_match_type") == "exact" for match in matches)


def _members(group: p4r.ActionProfileGroup) -> list[tuple[int, int]]:
    return sorted((member.member_id, member.weight) for member in group.members)


def _bare(entity: p4r.Entity) -> p4r.Entity:
    """Return an entity with nothing but what tells it from others, which is all that a deletion may hold."""
    kind = entity.WhichOneof("entity")
    if kind == "table_entry":
        entry = entity.table_entry
        return p4r.Entity(
            table_entry=p4r.TableEntry(table_id=entry.table_id, match=entry.match, priority=entry.priority)
        )
    if kind == "action_profile_member":
        member = entity.action_profile_member
        bare = p4r.ActionProfileMember(action_profile_id=member.action_profile_id, member_id=member.member_id)
        return p4r.Entity(action_profile_member=bare)
    group = entity.action_profile_group
    return p4r.Entity(
        action_profile_group=p4r.ActionProfileGroup(action_profile_id=group.action_profile_id, group_id=group.group_id)
    )
