# SPDX-License-Identifier: Apache-2.0
"""Tables, members and groups: insertion, lookup, and errors."""

from pathlib import Path

import numpy as np
import pytest

from dlcp.switch import Action, EntryError, GroupRef, MemberRef, MeterConfig, Program, TableEntry, UnknownNameError
from dlcp.switch.executor import tables
from tests.switch import mini

JSON = Path(__file__).parents[2] / "p4" / "build" / "dlcp.json"
LOOKUP = {
    "exact": tables.lookup_exact,
    "lpm": tables.lookup_lpm,
    "ternary": tables.lookup_ternary,
    "range": tables.lookup_range,
}


@pytest.fixture
def program():
    return Program.load(JSON)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """One table of each kind over the same two fields."""
    made = mini.Mini({"h": {"x": 16, "y": 8}}, {"_pad": 8})
    made.state("start", ["h"])
    made.action("send", [mini.assign("standard_metadata.egress_spec", mini.arg(0))], [("port", 9)])
    made.action("drop", [mini.call("mark_to_drop", mini.ref("header", "standard_metadata"))])
    names = list(LOOKUP)
    for kind, following in zip(names, [*names[1:], None], strict=True):
        keys = [("exact" if kind == "lpm" else kind, "h.y", "y"), (kind, "h.x", "x")]
        made.table("ingress", kind, ["send", "drop"], {"send": following, "drop": following}, keys, kind, ("drop",),
                   max_size=400)  # fmt: skip
    return made.save(tmp_path_factory.mktemp("kinds") / "kinds.json")


def random_match(kind, random):
    x, y = int(random.integers(1 << 16)), int(random.integers(4))
    if kind == "exact":
        return {"x": x & 0xFF, "y": y}
    if kind == "lpm":
        length = int(random.integers(17))
        return {"x": (x & (0xFFFF << (16 - length)) & 0xFFFF, length), "y": y}
    if kind == "ternary":
        mask = int(random.integers(1 << 16)) & 0xF00F
        return {"x": (x & mask, mask), "y": (y & 2, 2)}
    low, high = sorted(int(value) for value in random.integers(0, 1 << 16, 2))
    return {"x": (low, high), "y": (y, min(y + 1, 255))}


def fits(kind, match, x, y):
    for value, wanted, width in ((x, match["x"], 16), (y, match["y"], 8)):
        if kind == "exact" or not isinstance(wanted, tuple):
            ok = value == wanted
        elif kind == "lpm":
            ok = value >> (width - wanted[1]) == wanted[0] >> (width - wanted[1])
        elif kind == "ternary":
            ok = value & wanted[1] == wanted[0]
        else:
            ok = wanted[0] <= value <= wanted[1]
        if not ok:
            return False
    return True


@pytest.mark.parametrize("kind", LOOKUP)
def test_the_right_entry_is_found_whatever_was_inserted_and_deleted(kinds, kind):
    table, random = Program.load(kinds).tables[kind], np.random.default_rng(7)
    entries = []  # (match, priority, place)
    for step in range(300):
        match, priority = random_match(kind, random), int(random.integers(1, 5)) if kind in ("ternary", "range") else 0
        if table.get(match, priority) is None:
            table.insert(match, Action("send", {"port": step}), priority)
            entries.append((match, priority, step))
        if step % 3 == 0:
            match, priority, _ = entries.pop(int(random.integers(len(entries))))
            table.delete(match, priority)
    assert len(table) == len(entries)
    index, rows, best = table.index.encode().tolist(), table.rows, 0
    for _ in range(1500):
        x, y = int(random.integers(1 << (8 if kind == "exact" else 16))), int(random.integers(5))
        found = [entry for entry in entries if fits(kind, entry[0], x, y)]
        if kind == "lpm":
            found.sort(key=lambda entry: -entry[0]["x"][1])
        elif found:
            top = max(entry[1] for entry in found)
            found = [entry for entry in found if entry[1] == top]
        key = y << 16 | x
        place = table.index[key]
        assert LOOKUP[kind](index, key) == place == table.index[key]
        assert (place != 0) == bool(found)
        if found:
            best += 1
            assert rows[place + 1] in [entry[2] for entry in (found[:1] if kind == "lpm" else found)]
    assert best > 50


def test_among_equal_priorities_the_lowest_handle_wins(kinds):
    table = Program.load(kinds).tables["ternary"]
    for port, match in enumerate([{"x": (1, 1)}, {"x": (2, 2)}, {"x": (4, 4)}]):
        table.insert(match, Action("send", {"port": port}), 5)

    def port():
        return table.rows[table.index[7] + 1]

    assert port() == 0
    table.delete({"x": (1, 1)}, 5)
    assert port() == 1
    table.insert({"x": (7, 7)}, Action("send", {"port": 9}), 5)  # takes the handle that has become free
    assert port() == 9
    table.insert({"x": (3, 3)}, Action("send", {"port": 8}), 6)
    assert port() == 8


