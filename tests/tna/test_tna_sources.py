# SPDX-License-Identifier: Apache-2.0
"""The Tofino program against the one for v1model: it has the same, or the table of differences explains why not."""

import re
import zlib

import pytest

from tests.tna.p4text import COMMENT, P4, differences, read

V1MODEL, TNA, SHARED = read("v1model"), read("tna"), read("shared")


def test_the_reader_finds_what_is_known_to_be_there():
    assert {"dlcp.p4", "drop.p4", "police.p4"} <= V1MODEL.files
    assert {"PortTrust", "Route", "SelectiveDrop", "DlcpParser"} <= V1MODEL.blocks
    assert V1MODEL.tables["classify"].keys == {(name, "ternary") for name in ("job", "type", "queue", "drop_class")}
    assert ("ipv4_dst", "lpm") in V1MODEL.tables["ipv4_route"].keys
    assert V1MODEL.actions["to_next_hop"] == ("bit<9> port", "bit<48> mac")
    assert {
        "queue_depth",
        "slot_owner",
        "slot_used_us",
        "slot_spent",
        "ingress_events",
        "share_meter",
    } <= V1MODEL.arrays
    assert {"ethernet_t", "dlcp_t"} <= SHARED.headers
    assert {"QUEUE_ORDINARY", "SLOT_WIDTH"} <= SHARED.constants


def test_the_files_have_the_same_names():
    assert {name.removesuffix(".p4") for name in V1MODEL.files - TNA.files} <= set(differences())


@pytest.mark.parametrize("part", ["blocks", "tables", "actions", "arrays"])
def test_what_v1model_has_is_here_or_among_the_differences(part):
    missing = set(getattr(V1MODEL, part)) - set(getattr(TNA, part)) - set(differences())
    assert not missing, f"{part} that p4/tna lacks and p4/tna/README.md does not explain: {sorted(missing)}"


@pytest.mark.parametrize("part", ["blocks", "tables", "actions", "arrays"])
def test_what_is_only_here_is_among_the_differences(part):
    extra = set(getattr(TNA, part)) - set(getattr(V1MODEL, part)) - set(differences())
    assert not extra, f"{part} that only p4/tna has and p4/tna/README.md does not explain: {sorted(extra)}"


def test_each_difference_names_something_and_says_why_and_with_what_effect():
    scripts = "\n".join(path.read_text() for path in (P4 / "tna").glob("*.py"))
    known = V1MODEL.words | TNA.words | SHARED.words | set(re.findall(r"\w+", scripts))
    for name, row in differences().items():
        assert name in known, f"{name} is in the table of differences and in no program"
        columns = [column.strip() for column in row.strip("|").split("|")]
        assert len(columns) == 3, row
        assert all(columns), row


@pytest.mark.parametrize("name", sorted(set(V1MODEL.tables) & set(TNA.tables)))
def test_tables_have_the_same_keys_actions_and_sizes(name):
    ours, theirs = TNA.tables[name], V1MODEL.tables[name]
    # What selects among equal ports is another matter: p4/tna/README.md has it among the differences.
    assert {key for key in ours.keys if key[1] != "selector"} == {key for key in theirs.keys if key[1] != "selector"}
    assert ours.actions ^ theirs.actions <= set(differences())
    assert ours.size == theirs.size or ours.size in differences()


@pytest.mark.parametrize("name", sorted(set(V1MODEL.actions) & set(TNA.actions)))
def test_actions_take_the_same_parameters(name):
    assert TNA.actions[name] == V1MODEL.actions[name]


def test_constants_and_headers_have_one_source():
    for program in (V1MODEL, TNA):
        assert program.headers & SHARED.headers == set()
        assert program.constants & SHARED.constants == set()
        assert {"DLCP_PORT_BASE", "QUEUE_ORDINARY", "EVENT_POLICY_DROP", "SLOT_REGISTER_SIZE"} <= program.words
    for header in ("ethernet_t", "vlan_t", "ipv4_t", "ipv6_t", "ports_t", "udp_t", "dlcp_t"):
        assert header in V1MODEL.words & TNA.words


@pytest.mark.parametrize("folder", ["v1model", "tna"])
def test_programs_include_the_shared_files_and_none_of_the_others(folder):
    text = "\n".join(path.read_text() for path in (P4 / folder).glob("*.p4"))
    included = set(re.findall(r'^#include "(.+)"', text, re.MULTILINE))
    assert {"../shared/constants.p4", "../shared/headers.p4"} <= included
    assert {name for name in included if name.startswith("..")} == {"../shared/constants.p4", "../shared/headers.p4"}


def test_the_widths_of_reports_and_bridges_are_whole_bytes():
    text = COMMENT.sub("", (P4 / "tna" / "headers.p4").read_text())
    report = re.search(r"header report_t \{(.*?)\}", text, re.DOTALL)
    assert report
    assert sum(map(int, re.findall(r"bit<(\d+)>", report[1]))) % 8 == 0


@pytest.mark.parametrize("ports", [2, 4, 8, 16, 32, 64])
def test_packets_take_powers_of_two_of_ports_in_turn(ports):
    text = (P4 / "tna" / "route.p4").read_text()
    tables = [re.findall(r"\b(\w+): selector;", table) for table in text.split("table ")[1:]]
    selecting = tables[0]
    assert tables == [selecting, selecting, []]
    assert sorted(selecting) == ["dst_addr", "dst_port", "entropy", "protocol", "src_addr", "src_port"]
    widths = {"src_addr": 4, "dst_addr": 4, "protocol": 1, "src_port": 2, "dst_port": 2, "entropy": 4}

    def port(number: int, flow: int) -> int:
        values = dict.fromkeys(selecting, flow) | {"entropy": number}
        return zlib.crc32(b"".join(values[name].to_bytes(widths[name], "big") for name in selecting)) % ports

    for flow in range(1, 20):
        assert {port(3 * ports + number, flow) for number in range(ports)} == set(range(ports))
