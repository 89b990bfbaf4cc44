# SPDX-License-Identifier: Apache-2.0
import pytest
from finsy.proto import p4r

from tests.p4runtime.control import DELETE, INSERT, MODIFY, Code, encode

METER = {"cir": 12_500_000, "cburst": 50_000, "pir": 12_500_001, "pburst": 60_000}


def matched(entry):
    """Return the parts of a match by field number."""
    return {item.field_id: getattr(item, item.WhichOneof("field_match_type")) for item in entry.match}


def test_an_exact_entry_lives_and_dies(control):
    words = control.words
    entry = words.entry("ethernet_route", {"ethernet_dst": 0x0200_0000_0001}, words.action("to_port", port=257))
    control.write(INSERT, entry)
    assert control.entries("ethernet_route") == [entry.table_entry]
    control.refuses(INSERT, entry, Code.ALREADY_EXISTS)
    other = words.entry("ethernet_route", {"ethernet_dst": 0x0200_0000_0001}, words.action("no_route"))
    control.write(MODIFY, other)
    assert control.entries("ethernet_route") == [other.table_entry]
    control.write(DELETE, words.entry("ethernet_route", {"ethernet_dst": 0x0200_0000_0001}))
    assert control.entries("ethernet_route") == []
    control.refuses(DELETE, entry, Code.NOT_FOUND)
    control.refuses(MODIFY, entry, Code.NOT_FOUND)


def test_values_are_canonical_whatever_was_written(control):
    words = control.words
    entry = words.entry("ethernet_route", {"ethernet_dst": 5}, words.action("to_port", port=3))
    entry.table_entry.match[0].exact.value = bytes(12) + b"\5"
    entry.table_entry.action.action.params[0].value = b"\0\0\3"
    control.write(INSERT, entry)
    (found,) = control.entries("ethernet_route")
    assert found.match[0].exact.value == b"\5"
    assert found.action.action.params[0].value == b"\3"
    zero = words.entry("ethernet_route", {"ethernet_dst": 0}, words.action("to_port", port=0))
    control.refuses(INSERT, zero, Code.OK)
    assert zero.table_entry in control.entries("ethernet_route")


def test_prefixes(control):
    words = control.words
    control.write(INSERT, words.member("route_selector", 1, words.action("to_next_hop", port=1, mac=2)))
    entries = [
        words.entry("ipv4_route", match, ("member", 1))
        for match in ({}, {"ipv4_dst": (0x0A000000, 8)}, {"ipv4_dst": (0x0A000001, 32)}, {"ipv4_dst": (0x80000000, 1)})
    ]
    control.write(INSERT, *entries)
    found = control.entries("ipv4_route")
    assert len(found) == 4
    assert all(entry.table_entry in found for entry in entries)
    for value, length in ((0x0A000001, 24), (0, 0), (1, 33), (1, -1), (0x0A000000, 4)):
        wrong = words.entry("ipv4_route", {"ipv4_dst": (value, length)}, ("member", 1))
        control.refuses(INSERT, wrong, Code.INVALID_ARGUMENT)


def test_ternary_entries_have_priorities(control):
    words = control.words
    action = words.action("set_class", queue=3, drop_class=0)
    entries = [
        words.entry("classify", {"job": (5, 0xFFFF)}, action, priority=1),
        words.entry("classify", {"job": (5, 0xFFFF)}, action, priority=2),
        words.entry("classify", {"type": (1, 3), "queue": (7, 7)}, action, priority=2_000_000_000),
        words.entry("classify", {}, words.action("as_tagged"), priority=1),
    ]
    control.write(INSERT, *entries)
    found = control.entries("classify")
    assert len(found) == 4
    assert all(entry.table_entry in found for entry in entries)
    control.refuses(INSERT, entries[0], Code.ALREADY_EXISTS)
    for match, priority in (
        ({"job": (5, 0xFF)}, 0),
        ({"job": (5, 0xFF)}, -1),
        ({"job": (6, 1)}, 3),
        ({"job": (0, 0)}, 3),
    ):
        wrong = words.entry("classify", match, action, priority=priority)
        control.refuses(INSERT, wrong, Code.INVALID_ARGUMENT)
    prioritised = words.entry("ethernet_route", {"ethernet_dst": 1}, words.action("no_route"), priority=1)
    control.refuses(INSERT, prioritised, Code.INVALID_ARGUMENT)
    control.write(DELETE, entries[1])
    assert entries[0].table_entry in control.entries("classify")
    assert entries[1].table_entry not in control.entries("classify")


