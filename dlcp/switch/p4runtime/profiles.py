# SPDX-License-Identifier: Apache-2.0
"""Members and groups of action profiles."""

from collections.abc import Iterator

from finsy.proto import p4r

from dlcp.switch.p4runtime.matches import read_action, write_action
from dlcp.switch.p4runtime.refusal import INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, Refused
from dlcp.switch.p4runtime.schema import ProfileInfo, Schema
from dlcp.switch.p4runtime.tables import DELETE, INSERT, Change


class ProfileEntries:
    """The members and groups of one action profile."""

    def __init__(self, info: ProfileInfo) -> None:
        self.info, self.profile = info, info.profile
        self.where = f"action profile {info.name}"
        self._by_name = {action.name: action for action in info.actions.values()}
        self._sizes: dict[int, int] = {}
        """What each group's ``max_size`` was when it was made."""

    def change_member(self, kind: int, item: p4r.ActionProfileMember) -> Change:
        """Return the change that an update asks for; raises Refused."""
        number = item.member_id
        if not number:
            raise Refused(INVALID_ARGUMENT, f"{self.where}: a member has a number above 0")
        if kind == DELETE:
            return lambda: self.profile.delete_member(number)
        action = read_action(self.info.actions, item.action, self.where)
        if kind == INSERT:
            return lambda: self.profile.add_member(number, action)
        return lambda: self.profile.modify_member(number, action)

    def change_group(self, kind: int, item: p4r.ActionProfileGroup) -> Change:
        """Return the change that an update asks for; raises Refused."""
        number, size = item.group_id, item.max_size
        if not number:
            raise Refused(INVALID_ARGUMENT, f"{self.where}: a group has a number above 0")
        if kind == DELETE:
            return lambda: self._delete(number)
        weights = self._weights(item)
        limit = self.info.group_size_max
        if kind == INSERT:
            if size < 0 or (limit and size > limit):
                raise Refused(INVALID_ARGUMENT, f"{self.where}: max_size is {size}; give 0..{limit or 'any'}")
            return lambda: self._insert(number, size, weights)
        return lambda: self._modify(number, size, weights)

    def _weights(self, item: p4r.ActionProfileGroup) -> dict[int, int]:
        weights: dict[int, int] = {}
        for member in item.members:
            if member.weight < 1:
                raise Refused(INVALID_ARGUMENT, f"{self.where}: member {member.member_id} weighs {member.weight}")
            if member.member_id in weights:
                raise Refused(INVALID_ARGUMENT, f"{self.where}: member {member.member_id} is named twice; give weights")
            if member.WhichOneof("watch_kind"):
                raise Refused(UNIMPLEMENTED, f"{self.where}: ports are not watched; leave watch_port out")
            weights[member.member_id] = member.weight
        return weights

    def _insert(self, number: int, size: int, weights: dict[int, int]) -> None:
        self._room(number, size, weights)
        self.profile.add_group(number, weights)
        self._sizes[number] = size

    def _modify(self, number: int, size: int, weights: dict[int, int]) -> None:
        if not self.profile.has_group(number):
            raise Refused(NOT_FOUND, f"{self.where} has no group {number}")
        before = self._sizes.get(number, 0)
        # As in PI, a size that is left out means the one there is.
        if size not in (0, before):
            raise Refused(INVALID_ARGUMENT, f"{self.where}: max_size of group {number} cannot become {size}")
        self._room(number, before, weights)
        self.profile.modify_group(number, weights)

    def _delete(self, number: int) -> None:
        self.profile.delete_group(number)
        self._sizes.pop(number, None)

    def _room(self, number: int, size: int, weights: dict[int, int]) -> None:
        limit = size or self.info.group_size_max
        if limit and sum(weights.values()) > limit:
            raise Refused(RESOURCE_EXHAUSTED, f"{self.where}: group {number} holds {limit} members by weight at most")

    def read_members(self, wanted: p4r.ActionProfileMember) -> Iterator[p4r.Entity]:
        """Return one member, or all for number 0."""
        for number, action in self.profile.members().items():
            if wanted.member_id in (0, number):
                entity = p4r.Entity()
                message = entity.action_profile_member
                message.action_profile_id, message.member_id = self.info.id, number
                info = self._by_name[self.profile.actions.full_name(action.name)]
                write_action(info, action, message.action)
                yield entity

    def read_groups(self, wanted: p4r.ActionProfileGroup) -> Iterator[p4r.Entity]:
        """Return one group, or all for number 0."""
        for number, weights in self.profile.weights().items():
            if wanted.group_id in (0, number):
                entity = p4r.Entity()
                message = entity.action_profile_group
                message.action_profile_id, message.group_id = self.info.id, number
                message.max_size = self._sizes.get(number, 0)
                for member, weight in sorted(weights.items()):
                    message.members.add(member_id=member, weight=weight)
                yield entity


class Profiles:
    """All action profiles, as ``action_profile_member`` and ``action_profile_group``."""

    def __init__(self, schema: Schema) -> None:
        self._profiles = {number: ProfileEntries(info) for number, info in schema.profiles.items()}

    def change_member(self, kind: int, item: p4r.ActionProfileMember) -> Change:
        """Return the change that an update asks for; raises Refused."""
        return self._profile(item.action_profile_id).change_member(kind, item)

    def change_group(self, kind: int, item: p4r.ActionProfileGroup) -> Change:
        """Return the change that an update asks for; raises Refused."""
        return self._profile(item.action_profile_id).change_group(kind, item)

    def read_members(self, wanted: p4r.ActionProfileMember) -> Iterator[p4r.Entity]:
        """Return the members that a request selects; raises Refused."""
        for profile in self._chosen(wanted.action_profile_id):
            yield from profile.read_members(wanted)

    def read_groups(self, wanted: p4r.ActionProfileGroup) -> Iterator[p4r.Entity]:
        """Return the groups that a request selects; raises Refused."""
        for profile in self._chosen(wanted.action_profile_id):
            yield from profile.read_groups(wanted)

    def _chosen(self, number: int) -> list[ProfileEntries]:
        return [self._profile(number)] if number else list(self._profiles.values())

    def _profile(self, number: int) -> ProfileEntries:
        found = self._profiles.get(number)
        if found is None:
            known = ", ".join(f"{key} ({item.info.name})" for key, item in self._profiles.items())
            raise Refused(INVALID_ARGUMENT, f"no action profile {number}; there are {known or 'none'}")
        return found
