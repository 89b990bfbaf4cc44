# SPDX-License-Identifier: Apache-2.0
"""The set-up script against a device that knows its tables from what the compiler wrote, and from the driver."""

import re
from collections import Counter
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest
import set_up
from set_up import DevicePort, Key, QueuePlace, SetUpError, Write

from dlcp.controller.entries import entries as entries_of
from dlcp.controller.fabric import leaf_spine, load
from dlcp.switch import QUEUES, Action, Entries, PortQueueing, TableEntry
from tests.tna.fake_bfrt import FakeClient, FakeInfo, Refused, device_with_ports
from tests.tna.p4text import P4

SCHEMA = P4 / "build" / "tna" / "bf-rt.json"
EXAMPLES = Path(__file__).parents[2] / "controller" / "examples"
PORTS = [DevicePort(number, device, "10G") for number, device in ((1, 8), (2, 9), (3, 140), (4, 268))]
"""Device ports of three pipes."""

pytestmark = pytest.mark.compiled("tna")


@pytest.fixture
def fabric():
    return load(EXAMPLES / "leaf-spine.yaml")


@pytest.fixture
def info():
    found = FakeInfo(SCHEMA)
    device_with_ports(found, [port.device_port for port in PORTS])
    return found


@pytest.fixture
def device(info):
    return set_up.Device(FakeClient, info)


@pytest.fixture
def written(fabric, info, device):
    """The device after leaf1 of the example was set up."""
    device.clear()
    for write in set_up.writes(fabric, "leaf1", PORTS, device):
        device.write(write)
    return info


def entries(info, table):
    """The entries of a table, by their keys as a dict without masks."""
    return {
        frozenset((name, value) for name, value, *_ in key): values
        for (_, key), (_, values) in info.table_get(table).entries.items()
    }


def entry(info, table, **key):
    """The data of the entry with that key; ``_`` stands for what a Python name cannot begin with."""
    return entries(info, table)[frozenset((name.replace("_d_", "$"), value) for name, value in key.items())]


def test_all_that_is_written_fits_the_program_and_the_driver(written, fabric):
    counts = {name: len(written.table_get(name).entries) for name in set_up.EMPTIED}
    expected = entries_of(fabric, "leaf1")
    tables = {each.table for each in expected.entries}
    assert {"ipv4_route", "port_trust", "classify", "job_share", "budget_part", "drop_threshold"} < tables
    for name in tables:
        assert counts[name] == sum(each.table == name for each in expected.entries) > 0, name
    assert counts["device_port"] == len(PORTS)
    assert counts["route_members"] == len(expected.profiles[0].members)
    assert counts["route_selector"] == len(expected.profiles[0].groups)


def test_every_table_of_the_program_is_emptied_but_those_whose_entries_the_program_has(info):
    emptied = {name for name in info.tables if any(name.endswith(f".{each}") for each in set_up.EMPTIED)}
    mine = {
        name
        for name, table in info.tables.items()
        if name.startswith("pipe.") and (table.actions or "$SELECTOR_GROUP_ID" in {key.name for key in table.keys})
    }
    others = {name.rpartition(".")[2] for name in mine - emptied}
    assert others == {"depth_of_queue", "over_threshold", "route_selector_get_member"}


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (Write("port_thrust", (Key("ig_port", 1),), {}, "trust"), "tables are called port_thrust"),
        (Write("port_trust", (Key("ingress", 1),), {}, "trust"), "no key ingress"),
        (Write("port_trust", (Key("ig_port", 512),), {}, "trust"), "takes 9 bits"),
        (Write("port_trust", (Key("ig_port", 1),), {}, "thrust"), "no action thrust"),
        (Write("device_port", (Key("eg_port", 1),), {"port": 1}, "to_device_port"), "no field port"),
        (Write("classify", (Key("job", 1),), {}, "as_tagged"), "is Ternary, not Exact"),
        (Write("classify", (Key("job", 1, mask=1),), {}, "as_tagged"), "key without"),
        (Write("$PORT", (Key("$DEV_PORT", 1),), {"$SPEED": "BF_SPEED_11G"}), "one of"),
        (Write("tf1.tm.queue.color", (Key("pg_id", 1),), {}, there_already=True), "key without"),
        (Write("tf1.tm.queue.colour", (), {}, there_already=True), "tables are called"),
    ],
)
def test_the_fake_refuses_what_a_device_would(device, write, complaint):
    with pytest.raises(Refused, match=complaint):
        device.write(write)


