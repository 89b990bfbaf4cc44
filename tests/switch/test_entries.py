# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from pathlib import Path

import pytest

from dlcp.controller.entries import entries as fabric_entries
from dlcp.controller.fabric import Job, star
from dlcp.inputs.document import DocumentError
from dlcp.switch import (
    Action,
    Entries,
    EntryError,
    GroupRef,
    MeterConfig,
    PortQueueing,
    Profile,
    Program,
    TableEntry,
    apply_entries,
    parse_match,
    parse_number,
    read_entries,
    write_entries,
)

PROGRAM = Path(__file__).parents[2] / "p4/build/dlcp.json"
STAR = star(3, queueing=PortQueueing(rate_bps=10**8), jobs=[Job(1, share=0.5), Job(2, share=0.3)])

EXAMPLE = """{
  "profiles": [
    {"profile": "route_selector",
     "members": [{"id": 1, "action": "to_next_hop", "params": {"port": 1, "mac": "02:00:00:00:00:01"}}],
     "groups": [{"id": 1, "members": [1]}]}
  ],
  "entries": [
    {"table": "ipv4_route", "match": {"ipv4_dst": "10.0.0.0/24"}, "group": 1},
    {"table": "job_share", "match": {"job": 7, "control": 0, "eg_port": 1}, "action": "metered",
     "meter": {"cir": 12500000, "cburst": 50000, "pir": 12500000, "pburst": 60000}},
    {"table": "classify", "match": {"job": "0x10&&&0xf0", "type": 1}, "priority": 5,
     "action": "set_class", "params": {"queue": 3, "drop_class": 0}}
  ],
  "ports": {"1": {"rate_bps": 100000000, "depth_packets": 64}}
}
"""


@pytest.fixture
def program():
    return Program.load(PROGRAM)


@pytest.fixture
def example(tmp_path):
    path = tmp_path / "example.json"
    path.write_text(EXAMPLE)
    return path


def test_file_ends_up_in_the_tables(program, example):
    apply_entries(*read_for(example, program))
    assert program.profiles["route_selector"].members() == {
        1: Action("to_next_hop", {"port": 1, "mac": 0x020000000001})
    }
    assert program.tables["ipv4_route"].get({"ipv4_dst": (0x0A000000, 24)}).target == GroupRef(1)
    share = {"job": 7, "control": 0, "eg_port": 1}
    assert program.tables["job_share"].get_meter(share) == MeterConfig(12500000, 50000, 12500000, 60000)
    [override] = program.tables["classify"].entries()
    assert (override.match["job"], override.match["type"], override.priority) == ((0x10, 0xF0), (1, 0xF), 5)
    assert read_entries(example, program.definition)[0].ports == {1: PortQueueing(rate_bps=100_000_000)}


def read_for(path, program):
    entries, document = read_entries(path, program.definition)
    return entries, program, document


def test_applying_replaces_what_was_there(program, example):
    apply_entries(fabric_entries(STAR, "switch"), program)
    apply_entries(*read_for(example, program))
    assert len(program.tables["ipv4_route"].entries()) == 1
    assert program.tables["port_trust"].entries() == []


def dump_entries(program, ports):
    """Return the entries, members and groups that a program has now, without the default actions."""
    profiles = [
        Profile(
            name,
            tuple(profile.members().items()),
            tuple((number, tuple(members)) for number, members in profile.groups().items()),
        )
        for name, profile in program.profiles.items()
    ]
    entries = [
        replace(entry, meter=table.get_meter(entry.match, entry.priority)) if table.definition.meter else entry
        for table in program.tables.values()
        for entry in table.entries()
    ]
    return Entries(tuple(profiles), (), tuple(entries), ports)


@pytest.mark.parametrize("source", ["policy", "example"])
def test_dump_is_what_was_applied(program, example, tmp_path, source):
    entries = fabric_entries(STAR, "switch") if source == "policy" else read_for(example, program)[0]
    apply_entries(entries, program)
    dumped = dump_entries(program, entries.ports)
    write_entries(tmp_path / "again.json", dumped, program.definition)
    again = read_for(tmp_path / "again.json", program)[0]
    assert again == dumped
    apply_entries(again, program)
    assert dump_entries(program, entries.ports) == dumped
    assert len(dumped.entries) == len(entries.entries)
    assert dumped.ports == entries.ports


