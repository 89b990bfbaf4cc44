# SPDX-License-Identifier: Apache-2.0
import random
from dataclasses import replace

import pytest
from finsy.proto import p4r

from dlcp.controller.compiled_program import CompiledProgram, PipelineError, difference, key_of
from dlcp.switch import Action, Entries, GroupRef, MeterConfig, Profile, TableEntry

ROUTE = TableEntry("ipv4_route", {"ipv4_dst": (0x0A00014D, 24)}, GroupRef(3))
SHARE = TableEntry(
    "job_share",
    {"job": 7, "control": 0, "eg_port": 300},
    Action("metered"),
    meter=MeterConfig(1000, 200, 1000, 200),
)
CLASSIFY = TableEntry(
    "classify", {"job": (0x1F, 0xF0), "type": (1, 0xF)}, Action("set_class", {"queue": 3, "drop_class": 0}), 4
)
PROFILE = Profile(
    "route_selector",
    ((1, Action("to_next_hop", {"port": 1, "mac": 0x020000000001})),),
    ((3, (2, 1)),),
)
EVERYTHING = Entries((PROFILE,), entries=(ROUTE, SHARE, CLASSIFY))


def test_what_is_encoded_reads_as_it_was_written(pipeline):
    assert [pipeline.describe(entity) for entity in pipeline.encode(EVERYTHING)] == [
        "route_selector member 1: to_next_hop(port=1, mac=02:00:00:00:00:01)",
        "route_selector group 3: members 1, 2",
        "ipv4_route ipv4_dst=10.0.1.0/24 -> group 3",
        "job_share job=7 control=0 eg_port=300 -> metered() at 1000 B/s, burst 200 B",
        "classify job=16&&&0xf0 type=1 priority 4 -> set_class(queue=3, drop_class=0)",
    ]


def test_numbers_are_as_short_as_p4runtime_wants_them(pipeline):
    *_, share, classify = (entity.table_entry for entity in pipeline.encode(EVERYTHING))
    assert [match.exact.value for match in share.match] == [b"\x07", b"\x00", b"\x01\x2c"]
    job, kind = (match.ternary for match in classify.match)
    assert (job.value, job.mask) == (b"\x10", b"\xf0")
    assert (kind.value, kind.mask) == (b"\x01", b"\x0f")


def test_fields_that_match_anything_are_left_out(pipeline):
    entry = TableEntry("classify", {"job": (0, 0)}, Action("as_tagged"), 1)
    default = TableEntry("ipv4_route", {"ipv4_dst": (0, 0)}, GroupRef(1))
    assert [list(entity.table_entry.match) for entity in pipeline.encode(Entries(entries=(entry, default)))] == [[], []]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (replace(ROUTE, table="ipv4_rout"), "named 'ipv4_rout'. Did you mean 'ipv4_route'"),
        (replace(ROUTE, match={"ip_dst": 1}), "ipv4_route': Match field 'ip_dst': .* Did you mean 'ipv4_dst'"),
        (replace(SHARE, target=Action("meter")), "named 'meter'. Did you mean 'metered'"),
        (
            replace(CLASSIFY, target=Action("set_class", {"queue": 3})),
            "action set_class: parameter drop_class is missing",
        ),
        (replace(CLASSIFY, target=Action("set_class")), "action set_class: parameter queue is missing"),
        (
            replace(CLASSIFY, target=Action("set_class", {"queue": 8, "drop_class": 0})),
            "set_class.queue: .*bitwidth 3: 8",
        ),
        (replace(CLASSIFY, target=Action("set_class", {"queues": 8})), "'set_class': .*'queues'. Did you mean 'queue'"),
        (replace(SHARE, match={"job": 1 << 16}), "job_share': Match field 'job': .*bitwidth 16: 65536"),
    ],
)
def test_entries_that_do_not_fit_the_program_are_refused(pipeline, entry, says):
    with pytest.raises(PipelineError, match=says):
        pipeline.encode(Entries(entries=(entry,)))


def test_more_than_a_table_holds_is_refused(pipeline):
    trust = tuple(TableEntry("port_trust", {"ig_port": port}, Action("trust")) for port in range(65))
    pipeline.encode(Entries(entries=trust[:64]))
    with pytest.raises(PipelineError, match="table port_trust holds 64 entries; 65 are too many"):
        pipeline.encode(Entries(entries=trust))
    members = tuple((number, Action("to_next_hop", {"port": 1, "mac": 1})) for number in range(1025))
    with pytest.raises(PipelineError, match="route_selector holds 1024 members; 1025 are too many"):
        pipeline.encode(Entries((Profile("route_selector", members),)))


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PipelineError, match=r"dlcp.json: No such file"):
        CompiledProgram(tmp_path)
    (tmp_path / "dlcp.json").write_text("{}")
    (tmp_path / "dlcp.p4info.txtpb").write_text("tables { nonsense: 3 }")
    with pytest.raises(PipelineError, match=r"dlcp.p4info.txtpb: 1:\d+"):
        CompiledProgram(tmp_path)