def test_ports_come_up_and_have_the_numbers_of_the_fabric(written):
    for port in PORTS:
        assert entry(written, "$PORT", _d_DEV_PORT=port.device_port) == {
            "$SPEED": "BF_SPEED_10G",
            "$FEC": "BF_FEC_TYP_NONE",
            "$PORT_ENABLE": True,
        }
        (metadata,) = [
            values
            for key, values in entries(written, "$PORT_METADATA").items()
            if port.device_port in dict(key).values()
        ]
        assert metadata == {"port": port.number}
        assert entry(written, "device_port", eg_port=port.number) == {"device_port": port.device_port}


def test_reports_reach_the_ingress_of_every_pipe_with_ports(written):
    constants = (P4 / "tna" / "constants.p4").read_text()
    session = int(re.search(r"REPORT_SESSION = (\d+);", constants)[1])
    recirculation = int(re.search(r"RECIRCULATION_PORT = (\d+);", constants)[1])
    mirror = entry(written, "$mirror.cfg", _d_sid=session)
    assert mirror["$session_enable"]
    assert mirror["$direction"] == "EGRESS"
    group = entry(written, "$pre.mgid", _d_MGID=mirror["$mcast_grp_a"])
    (node,) = group["$MULTICAST_NODE_ID"]
    ports = entry(written, "$pre.node", _d_MULTICAST_NODE_ID=node)["$DEV_PORT"]
    assert ports == [pipe << 7 | recirculation for pipe in (0, 1, 2)]


def test_queues_are_served_in_strict_order_and_are_as_deep_as_the_fabric_says(written, fabric):
    schedule, buffer = (written.table_get(f"tf1.tm.queue.{name}").entries for name in ("sched_cfg", "buffer"))
    assert len(schedule) == len(buffer) == len(PORTS) * QUEUES
    packets = 19  # cells of 80 bytes that a frame of 1518 bytes takes
    for port in PORTS:
        place = (port.device_port & 0x7F) // 4
        for queue in range(QUEUES):
            key = (
                port.pipe,
                (("pg_id", place, None, None), ("pg_queue", port.device_port % 4 * 8 + queue, None, None)),
            )
            assert schedule[key][1]["max_priority"] == str(queue)
            assert buffer[key] == (
                "buffer_only",
                {"guaranteed_cells": 64 * packets, "hysteresis_cells": 0, "tail_drop_enable": True},
            )


def test_a_colour_is_dropped_from_the_least_that_the_traffic_manager_knows(written):
    """The example drops class 7 at a tenth of a queue or less, at 55 % of queue 0; limits are eighths, one or more."""
    colors = written.table_get("tf1.tm.queue.color").entries
    limits = Counter(values.pop("drop_limit_red") for values in (dict(values) for _, values in colors.values()))
    assert limits == {"12.5%": 7 * len(PORTS), "50%": len(PORTS)}
    assert all(values["drop_limit_yellow"] == "100%" and values["drop_enable"] for _, values in colors.values())


@pytest.mark.parametrize(
    ("threshold", "limit"), [(0, "12.5%"), (8, "12.5%"), (15, "12.5%"), (16, "25%"), (63, "87.5%"), (64, "100%")]
)
def test_colour_limits_are_eighths_not_above_the_threshold(threshold, limit):
    assert set_up._color_limit(threshold, 64) == limit


def test_thresholds_are_in_cells(written, fabric):
    packets = {
        (each.match["queue"], each.match["drop_class"]): each.target.params["depth"]
        for each in entries_of(fabric, "leaf1").entries
        if each.table == "drop_threshold"
    }
    assert len(packets) == 56
    for (queue, drop_class), depth in packets.items():
        assert entry(written, "drop_threshold", queue=queue, drop_class=drop_class) == {"depth": depth * 19}


def test_the_report_step_is_below_the_lowest_threshold_of_the_examples(written):
    """Else a queue that has drained could stay above its threshold for good, as far as ingress knows."""
    step = int(re.search(r"REPORT_STEP_CELLS = (\d+);", (P4 / "tna" / "constants.p4").read_text())[1])
    assert step < min(values["depth"] for _, values in written.table_get("drop_threshold").entries.values())


