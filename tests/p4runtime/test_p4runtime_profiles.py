# SPDX-License-Identifier: Apache-2.0
import pytest
from finsy.proto import p4r

from tests.p4runtime.control import DELETE, INSERT, MODIFY, Code


@pytest.fixture
def members(control):
    """A controller that has written members 1 to 4 of the route selector."""
    for number in range(1, 5):
        action = control.words.action("to_next_hop", port=number, mac=number)
        control.write(INSERT, control.words.member("route_selector", number, action))
    return control


def test_members_live_and_die(control):
    words = control.words
    member = words.member("route_selector", 9, words.action("to_next_hop", port=1, mac=2))
    control.write(INSERT, member)
    assert control.read(words.member("route_selector", 0)) == [member]
    assert control.read(words.member("route_selector", 9)) == [member]
    assert control.read(words.member("route_selector", 8)) == []
    control.refuses(INSERT, member, Code.ALREADY_EXISTS)
    changed = words.member("route_selector", 9, words.action("to_next_hop", port=5, mac=2))
    control.write(MODIFY, changed)
    assert control.read(p4r.Entity(action_profile_member=p4r.ActionProfileMember())) == [changed]
    control.write(DELETE, words.member("route_selector", 9))
    assert control.read(words.member("route_selector", 0)) == []
    for kind in (MODIFY, DELETE):
        control.refuses(kind, member, Code.NOT_FOUND)


def test_members_take_actions_of_their_tables_only(control):
    words = control.words
    for action in (None, words.action("to_port", port=1), p4r.Action(action_id=1)):
        control.refuses(INSERT, words.member("route_selector", 1, action), Code.INVALID_ARGUMENT)
    unknown = words.member("route_selector", 1, words.action("to_next_hop", port=1, mac=1))
    unknown.action_profile_member.action_profile_id += 1
    control.refuses(INSERT, unknown, Code.INVALID_ARGUMENT)
    assert control.read(p4r.Entity(action_profile_member=p4r.ActionProfileMember())) == []


UNCHECKED = "simple_switch_grpc refuses @defaultonly actions in entries, but not in members"


def test_what_is_a_default_only_is_no_member(kinds):
    if not kinds.strict:
        pytest.skip(UNCHECKED)
    nothing = kinds.words.member("plain_profile", 1, kinds.words.action("NoAction"))
    kinds.refuses(INSERT, nothing, Code.PERMISSION_DENIED, saying="NoAction cannot be a member")


def test_no_member_does_nothing(members):
    """It would send whatever chooses it to port 0."""
    if not members.strict:
        pytest.skip(UNCHECKED)
    words = members.words
    for kind, number in ((INSERT, 9), (MODIFY, 1)):
        nothing = words.member("route_selector", number, words.action("NoAction"))
        members.refuses(kind, nothing, Code.PERMISSION_DENIED, saying="NoAction cannot be a member")
    assert len(members.read(words.member("route_selector", 0))) == 4


def test_groups_have_weights(members):
    words = members.words
    group = words.group("route_selector", 3, {1: 2, 4: 1, 2: 5}, max_size=9)
    members.write(INSERT, group)
    expected = words.group("route_selector", 3, {1: 2, 2: 5, 4: 1}, max_size=9)
    assert members.read(words.group("route_selector", 3, {})) == [expected]
    members.refuses(INSERT, group, Code.ALREADY_EXISTS)
    members.write(MODIFY, words.group("route_selector", 3, {3: 1, 1: 3}))
    expected = words.group("route_selector", 3, {1: 3, 3: 1}, max_size=9)
    assert members.read(p4r.Entity(action_profile_group=p4r.ActionProfileGroup())) == [expected]
    members.write(DELETE, words.group("route_selector", 3, {}))
    assert members.read(words.group("route_selector", 0, {})) == []
    for kind in (MODIFY, DELETE):
        members.refuses(kind, words.group("route_selector", 3, {1: 1}), Code.NOT_FOUND)


def test_groups_are_no_larger_than_they_were_to_be(members):
    words = members.words
    members.write(INSERT, words.group("route_selector", 3, {1: 1}, max_size=4))
    members.refuses(MODIFY, words.group("route_selector", 3, {1: 5}), Code.RESOURCE_EXHAUSTED)
    members.refuses(MODIFY, words.group("route_selector", 3, {1: 1}, max_size=5), Code.INVALID_ARGUMENT)
    members.refuses(INSERT, words.group("route_selector", 4, {1: 1}, max_size=-1), Code.INVALID_ARGUMENT)
    assert members.read(words.group("route_selector", 0, {})) == [words.group("route_selector", 3, {1: 1}, max_size=4)]