def test_ranges(kinds):
    words = kinds.words
    action = words.action("send", port=1)
    entries = [
        words.entry("ranged", {"type": (5, 600), "ig_port": 1}, action, priority=1),
        words.entry("ranged", {"type": (5, 5), "ig_port": 1}, action, priority=1),
        words.entry("ranged", {"ig_port": 2}, action, priority=7),
    ]
    kinds.write(INSERT, *entries)
    found = kinds.entries("ranged")
    assert len(found) == 3
    assert all(entry.table_entry in found for entry in entries)
    wrong = words.entry("ranged", {"type": (6, 5), "ig_port": 1}, action, priority=1)
    kinds.refuses(INSERT, wrong, Code.INVALID_ARGUMENT)
    wide = words.entry("ranged", {"ig_port": 3}, action, priority=1)
    part = wide.table_entry.match.add(field_id=1).range
    part.low, part.high = b"\0\0", b"\xff\xff"
    kinds.refuses(INSERT, wide, Code.INVALID_ARGUMENT)


def test_optional_fields(kinds):
    words = kinds.words
    action = words.action("send", port=1)
    entries = [
        words.entry("optioned", {"type": 0x800}, action, priority=1),
        words.entry("optioned", {}, action, priority=1),
        words.entry("optioned", {"type": 0, "ig_port": (3, 0x1FF)}, action, priority=2),
    ]
    kinds.write(INSERT, *entries)
    found = kinds.entries("optioned")
    assert len(found) == 3
    assert all(entry.table_entry in found for entry in entries)
    exact = words.entry("optioned", {}, action, priority=5)
    exact.table_entry.match.add(field_id=1).exact.value = b"\1"
    kinds.refuses(INSERT, exact, Code.INVALID_ARGUMENT)


def test_some_actions_are_for_entries_or_for_the_default_only(kinds):
    words = kinds.words
    wrong = words.entry("optioned", {"type": 1}, words.action("default_only", type=1), priority=1)
    kinds.refuses(INSERT, wrong, Code.PERMISSION_DENIED)
    wrong = words.entry("optioned", {}, words.action("entry_only"), is_default_action=True)
    kinds.refuses(MODIFY, wrong, Code.PERMISSION_DENIED)


@pytest.mark.parametrize(
    ("table", "match"), [("drop_threshold", {"queue": 5, "drop_class": 6}), ("ecn_threshold", {"queue": 5})]
)
def test_no_threshold_is_left_out(control, table, match):
    """It would be a threshold of zero."""
    words = control.words
    nothing = words.entry(table, match, words.action("NoAction"))
    control.refuses(INSERT, nothing, Code.PERMISSION_DENIED, saying="NoAction cannot be an entry")
    assert control.entries(table) == []


def test_default_entries(kinds):
    words = kinds.words
    (initial,) = kinds.entries("optioned", is_default_action=True)
    assert initial.action.action == words.action("default_only", type=0x800)
    entry = words.entry("optioned", {}, words.action("default_only", type=3), is_default_action=True)
    entry.table_entry.metadata = b"mine"
    kinds.write(MODIFY, entry)
    assert kinds.entries("optioned", is_default_action=True) == [entry.table_entry]
    assert kinds.entries("optioned") == []
    for kind in (INSERT, DELETE):
        kinds.refuses(kind, entry, Code.INVALID_ARGUMENT)
    kinds.write(MODIFY, words.entry("optioned", {}, is_default_action=True))
    assert kinds.entries("optioned", is_default_action=True) == [initial]
    matching = words.entry("optioned", {"type": 3}, words.action("default_only", type=3), is_default_action=True)
    kinds.refuses(MODIFY, matching, Code.INVALID_ARGUMENT)


def test_defaults_that_the_program_keeps(control):
    words = control.words
    constant = words.entry("port_trust", {}, words.action("trust"), is_default_action=True)
    control.refuses(MODIFY, constant, Code.PERMISSION_DENIED)
    control.write(INSERT, words.member("route_selector", 1, words.action("to_next_hop", port=1, mac=2)))
    indirect = words.entry("ipv4_route", {}, ("member", 1), is_default_action=True)
    control.refuses(MODIFY, indirect, Code.INVALID_ARGUMENT)