def test_hosts_with_ipv6_get_routes_with_their_whole_addresses(info, device):
    fabric = replace(leaf_spine(2, 2, 2, ipv6=True), switches=load(EXAMPLES / "leaf-spine.yaml").switches)
    for write in set_up.writes(fabric, "leaf1", PORTS, device):
        device.write(write)
    keys = {key for (_, (key,)) in info.table_get("ipv6_route").entries}
    assert keys == {("ipv6_dst", int(ip_address(host.address)), None, 128) for host in fabric.hosts}
    assert not info.table_get("ipv4_route").entries


def test_the_part_of_the_budget_becomes_an_action(written, fabric):
    ((_, key), (action, _)), *others = written.table_get("budget_part").entries.items()
    assert not others
    assert key == (("$MATCH_PRIORITY", 0xFFFFFE, None, None), ("job", 0, 0, None))
    assert action.endswith(".quarter_of_budget")
    (leaf, spine) = (fabric.budget_parts[name] for name in ("leaf1", "spine1"))
    assert (set_up.BUDGET_PARTS[leaf], set_up.BUDGET_PARTS[spine]) == ("quarter_of_budget", "quarter_of_budget")


def test_each_part_of_the_budget_is_what_its_action_computes():
    text = (P4 / "tna" / "drop.p4").read_text()
    found = re.findall(r"action (\w+_of_budget)\(\) \{\s*meta\.budget = hdr\.dlcp\.budget(?: >> (\d))?;", text)
    assert [name for name, _ in found] == list(set_up.BUDGET_PARTS)
    assert [int(halvings or 0) for _, halvings in found] == list(range(len(found)))


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (TableEntry("budget_part", {}, Action("part_of_budget", {"halvings": 7}), 1), r"1/128 .* parts down to 1/64"),
        (
            TableEntry("trimming", {"job": 7}, Action("trim")),
            "cannot trim packets: leave the entries of table",
        ),
    ],
)
def test_what_a_tofino_cannot_do_is_refused(entry, complaint):
    with pytest.raises(SetUpError, match=complaint):
        list(set_up.entry_writes(Entries(entries=(entry,)), 1500))


def test_shares_are_in_kbit_and_not_made_smaller(written, fabric):
    (each,) = [
        each
        for each in entries_of(fabric, "leaf1").entries
        if each.table == "job_share" and each.match["eg_port"] == 1 and each.match["control"] == 0
    ]
    values = entry(written, "job_share", **each.match)
    assert values["$METER_SPEC_CIR_KBPS"] * 1000 >= each.meter.cir * 8 > (values["$METER_SPEC_CIR_KBPS"] - 1) * 1000
    assert values["$METER_SPEC_CBS_KBITS"] * 1000 >= each.meter.cburst * 8
    assert values["$METER_SPEC_PIR_KBPS"] == values["$METER_SPEC_CIR_KBPS"]


def test_the_highest_priority_becomes_the_lowest_number(written, fabric):
    ours = [each for each in entries_of(fabric, "leaf1").entries if each.table == "classify"]
    found = {dict(key)["$MATCH_PRIORITY"] for key in entries(written, "classify")}
    assert sorted(found) == sorted({0xFFFFFF - each.priority for each in ours})
    assert len(found) > 1


def test_groups_hold_their_members_and_routes_lead_to_groups(written, fabric):
    (profile,) = entries_of(fabric, "leaf1").profiles
    for number, members in profile.groups:
        values = entry(written, "route_selector", _d_SELECTOR_GROUP_ID=number)
        assert values["$ACTION_MEMBER_ID"] == list(members)
        assert values["$ACTION_MEMBER_STATUS"] == [True] * len(members)
    groups = {values["$SELECTOR_GROUP_ID"] for values in entries(written, "ipv4_route").values()}
    assert groups == {number for number, _ in profile.groups}


def test_a_rate_below_the_speed_is_shaped_and_a_port_at_full_speed_is_not(fabric, info, device):
    links = tuple(replace(link, rate_bps=10**10) if "leaf1:2" in (link.a, link.b) else link for link in fabric.links)
    for write in set_up.writes(replace(fabric, links=links), "leaf1", PORTS, device):
        device.write(write)
    assert entry(info, "tf1.tm.port.sched_cfg", dev_port=8) == {"max_rate_enable": True}
    assert entry(info, "tf1.tm.port.sched_shaping", dev_port=8)["max_rate"] == 20_000  # kbit/s
    assert entry(info, "tf1.tm.port.sched_cfg", dev_port=9) == {"max_rate_enable": False}


