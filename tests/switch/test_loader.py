# SPDX-License-Identifier: Apache-2.0
"""Loading a program: supported features, and others refused by name."""

import copy
import json
from pathlib import Path

import pytest

from dlcp.switch import ProgramError, UnsupportedFeatureError
from dlcp.switch.executor import bmv2_json
from dlcp.switch.executor.codegen import ProgramText
from dlcp.switch.executor.model import RegisterDef

JSON = Path(__file__).parents[2] / "p4" / "build" / "dlcp.json"
DOCUMENT = json.loads(JSON.read_text())


def field(header, name):
    return {"type": "field", "value": [header, name]}


def hexstr(value):
    return {"type": "hexstr", "value": hex(value)}


def expression(op, left, right, **more):
    return {
        "type": "expression",
        "value": {"type": "expression", "value": {"op": op, "left": left, "right": right, **more}},
    }


def named(items, end):
    return next(item for item in items if item["name"].endswith(end))


@pytest.fixture
def document():
    return copy.deepcopy(DOCUMENT)


def load(document):
    return ProgramText(bmv2_json.parse(document))


def refused(document, feature, where):
    with pytest.raises(UnsupportedFeatureError) as caught:
        load(document)
    assert feature in caught.value.feature
    assert where in caught.value.where
    assert caught.value.feature in str(caught.value)


def test_the_program_is_read():
    program = bmv2_json.load_definition(JSON)
    assert program.headers["dlcp"].width == 256
    assert program.registers["queue_depth"] == RegisterDef("queue_depth", 512, 19)
    assert program.errors["PacketTooShort"] == 1
    assert program.emitted == ("ethernet", "vlan", "ipv4", "ipv6", "ports", "udp", "dlcp")
    case = program.states["parse_ipv4"].cases[0]
    assert (case.values, case.next) == ((4, 5, 0, 17), "parse_udp")
    assert len(program.digest) == 64


def test_a_wide_field_that_nobody_reads_is_fine(document):
    assert DOCUMENT["header_types"][-1]["fields"][-1][:2] == ["token", 64]
    load(document)


TOP = {
    "header_stacks": "header stacks",
    "header_unions": "header unions",
    "header_union_stacks": "header union stacks",
    "parse_vsets": "parser value sets",
    "learn_lists": "digests",
    "extern_instances": "externs",
}


@pytest.mark.parametrize("key", TOP)
def test_objects_that_are_refused(document, key):
    document[key] = [{"name": "culprit"}]
    refused(document, TOP[key], "culprit")


PRIMITIVES = {
    "clone_ingress_pkt_to_egress": "clone",
    "clone_egress_pkt_to_egress": "clone",
    "recirculate": "recirculate",
    "resubmit": "resubmit",
    "generate_digest": "digest",
    "add_header": "setValid",
    "remove_header": "setInvalid",
    "modify_field_rng_uniform": "random",
    "assign_header": "whole headers",
    "push": "header stack",
    "_jump_if_zero": "if inside an action",
    "log_msg": "log_msg",
}


@pytest.mark.parametrize("op", PRIMITIVES)
def test_primitives_that_are_refused(document, op):
    action = named(document["actions"], "to_port")
    line = action["primitives"][0]["source_info"]["line"]
    action["primitives"].append({"op": op, "parameters": [], "source_info": {"filename": "x.p4", "line": line}})
    refused(document, PRIMITIVES[op], f"x.p4:{line}")


def test_multicast_is_refused(document):
    action = named(document["actions"], "to_port")
    target = field("standard_metadata", "mcast_grp")
    action["primitives"].append({"op": "assign", "parameters": [target, hexstr(1)]})
    refused(document, "multicast", "to_port")