def test_another_program_has_another_cookie(pipeline, tmp_path):
    for name, data in (("dlcp.json", pipeline.config.p4_device_config), ("dlcp.p4info.txtpb", b"")):
        (tmp_path / name).write_bytes(data)
    assert CompiledProgram(tmp_path).cookie != pipeline.cookie == CompiledProgram().cookie


def test_what_the_switch_adds_by_itself_is_no_difference(pipeline):
    ours = pipeline.encode(EVERYTHING)
    theirs = []
    for entity in reversed(ours):
        told = p4r.Entity()
        told.CopyFrom(entity)
        if told.HasField("table_entry"):
            told.table_entry.counter_data.packet_count = 9
            told.table_entry.time_since_last_hit.elapsed_ns = 5
            fields = list(told.table_entry.match)[::-1]
            del told.table_entry.match[:]
            told.table_entry.match.extend(fields)
        if told.HasField("action_profile_group"):
            told.action_profile_group.max_size = 16
            members = list(told.action_profile_group.members)[::-1]
            del told.action_profile_group.members[:]
            told.action_profile_group.members.extend(members)
        theirs.append(told)
    found = difference(ours, theirs)
    assert len(found) == 0
    assert found.kept == len(ours)


def test_a_meter_that_was_not_asked_for_is_let_be_and_one_that_differs_is_set(pipeline):
    asked = pipeline.encode(Entries(entries=(SHARE,)))
    unasked = pipeline.encode(Entries(entries=(replace(SHARE, meter=None),)))
    assert len(difference(unasked, asked)) == 0
    [change] = difference(asked, unasked)
    assert change.type == p4r.Update.MODIFY


def test_what_a_difference_says_makes_the_switch_right_whatever_it_held(pipeline):
    """Random states before and after: the changes, made one by one in their order, never refer to what is not there."""
    for seed in range(40):
        draw = random.Random(seed)
        before, after = (pipeline.encode(random_entries(draw)) for _ in range(2))
        held = {key_of(entity): entity for entity in before}
        for batch in difference(after, before).batches(updates_max=3):
            assert 1 <= len(batch) <= 3
            for change in batch:
                key = key_of(change.entity)
                assert (key in held) == (change.type != p4r.Update.INSERT)
                if change.type == p4r.Update.DELETE:
                    del held[key]
                else:
                    held[key] = change.entity
                assert not dangling(held.values())
        assert held == {key_of(entity): entity for entity in after}


def test_a_full_table_is_emptied_before_it_is_filled_again(pipeline):
    jobs = [
        tuple(
            TableEntry("job_share", {"job": job, "control": 0, "eg_port": 1}, Action("metered"))
            for job in range(first, first + 8192)
        )
        for first in (0, 8192)
    ]
    before, after = (pipeline.encode(Entries(entries=entries)) for entries in jobs)
    held = 8192
    for change in difference(after, before):
        held += {p4r.Update.INSERT: 1, p4r.Update.MODIFY: 0, p4r.Update.DELETE: -1}[change.type]
        assert held <= 8192
    assert held == 8192


def random_entries(draw):
    members = draw.sample(range(1, 9), draw.randint(1, 5))
    groups = [
        (number, tuple(draw.sample(members, draw.randint(1, len(members))))) for number in draw.sample(range(1, 9), 3)
    ]
    profile = Profile(
        "route_selector",
        tuple((member, Action("to_next_hop", {"port": draw.randint(1, 3), "mac": 5})) for member in members),
        tuple(groups),
    )
    routes = tuple(
        TableEntry("ipv4_route", {"ipv4_dst": (0x0A000000 + host, 32)}, GroupRef(draw.choice(groups)[0]))
        for host in draw.sample(range(1, 9), 4)
    )
    return Entries((profile,), entries=routes)


def dangling(entities):
    held = list(entities)
    members = {entity.action_profile_member.member_id for entity in held if entity.HasField("action_profile_member")}
    groups = {entity.action_profile_group.group_id for entity in held if entity.HasField("action_profile_group")}
    return [
        entity
        for entity in held
        if (entity.HasField("table_entry") and entity.table_entry.action.action_profile_group_id not in groups)
        or any(member.member_id not in members for member in entity.action_profile_group.members)
    ]