def test_setting_up_again_changes_nothing(written, fabric, device):
    before = {name: dict(table.entries) for name, table in written.tables.items()}
    device.clear()
    for write in set_up.writes(fabric, "leaf1", PORTS, device):
        device.write(write)
    assert {name: dict(table.entries) for name, table in written.tables.items()} == before


def test_what_others_refer_to_is_written_first_and_removed_last(written):
    added = [name for action, name in written.log if action == "add"]
    removed = [name for action, name in written.log if action == "del"]
    for order in (added, removed[::-1]):
        at = [order.index(next(name for name in order if name.endswith(table))) for table in ("members", "selector")]
        at.append(order.index(next(name for name in order if name.endswith("ipv4_route"))))
        assert at == sorted(at)


def test_ports_that_do_not_fit_are_named(fabric, device):
    cases = [
        (PORTS[:3], "leaf1:4 has a link but no device port: add --port 4="),
        ([*PORTS, DevicePort(9, 12, "10G")], "leaf1:9 has no link"),
        ([*PORTS[:3], DevicePort(4, 8, "10G")], "device port 8 is given to two ports"),
    ]
    for ports, complaint in cases:
        with pytest.raises(SetUpError, match=complaint):
            set_up.writes(fabric, "leaf1", ports, device)
    fast = replace(fabric, queueing=PortQueueing(rate_bps=25 * 10**9))
    with pytest.raises(SetUpError, match=r"rate of 25000000000 bit/s, more than 10G"):
        set_up.writes(fast, "leaf1", PORTS, device)


def test_queues_deeper_than_the_buffer_are_refused(fabric):
    places = {port.device_port: QueuePlace(0, tuple(range(8))) for port in PORTS}
    with pytest.raises(SetUpError, match=r"hold 38912 cells .* the device has 38911: lower depth_packets"):
        set_up.queue_writes(fabric, "leaf1", PORTS, places, 38_911)
    assert set_up.queue_writes(fabric, "leaf1", PORTS, places, 38_912)


def test_ports_with_too_few_queues_and_other_cells_are_refused(fabric):
    few = FakeInfo(SCHEMA)
    device_with_ports(few, [port.device_port for port in PORTS], queues=4)
    with pytest.raises(SetUpError, match=r"device port 8 has 4 queues: give it 8 through tf1\.tm\.port\.group"):
        set_up.writes(fabric, "leaf1", PORTS, set_up.Device(FakeClient, few))
    table = few.table_get("tf1.tm.cfg")
    table.entries[FakeClient.Target().pipe_id, ()][1]["cell_size_bytes"] = 176
    with pytest.raises(SetUpError, match="cells of 176 bytes; this script supports 80"):
        set_up.Device(FakeClient, few).buffer_cells()


@pytest.mark.parametrize("text", ["1", "1=8", "1=8,11G", "1=8,10G,XX", "x=8,10G", "1=x,10G"])
def test_a_port_that_cannot_be_read_is_explained(text, capsys):
    with pytest.raises(SystemExit):
        set_up.main(["fabric.yaml", "leaf1", "--port", text])
    assert "is not NUMBER=DEVICE_PORT,SPEED[,FEC]" in capsys.readouterr().err


def test_without_the_client_it_says_where_the_client_comes_from(capsys):
    ports = [f"{port.number}={port.device_port},{port.speed}" for port in PORTS]
    arguments = [str(EXAMPLES / "leaf-spine.yaml"), "leaf1", *(word for port in ports for word in ("--port", port))]
    assert set_up.main(arguments) == 1
    assert "bfrt_grpc is missing; it comes with the SDE" in capsys.readouterr().err


def test_from_the_command_line_to_the_device(monkeypatch, info, capsys):
    monkeypatch.setattr(set_up.Device, "connect", lambda address, device: set_up.Device(FakeClient, info, device))
    ports = [f"{port.number}={port.device_port},{port.speed}" for port in PORTS]
    arguments = [str(EXAMPLES / "leaf-spine.yaml"), "leaf1", *(word for port in ports for word in ("--port", port))]
    assert set_up.main([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "classify [" in shown
    assert not info.log
    assert set_up.main(arguments) == 0
    assert f"leaf1: {len(shown.splitlines())} entries written" in capsys.readouterr().out
    assert set_up.main([arguments[0], "leaf9"]) == 1
    assert "unknown switch 'leaf9'" in capsys.readouterr().err