def test_policy_file_is_read_back_as_it_was(program, tmp_path):
    entries = fabric_entries(STAR, "switch")
    write_entries(tmp_path / "star.json", entries, program.definition)
    assert read_for(tmp_path / "star.json", program)[0] == entries
    write_entries(tmp_path / "empty.json", Entries(), program.definition)
    assert read_for(tmp_path / "empty.json", program)[0] == Entries()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"ipv4_route"', '"ipv4_rout"', r":8: entries\[0\]: .*no table 'ipv4_rout'.*mean .*ipv4_route"),
        ('"ipv4_dst":', '"ipv4_dest":', r":8: entries\[0\]: .*no field 'ipv4_dest'.*mean ipv4_dst"),
        ('"set_class"', '"set_clas"', r":11: entries\[2\]: .*set_clas\b.*set_class"),
        ('"drop_class": 0', '"drop_clas": 0', r":11: entries\[2\]: .*drop_clas\b.*drop_class"),
        ('"queue": 3', '"queue": 9', r":11: entries\[2\]: .*9"),
        ('"group": 1}', '"group": 4}', r":8: entries\[0\]: .*4"),
        ('"route_selector"', '"selector"', r":3: profiles\[0\]: .*no action profile 'selector'"),
        ('"members": [1]', '"members": [2]', r":3: profiles\[0\]: .*2"),
        ('"group": 1}', '"group": 1, "member": 1}', r":8: entries\[0\]: an entry has one of"),
        ('"job": 7', '"job": "seven"', r":9: entries\[1\]: 'seven' is not a number"),
        ('"priority": 5', '"prority": 5', r":11: entries\[2\].prority: there is no field.*mean priority"),
        ('"cburst": 50000, ', "", r":10: entries\[1\].meter: .*cburst"),
        ('"rate_bps"', '"rate"', r":14: ports.1.rate: there is no field 'rate'.*rate_bps"),
    ],
)
def test_errors_name_line_place_and_nearest_name(program, example, old, new, says):
    assert EXAMPLE.count(old) == 1
    example.write_text(EXAMPLE.replace(old, new))
    with pytest.raises(DocumentError, match=f"example.json{says}"):
        apply_entries(*read_for(example, program))


def test_without_a_file_errors_name_the_entry(program):
    trust = Action("trust")
    wrong = Entries(entries=(TableEntry("port_trust", {"ig_port": 1}, trust), TableEntry("nowhere", {}, trust)))
    with pytest.raises(EntryError, match=r"entries\[1\]: the program has no table 'nowhere'"):
        apply_entries(wrong, program)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (5, 5),
        ("5", 5),
        ("0x1F", 31),
        ("10.0.0.1", 0x0A000001),
        ("02:00:00:00:00:0A", 0x02000000000A),
    ],
)
def test_numbers_as_people_write_them(written, meant):
    assert parse_number(written) == meant


@pytest.mark.parametrize("wrong", ["", "ten", "10.0.0.256", "02:00", "1.5"])
def test_what_is_no_number(wrong):
    with pytest.raises(EntryError, match="is not a number"):
        parse_number(wrong)


@pytest.mark.parametrize(
    ("value", "match", "meant"),
    [
        ("7", "exact", 7),
        ("10.0.0.0/24", "lpm", (0x0A000000, 24)),
        ("10.0.0.1", "lpm", (0x0A000001, 32)),
        ("0x10&&&0xf0", "ternary", (0x10, 0xF0)),
        (16, "ternary", (16, 0xFFFFFFFF)),
        ("3..9", "range", (3, 9)),
        (3, "range", (3, 3)),
    ],
)
def test_matches_as_people_write_them(value, match, meant):
    assert parse_match(value, match, 32) == meant
