# SPDX-License-Identifier: Apache-2.0
"""The compiled program against dlcp.wire: the program that a switch runs, not its source."""

import json
import re
import shutil

import pytest

from dlcp.wire import FIELD_BITS, UDP_PORT_BASE, UDP_PORT_COUNT
from tests.p4.p4source import P4, constants, load_compile

p4_compile = load_compile()
CONFIG = P4 / "build" / p4_compile.CONFIG
P4INFO = P4 / "build" / p4_compile.P4INFO

pytestmark = pytest.mark.compiled("v1model")


@pytest.fixture(scope="module")
def config():
    return json.loads(CONFIG.read_text())


def strings(node):
    """Every string in a JSON document."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for item in node.values() if isinstance(node, dict) else node:
            yield from strings(item)


def header_fields(config, header):
    """Names and widths of a header's fields, in wire order, as the compiled program has them."""
    (instance,) = [entry for entry in config["headers"] if entry["name"] == header]
    (kind,) = [entry for entry in config["header_types"] if entry["name"] == instance["header_type"]]
    return [(name, bits) for name, bits, *_ in kind["fields"]]


def named(entries, name):
    (entry,) = [entry for entry in entries if entry["name"].rpartition(".")[2] == name]
    return entry


def test_what_does_nothing_is_a_default_only():
    """P4Runtime refuses it in an entry and in a member then."""
    info = P4INFO.read_text()
    (number,) = re.findall(r"id: (\d+)\n    name: \"NoAction\"", info)
    references = re.findall(rf"action_refs \{{\n    id: {number}\n([^}}]*)\}}", info)
    assert len(references) > 1
    assert all("scope: DEFAULT_ONLY" in reference for reference in references), references


def test_the_header_is_that_of_the_wire(config):
    assert header_fields(config, "dlcp") == list(FIELD_BITS.items())


def test_what_a_switch_decides_by_lies_in_the_first_eight_bytes(config):
    starts, at = {}, 0
    for name, bits in header_fields(config, "dlcp"):
        starts[name], at = divmod(at, 8), at + bits
    documented = {
        "version": (0, 0),
        "type": (0, 4),
        "protected": (1, 0),
        "retransmission": (1, 1),
        "trimmed": (1, 2),
        "congestion": (1, 3),
        "queue": (2, 0),
        "drop_class": (2, 3),
        "layer": (3, 0),
        "job": (4, 0),
        "budget": (6, 0),
        "step": (8, 0),
    }
    assert {name: starts[name] for name in documented} == documented
    assert at == 256


def test_ip_and_udp_headers_have_their_standard_layout(config):
    assert sum(bits for _, bits in header_fields(config, "ethernet")) == 14 * 8
    assert sum(bits for _, bits in header_fields(config, "ipv4")) == 20 * 8
    assert sum(bits for header in ("ports", "udp") for _, bits in header_fields(config, header)) == 8 * 8


def test_the_parser_takes_exactly_the_dlcp_ports_and_lengths_with_room_for_the_header(config):
    states = {state["name"]: state for parser in config["parsers"] for state in parser["parse_states"]}
    keys = [key["value"][-1] for key in states["parse_udp"]["transition_key"]]
    assert keys == ["dst_port", "length_"]
    (*masked, default) = states["parse_udp"]["transitions"]
    assert default["next_state"] is None

    def is_taken(port, length):
        key = port << 16 | length
        for transition in masked:
            mask = int(transition["mask"], 16)
            if key & mask == int(transition["value"], 16) & mask:
                return transition["next_state"] == "parse_dlcp"
        return False

    room = 8 + sum(FIELD_BITS.values()) // 8
    ports = {port for port in range(1 << 16) if is_taken(port, room)}
    assert ports == set(range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT))
    for port in ports:
        assert {length for length in range(1 << 16) if is_taken(port, length)} == set(range(room, 1 << 16))


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        ("register_arrays", "queue_depth", "DEPTH_REGISTER_SIZE"),
        ("register_arrays", "slot_owner", "SLOT_REGISTER_SIZE"),
        ("register_arrays", "slot_used_us", "SLOT_REGISTER_SIZE"),
        ("register_arrays", "slot_spent", "SLOT_REGISTER_SIZE"),
        ("counter_arrays", "ingress_events", "EVENT_COUNTER_SIZE"),
        ("counter_arrays", "egress_events", "EVENT_COUNTER_SIZE"),
    ],
)
def test_arrays_have_their_declared_size(config, kind, name, size):
    assert named(config[kind], name)["size"] == constants()[size]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("port_trust", "TRUST_TABLE_SIZE"),
        ("ipv4_route", "ROUTE_TABLE_SIZE"),
        ("ethernet_route", "ROUTE_TABLE_SIZE"),
        ("job_share", "SHARE_TABLE_SIZE"),
        ("classify", "CLASSIFY_TABLE_SIZE"),
        ("drop_threshold", "THRESHOLD_TABLE_SIZE"),
        ("ecn_threshold", "ECN_TABLE_SIZE"),
    ],
)
def test_tables_have_their_declared_size_and_stand_in_p4info(config, name, size):
    table = named([table for pipeline in config["pipelines"] for table in pipeline["tables"]], name)
    assert table["max_size"] == constants()[size]
    assert f'name: "{table["name"]}"' in P4INFO.read_text()


def test_the_files_name_no_folder_of_the_machine_that_made_them(config):
    assert [text for text in strings(config) if text.startswith(("/", "~")) and ".p4" in text] == []
    assert re.findall(r'"/[^"]*"', P4INFO.read_text()) == []


@pytest.mark.skipif(shutil.which(p4_compile.compiler()) is None, reason="p4c-bm2-ss is not installed")
def test_compiling_again_gives_the_same_files_and_no_warning(tmp_path):
    here, then = p4_compile.compiler_version(), p4_compile.recorded()["compiler"]
    p4_compile.compile_program(tmp_path)
    if here != then:
        pytest.skip(f"compiled with p4c {then}, and here is p4c {here}")
    assert (tmp_path / p4_compile.CONFIG).read_bytes() == CONFIG.read_bytes()
    assert (tmp_path / p4_compile.P4INFO).read_bytes() == P4INFO.read_bytes()