def test_constant_entries_can_be_read_only(kinds):
    words = kinds.words
    found = kinds.entries("fixed")
    assert [entry.match[0].exact.value for entry in found] == [encode(0x800), encode(0x806)]
    assert [entry.action.action for entry in found] == [words.action("measure", index=index) for index in (1, 2)]
    action = words.action("measure", index=3)
    kinds.refuses(INSERT, words.entry("fixed", {"type": 5}, action), Code.PERMISSION_DENIED)
    kinds.refuses(MODIFY, words.entry("fixed", {"type": 0x800}, action), Code.PERMISSION_DENIED, Code.NOT_FOUND)
    kinds.refuses(DELETE, words.entry("fixed", {"type": 0x800}), Code.PERMISSION_DENIED, Code.NOT_FOUND)
    assert kinds.entries("fixed") == found


def test_a_full_table_refuses_one_more(kinds):
    words = kinds.words
    kinds.write(INSERT, words.member("plain_profile", 1, words.action("drop")))
    kinds.write(INSERT, *(words.entry("profiled", {"src": number}, ("member", 1)) for number in range(32)))
    kinds.refuses(INSERT, words.entry("profiled", {"src": 32}, ("member", 1)), Code.RESOURCE_EXHAUSTED)
    assert len(kinds.entries("profiled")) == 32


def test_a_batch_is_done_in_order_and_each_update_for_itself(control):
    words = control.words
    action = words.action("to_port", port=1)
    updates = [
        p4r.Update(type=kind, entity=words.entry("ethernet_route", {"ethernet_dst": number}, action))
        for kind, number in ((INSERT, 1), (INSERT, 1), (DELETE, 1), (DELETE, 1), (INSERT, 1), (INSERT, 2))
    ]
    expected = [Code.OK, Code.ALREADY_EXISTS, Code.OK, Code.NOT_FOUND, Code.OK, Code.OK]
    assert control.results(*updates) == expected
    assert len(control.entries("ethernet_route")) == 2


def test_metadata_come_back(control):
    words = control.words
    entry = words.entry("ethernet_route", {"ethernet_dst": 1}, words.action("no_route"))
    entry.table_entry.metadata, entry.table_entry.controller_metadata = b"\0why", 12
    control.write(INSERT, entry)
    assert control.entries("ethernet_route") == [entry.table_entry]
    plain = words.entry("ethernet_route", {"ethernet_dst": 1}, words.action("no_route"))
    control.write(MODIFY, plain)
    assert control.entries("ethernet_route") == [plain.table_entry]


def test_direct_meters(control):
    words = control.words
    key = {"job": 5, "control": 0, "eg_port": 1}
    asked = {"meter_config": p4r.MeterConfig()}
    control.write(INSERT, words.entry("job_share", key, words.action("metered")))
    assert not control.entries("job_share", **asked)[0].HasField("meter_config")
    entry = words.entry("job_share", key, words.action("metered"), meter_config=p4r.MeterConfig(**METER))
    control.write(MODIFY, entry)
    assert control.entries("job_share", **asked) == [entry.table_entry]
    assert not control.entries("job_share")[0].HasField("meter_config")
    direct = p4r.Entity(
        direct_meter_entry=p4r.DirectMeterEntry(
            table_entry=words.entry("job_share", key).table_entry, config=p4r.MeterConfig(**{**METER, "cir": 7})
        )
    )
    control.write(MODIFY, direct)
    assert control.read(direct) == [direct]
    assert control.entries("job_share", **asked)[0].meter_config.cir == 7
    every = p4r.Entity(direct_meter_entry=p4r.DirectMeterEntry())
    every.direct_meter_entry.table_entry.table_id = words.id("tables", "job_share")
    assert control.read(every) == [direct]
    direct.direct_meter_entry.ClearField("config")
    control.write(MODIFY, direct)
    assert not control.entries("job_share", **asked)[0].HasField("meter_config")
    for kind in (INSERT, DELETE):
        control.refuses(kind, direct, Code.INVALID_ARGUMENT)
    elsewhere = words.entry("ethernet_route", {"ethernet_dst": 1}, words.action("no_route"))
    elsewhere.table_entry.meter_config.cir = 1
    control.refuses(INSERT, elsewhere, Code.INVALID_ARGUMENT)
    absent = p4r.Entity()
    absent.direct_meter_entry.table_entry.CopyFrom(words.entry("job_share", {**key, "job": 6}).table_entry)
    control.refuses(MODIFY, absent, Code.NOT_FOUND, Code.INVALID_ARGUMENT)