EXPRESSIONS = {
    "two_comp_mod": (expression("two_comp_mod", field("ipv4", "ttl"), hexstr(8)), "the operation two_comp_mod"),
    "sat_cast": (expression("sat_cast", field("ipv4", "ttl"), hexstr(8)), "the operation sat_cast"),
    "wide field": (field("dlcp", "token"), "fields wider than 63 bits (dlcp.token)"),
    "wide product": (
        expression(">>", expression("*", field("ipv4", "src_addr"), field("ipv4", "dst_addr")), hexstr(1)),
        "arithmetic on more than 63 bits",
    ),
    "division": (expression("/", field("ipv4", "ttl"), field("ipv4", "ihl")), "division by anything but"),
    "wide shift": (expression("<<", field("ipv4", "ttl"), field("ipv4", "ttl")), "left shifts"),
    "register": ({"type": "register", "value": ["queue_depth", hexstr(0)]}, "expressions on a register"),
    "stack": ({"type": "stack_field", "value": ["x", "y"]}, "expressions on a stack_field"),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_that_are_refused(document, name):
    item, feature = EXPRESSIONS[name]
    action = named(document["actions"], "to_port")
    action["primitives"].append({"op": "assign", "parameters": [field("standard_metadata", "egress_spec"), item]})
    refused(document, feature, "to_port")


def test_signed_fields_are_refused_where_they_are_used(document):
    fields = named(document["header_types"], "ipv4_t")["fields"]
    fields[5][2] = True  # the identification is not used but in checksums
    refused(document, "signed fields (ipv4.identification)", "dlcp.p4")


def test_truncation_is_for_egress(document):
    """In ingress, the packet would have to keep its length until it is counted in egress."""
    action = named(document["actions"], "to_port")
    action["primitives"].append({"op": "truncate", "parameters": [hexstr(60)]})
    with pytest.raises(UnsupportedFeatureError, match="truncate in ingress"):
        ProgramText(load(document))


def test_wide_fields_are_not_computed_with(document):
    action = named(document["actions"], "to_port")
    wide = field("ipv6", "src_addr")
    action["primitives"].append({"op": "assign", "parameters": [field("standard_metadata", "egress_spec"), wide]})
    refused(document, "computing with fields wider than 63 bits (ipv6.src_addr)", "to_port")
    action["primitives"][-1]["parameters"] = [wide, hexstr(1)]
    refused(document, "computing with fields wider than 63 bits", "to_port")


def test_varbit_is_refused(document):
    named(document["header_types"], "dlcp_t")["fields"].append(["options", "*"])
    refused(document, "varbit", "dlcp.options")


PARSER = {
    "lookahead": (lambda state: state["transition_key"].append({"type": "lookahead", "value": [0, 8]}), "lookahead"),
    "value set": (
        lambda state: state["transitions"].insert(0, {"type": "parse_vset", "value": "s", "next_state": None}),
        "parser value sets",
    ),
    "advance": (lambda state: state["parser_ops"].append({"op": "advance", "parameters": [hexstr(8)]}), "advance"),
    "varbit": (lambda state: state["parser_ops"].append({"op": "extract_VL", "parameters": [{}, {}]}), "varbit"),
    "stack": (
        lambda state: state["parser_ops"].append({"op": "extract", "parameters": [{"type": "stack", "value": "vlan"}]}),
        "extract into a stack",
    ),
    "loop": (lambda state: state["transitions"][-1].update(next_state="start"), "loops in the parser"),
    "twice": (
        lambda state: state["parser_ops"].append(
            {"op": "extract", "parameters": [{"type": "regular", "value": "ethernet"}]}
        ),
        "extracted twice",
    ),
}


@pytest.mark.parametrize("name", PARSER)
def test_parsers_that_are_refused(document, name):
    change, feature = PARSER[name]
    change(named(document["parsers"][0]["parse_states"], "parse_ipv4"))
    refused(document, feature, "parser state")


@pytest.mark.parametrize("order", [["ipv4", "ethernet", "ports", "udp", "dlcp"], ["ethernet", "ipv4", "ports", "udp"]])
def test_a_deparser_that_moves_headers_is_refused(document, order):
    document["deparsers"][0]["order"] = order
    refused(document, "a deparser that does not emit", "deparser")


def table_change(name, value):
    def change(table):
        table[name] = value

    return change


TABLES = {
    "counters": (table_change("with_counters", True), "direct counters"),
    "timeout": (table_change("support_timeout", True), "time out"),
    "kind": (table_change("type", "magic"), "tables of type magic"),
    "match": (table_change("match_type", "magic"), "match type magic"),
    "key": (
        lambda table: table["key"].append(
            {"match_type": "exact", "name": "x", "target": ["ethernet", "dst_addr"], "mask": None}
        ),
        "keys wider than 63 bits",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_refused(document, name):
    change, feature = TABLES[name]
    change(named(document["pipelines"][0]["tables"], "job_share"))
    refused(document, feature, "job_share")


def test_hashes_and_checksums_that_are_refused(document):
    changed = copy.deepcopy(document)
    changed["calculations"][0]["algo"] = "xxh64"
    refused(changed, "the hash xxh64", "")
    changed = copy.deepcopy(document)
    changed["pipelines"][0]["action_profiles"][0]["selector"]["algo"] = "random"
    refused(changed, "the hash random", "route.p4")
    changed = copy.deepcopy(document)
    changed["calculations"][-1]["input"].append({"type": "payload"})
    refused(changed, "a hash over a payload", "dlcp.p4")
    changed = copy.deepcopy(document)
    changed["checksums"][0]["type"] = "ipv4"
    refused(changed, "checksums of type ipv4", "dlcp.p4")


def test_other_objects_that_are_refused(document):
    changed = copy.deepcopy(document)
    named(changed["counter_arrays"], "ingress_events")["is_direct"] = True
    refused(changed, "direct counters", "ingress_events")
    changed = copy.deepcopy(document)
    named(changed["register_arrays"], "slot_owner")["bitwidth"] = 64
    refused(changed, "registers wider than 63 bits", "slot_owner")
    changed = copy.deepcopy(document)
    changed["meter_arrays"][0]["rate_count"] = 1
    refused(changed, "meters with 1 rates", "share_meter")
    changed = copy.deepcopy(document)
    changed["pipelines"][0]["action_calls"] = [{}]
    refused(changed, "action calls", "ingress")
    changed = copy.deepcopy(document)
    changed["parsers"].append(changed["parsers"][0])
    refused(changed, "more than one parser", "parsers")
    changed = copy.deepcopy(document)
    changed["pipelines"][0]["conditionals"][-1]["true_next"] = changed["pipelines"][0]["init_table"]
    refused(changed, "loops in a control", "control ingress")


def test_what_is_no_program_is_said_so(document, tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{]")
    with pytest.raises(ProgramError, match="is not JSON"):
        bmv2_json.load_definition(path)
    path.write_text("[1]")
    with pytest.raises(ProgramError, match="not a BMv2 JSON"):
        bmv2_json.load_definition(path)
    with pytest.raises(ProgramError, match="format version"):
        bmv2_json.parse({**document, "__meta__": {"version": [3, 0]}})
    del document["actions"][0]["primitives"]
    with pytest.raises(ProgramError, match="damaged BMv2 JSON: KeyError 'primitives'"):
        bmv2_json.parse(document)