def test_a_search_is_forgotten_when_entries_change(kinds):
    table = Program.load(kinds).tables["lpm"]
    assert table.index[0x10000 | 5] == 0
    table.insert({"y": 1, "x": (0, 0)}, Action("send", {"port": 1}))
    assert table.index[0x10000 | 5] != 0
    table.delete({"y": 1, "x": (0, 0)})
    assert table.index[0x10000 | 5] == 0


def test_entries_are_given_back(program):
    table = program.tables["classify"]
    match, action = {"job": (3, 0xFFFF)}, Action("set_class", {"queue": 2, "drop_class": 3})
    table.insert(match, action, priority=4)
    entry = TableEntry(table.name, match, action, 4)
    assert table.get(match, 4) == entry
    assert table.get(match, 5) is None
    assert table.entries() == [entry]
    changed = Action("as_tagged")
    table.modify(match, changed, 4)
    assert table.entries()[0].target == changed
    table.clear()
    assert table.entries() == []


TRUST, LIMIT = {"ig_port": 1}, {"queue": 1, "drop_class": 1}
BAD = {
    "unknown field": ("port_trust", {"igport": 1}, Action("trust"), 0, "no field 'igport'; did you mean ig_port"),
    "missing field": ("drop_threshold", {"queue": 1}, Action("NoAction"), 0, "no value for field drop_class"),
    "unknown action": ("port_trust", TRUST, Action("thrust"), 0, r"no action 'thrust'; did you mean .*\.trust"),
    "action of another table": ("port_trust", TRUST, Action("to_port", {"port": 1}), 0, "no action 'to_port'"),
    "unknown parameter": ("drop_threshold", LIMIT, Action("drop_above", {"dept": 1}), 0, "did you mean depth"),
    "missing parameter": ("drop_threshold", LIMIT, Action("drop_above"), 0, "needs a value for depth"),
    "wide parameter": ("drop_threshold", LIMIT, Action("drop_above", {"depth": 1 << 19}), 0, "depth .* 19 bits"),
    "text parameter": ("drop_threshold", LIMIT, Action("drop_above", {"depth": "3"}), 0, "takes a number, not '3'"),
    "wide value": ("port_trust", {"ig_port": 512}, Action("trust"), 0, "ig_port has 9 bits; 0x200 does not fit"),
    "negative value": ("port_trust", {"ig_port": -1}, Action("trust"), 0, "does not fit"),
    "text value": ("port_trust", {"ig_port": "1"}, Action("trust"), 0, "takes a number, not '1'"),
    "pair for exact": ("port_trust", {"ig_port": (1, 2)}, Action("trust"), 0, "ig_port is exact"),
    "number for lpm": ("ipv4_route", {"ipv4_dst": 1}, MemberRef(1), 0, r"give \(value, prefix length\), not 1"),
    "long prefix": ("ipv4_route", {"ipv4_dst": (0, 33)}, MemberRef(1), 0, r"length 33 is outside 0\.\.32"),
    "bits behind the prefix": ("ipv4_route", {"ipv4_dst": (1, 8)}, MemberRef(1), 0, "outside 0xff000000; set"),
    "bits outside the mask": ("classify", {"job": (3, 1)}, Action("as_tagged"), 1, "outside 0x1"),
    "no priority": ("classify", {"job": (3, 3)}, Action("as_tagged"), 0, "needs a priority above 0"),
    "a priority": ("port_trust", TRUST, Action("trust"), 1, "takes no priority"),
    "no such member": ("ipv4_route", {"ipv4_dst": (0, 0)}, MemberRef(9), 0, "no member 9; it has none"),
    "no such group": ("ipv4_route", {"ipv4_dst": (0, 0)}, GroupRef(9), 0, "no group 9; it has none"),
    "action for a profile": ("ipv4_route", {"ipv4_dst": (0, 0)}, Action("NoAction"), 0, "give a MemberRef or a"),
    "member for an action": ("port_trust", TRUST, MemberRef(1), 0, "has no action profile; give an Action"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_entries_that_do_not_fit_are_explained(program, name):
    table, match, target, priority, message = BAD[name]
    with pytest.raises(EntryError, match=message):
        program.tables[table].insert(match, target, priority)
    assert len(program.tables[table]) == 0


def test_what_is_there_what_is_not_and_what_is_full(program):
    table = program.tables["port_trust"]
    for port in range(64):
        table.insert({"ig_port": port}, Action("trust"))
    with pytest.raises(EntryError, match=r"port_trust has an entry for ig_port=3 already; use modify"):
        table.insert({"ig_port": 3}, Action("trust"))
    with pytest.raises(EntryError, match=r"is full \(64 entries\)"):
        table.insert({"ig_port": 64}, Action("trust"))
    with pytest.raises(EntryError, match="no entry for ig_port=64"):
        table.delete({"ig_port": 64})
    table.delete({"ig_port": 3})
    table.insert({"ig_port": 64}, Action("trust"))
    with pytest.raises(EntryError, match="constant default action"):
        table.set_default(Action("trust"))
    with pytest.raises(EntryError, match="no direct meter"):
        table.set_meter({"ig_port": 64}, None)


def test_a_range_must_not_be_empty(kinds):
    with pytest.raises(EntryError, match=r"empty range 5\.\.4"):
        Program.load(kinds).tables["range"].insert({"x": (5, 4)}, Action("drop"), 1)


def test_members_and_groups(program):
    profile, table = program.profiles["route_selector"], program.tables["ipv4_route"]
    hop = Action("to_next_hop", {"port": 1, "mac": 5})
    for number in (10, 11, 12):
        profile.add_member(number, hop)
    profile.add_group(1, [12, 10])
    everything = {"ipv4_dst": (0, 0)}
    table.insert(everything, GroupRef(1))
    assert profile.groups() == {1: {12: 1, 10: 1}}
    for change, message in (
        (lambda: profile.add_member(10, hop), "has a member 10 already"),
        (lambda: profile.add_group(1, []), "has a group 1 already"),
        (lambda: profile.add_group(2, [10, 10]), "names a member twice"),
        (lambda: profile.add_group(2, [13]), "no member 13; it has 10, 11, 12"),
        (lambda: profile.delete_member(10), "member 10 is in group 1"),
        (lambda: profile.delete_group(1), "group 1 is used by 1 entries"),
        (lambda: profile.modify_group(1, []), "it needs a member"),
        (lambda: profile.add_member(13, Action("to_next_hop", {"port": 512, "mac": 0})), "has 9 bits"),
        (lambda: table.set_default(GroupRef(1)), "a group cannot be the default"),
    ):
        with pytest.raises(EntryError, match=message):
            change()
    table.modify(everything, MemberRef(11))
    profile.delete_group(1)
    profile.delete_member(10)
    with pytest.raises(EntryError, match="member 11 is used by 1 entries"):
        profile.delete_member(11)
    profile.add_group(5)
    with pytest.raises(EntryError, match="group 5 is empty"):
        table.insert({"ipv4_dst": (0, 1)}, GroupRef(5))
    table.clear()
    profile.clear()
    assert not profile.members()
    assert not profile.groups()


def test_a_group_keeps_its_members_in_the_order_of_their_handles(program):
    """BMv2 keeps a group as a sorted set of member handles, and gives out the lowest handle that is free."""
    profile = program.profiles["route_selector"]
    for number in (30, 20, 10):
        profile.add_member(number, Action("to_next_hop", {"port": number, "mac": 0}))
    profile.delete_member(20)
    profile.add_member(40, Action("to_next_hop", {"port": 40, "mac": 0}))
    profile.add_group(1, [10, 40, 30])
    count, start = profile.group_cells[profile.place(GroupRef(1)) :][:2]
    ports = [profile.rows[place + 1] for place in profile.choices[start : start + count]]
    assert ports == [30, 40, 10]


def test_many_changes_leave_no_rubbish(program):
    profile = program.profiles["route_selector"]
    for number in range(4):
        profile.add_member(number, Action("to_next_hop", {"port": number, "mac": 0}))
    profile.add_group(1, [0])
    for step in range(3000):
        profile.modify_group(1, [step % 4, (step + 1) % 4])
    assert len(profile.choices) < 2000
    count, start = profile.group_cells[profile.place(GroupRef(1)) :][:2]
    assert [profile.rows[place + 1] for place in profile.choices[start : start + count]] == [0, 3]
    _, start = profile.group_cells[profile.place(MemberRef(2)) :][:2]
    assert profile.rows[profile.choices[start] + 1] == 2


def test_the_meter_of_an_entry_goes_with_it(program):
    table = program.tables["job_share"]
    match = {"job": 1, "control": 0, "eg_port": 2}
    config = MeterConfig(1, 2, 3, 4)
    table.insert(match, Action("metered"))
    table.set_meter(match, config)
    assert table.get_meter(match) == config
    table.delete(match)
    table.insert(match, Action("metered"))
    assert table.get_meter(match) is None
    with pytest.raises(EntryError, match="committed rate 9 exceeds the peak rate 3"):
        table.set_meter(match, MeterConfig(9, 2, 3, 4))
    with pytest.raises(EntryError, match="negative"):
        table.set_meter(match, MeterConfig(1, -2, 3, 4))


def test_unknown_names_are_key_errors_too(program):
    with pytest.raises(KeyError):
        program.tables["x"]
    with pytest.raises(UnknownNameError, match="it has none"):
        program.meters["x"]