def test_a_new_entry_in_an_old_place_has_no_meter(control):
    if not control.strict:
        pytest.skip("simple_switch_grpc gives a new entry the meter of the one that had its handle before")
    words = control.words
    entry = words.entry(
        "job_share",
        {"job": 1, "control": 0, "eg_port": 1},
        words.action("metered"),
        meter_config=p4r.MeterConfig(**METER),
    )
    control.write(INSERT, entry)
    control.write(DELETE, entry)
    control.write(INSERT, words.entry("job_share", {"job": 2, "control": 0, "eg_port": 1}, words.action("metered")))
    (found,) = control.entries("job_share", meter_config=p4r.MeterConfig())
    assert not found.HasField("meter_config")


@pytest.mark.parametrize("field", ["idle_timeout_ns", "time_since_last_hit", "counter_data"])
def test_what_a_table_does_not_do_is_refused(control, field):
    words = control.words
    entry = words.entry("ethernet_route", {"ethernet_dst": 1}, words.action("no_route"))
    if field == "idle_timeout_ns":
        entry.table_entry.idle_timeout_ns = 5
    else:
        getattr(entry.table_entry, field).SetInParent()
    control.refuses(INSERT, entry, Code.INVALID_ARGUMENT)
    assert control.entries("ethernet_route") == []


def test_reads_select(control):
    words = control.words
    to_port, no_route = words.action("to_port", port=1), words.action("no_route")
    entries = [
        words.entry("ethernet_route", {"ethernet_dst": number}, no_route if number % 2 else to_port)
        for number in range(10)
    ]
    control.write(INSERT, *entries)
    assert control.read(entries[3]) == [entries[3]]
    assert control.read(words.entry("ethernet_route", {"ethernet_dst": 99})) == []
    assert len(control.read(entries[1], entries[2])) == 2
    trusted = words.entry("port_trust", {"ig_port": 1}, words.action("trust"))
    control.write(INSERT, trusted)
    everything = control.read(p4r.Entity(table_entry=p4r.TableEntry()))
    assert len(everything) == 11
    assert trusted in everything
    defaults = control.read(p4r.Entity(table_entry=p4r.TableEntry(is_default_action=True)))
    assert {entity.table_entry.table_id for entity in defaults} == {item.preamble.id for item in words.tables.values()}


def test_reads_select_by_priority_action_and_metadata(control):
    if not control.strict:
        pytest.skip("simple_switch_grpc selects by match only")
    words = control.words
    first = words.entry("classify", {"job": (1, 0xFFFF)}, words.action("as_tagged"), priority=1)
    second = words.entry("classify", {"job": (1, 0xFFFF)}, words.action("as_tagged"), priority=2, metadata=b"x")
    action = words.action("set_class", queue=1, drop_class=1)
    third = words.entry("classify", {"job": (2, 0xFFFF)}, action, priority=2, controller_metadata=9)
    control.write(INSERT, first, second, third)
    assert control.entries("classify", priority=1) == [first.table_entry]
    assert control.entries("classify", metadata=b"x") == [second.table_entry]
    assert control.entries("classify", controller_metadata=9) == [third.table_entry]
    wanted = p4r.TableAction(action=p4r.Action(action_id=action.action_id))
    assert control.entries("classify", action=wanted) == [third.table_entry]


def test_thousands_of_entries_come_back_as_they_went(control):
    words = control.words
    action = words.action("to_port", port=1)
    entries = [words.entry("ethernet_route", {"ethernet_dst": number}, action) for number in range(3_000)]
    for start in range(0, len(entries), 1_000):
        control.write(INSERT, *entries[start : start + 1_000])
    found = control.entries("ethernet_route")
    assert sorted(entry.match[0].exact.value.rjust(6, b"\0") for entry in found) == [
        number.to_bytes(6, "big") for number in range(3_000)
    ]
    for start in range(0, len(entries), 1_000):
        control.write(DELETE, *entries[start : start + 1_000])
    assert control.entries("ethernet_route") == []