def test_what_a_group_cannot_have(members):
    words = members.words
    members.write(INSERT, words.group("route_selector", 3, {1: 1}))
    before = members.state()
    twice = words.group("route_selector", 3, {1: 1})
    twice.action_profile_group.members.add(member_id=1, weight=1)
    for group, code in (
        (words.group("route_selector", 3, {9: 1}), Code.NOT_FOUND),
        (words.group("route_selector", 3, {2: 0}), Code.INVALID_ARGUMENT),
        (words.group("route_selector", 3, {2: -1}), Code.INVALID_ARGUMENT),
        (twice, Code.INVALID_ARGUMENT),
    ):
        members.refuses(MODIFY, group, code)
    assert members.state() == before


def test_what_is_in_use_stays(members):
    words = members.words
    members.write(INSERT, words.group("route_selector", 3, {1: 1, 2: 2}))
    members.write(INSERT, words.entry("ipv4_route", {"ipv4_dst": (0, 1)}, ("group", 3)))
    members.write(INSERT, words.entry("ipv4_route", {"ipv4_dst": (1, 32)}, ("member", 4)))
    before = members.state()
    members.refuses(DELETE, words.member("route_selector", 1), Code.FAILED_PRECONDITION)
    members.refuses(DELETE, words.member("route_selector", 4), Code.FAILED_PRECONDITION)
    members.refuses(DELETE, words.group("route_selector", 3, {}), Code.FAILED_PRECONDITION)
    assert members.state() == before
    members.write(MODIFY, words.entry("ipv4_route", {"ipv4_dst": (0, 1)}, ("member", 3)))
    members.write(DELETE, words.entry("ipv4_route", {"ipv4_dst": (1, 32)}))
    members.write(DELETE, words.group("route_selector", 3, {}))
    members.write(DELETE, *(words.member("route_selector", number) for number in (1, 2, 4)))
    assert len(members.read(words.member("route_selector", 0))) == 1


def test_entries_refer_to_what_is_there(members):
    words = members.words
    for target, code in (
        (("member", 9), Code.NOT_FOUND),
        (("group", 9), Code.NOT_FOUND),
        (words.action("to_next_hop", port=1, mac=1), Code.INVALID_ARGUMENT),
        (None, Code.INVALID_ARGUMENT),
    ):
        entry = words.entry("ipv4_route", {"ipv4_dst": (1, 32)}, target)
        members.refuses(INSERT, entry, code, Code.INVALID_ARGUMENT)
    direct = words.entry("ethernet_route", {"ethernet_dst": 1}, ("member", 1))
    members.refuses(INSERT, direct, Code.INVALID_ARGUMENT)
    members.write(INSERT, words.group("route_selector", 5, {}))
    empty = words.entry("ipv4_route", {"ipv4_dst": (1, 32)}, ("group", 5))
    members.refuses(INSERT, empty, Code.FAILED_PRECONDITION)
    assert members.entries("ipv4_route") == []


def test_a_group_that_entries_use_cannot_be_emptied(members):
    if not members.strict:
        pytest.skip("simple_switch_grpc empties it, and divides by zero at the next packet")
    words = members.words
    members.write(INSERT, words.group("route_selector", 3, {1: 1}))
    members.write(INSERT, words.entry("ipv4_route", {"ipv4_dst": (1, 32)}, ("group", 3)))
    members.refuses(MODIFY, words.group("route_selector", 3, {}), Code.FAILED_PRECONDITION)


def test_ports_are_not_watched(members):
    if not members.strict:
        pytest.skip("simple_switch_grpc watches ports")
    group = members.words.group("route_selector", 3, {1: 1})
    group.action_profile_group.members[0].watch_port = b"\1"
    members.refuses(INSERT, group, Code.UNIMPLEMENTED)


def test_a_profile_without_a_selector_has_no_groups(kinds):
    words = kinds.words
    kinds.write(INSERT, words.member("plain_profile", 1, words.action("send", port=1)))
    if kinds.strict:
        kinds.refuses(INSERT, words.group("plain_profile", 1, {1: 1}), Code.INVALID_ARGUMENT)
    kinds.write(INSERT, words.entry("profiled", {"src": 1}, ("member", 1)))
    (default,) = kinds.entries("profiled", is_default_action=True)
    assert not default.HasField("action")
