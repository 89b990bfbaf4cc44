# SPDX-License-Identifier: Apache-2.0
import re
import shutil

import pytest

from dlcp.wire import (
    DROP_CLASSES,
    FIELD_BITS,
    HEADER_BYTES,
    UDP_PORT_BASE,
    UDP_PORT_COUNT,
    VERSION,
    PacketType,
    Queue,
    dscp,
)
from tests.p4.p4source import P4, constants, events, load_compile

p4_compile = load_compile()


@pytest.fixture
def copy(tmp_path):
    """A copy of p4/ to change at will, in order to begin with."""
    copied = shutil.copytree(P4, tmp_path / "p4")
    for program in (p4_compile.BMV2, p4_compile.TNA):
        p4_compile.record("1.2.3", copied, program)
    assert p4_compile.differences(copied) == []
    return copied


@pytest.mark.compiled("v1model")
@pytest.mark.compiled("tna")
def test_the_compiled_programs_come_from_these_sources():
    assert p4_compile.differences() == []


@pytest.mark.parametrize(
    "name", ["shared/constants.p4", "v1model/drop.p4", "build/dlcp.json", "build/dlcp.p4info.txtpb"]
)
def test_a_change_is_noticed_and_the_way_out_told(copy, name):
    (copy / name).write_text((copy / name).read_text() + "\n")
    (problem,) = p4_compile.differences(copy)
    assert "make p4" in problem
    assert ("sources" if name.endswith(".p4") else name.removeprefix("build/")) in problem


def test_a_new_and_a_missing_file_are_noticed(copy):
    (copy / "v1model" / "extra.p4").write_text("// nothing\n")
    assert any("sources changed" in problem for problem in p4_compile.differences(copy))
    (copy / "build" / "dlcp.json").unlink()
    assert p4_compile.differences(copy) == ["p4/build/dlcp.json is missing: run `make p4`"]


def test_lines_of_comments_are_not_part_of_the_digest(copy):
    before = p4_compile.sources_digest(copy)
    source = copy / "v1model" / "drop.p4"
    text = source.read_text()
    source.write_text(re.sub("^ *//.*", "// Anything.", text, flags=re.MULTILINE))
    assert p4_compile.sources_digest(copy) == before
    for changed in (text.replace(" > ", " >= ", 1), text.replace("\n//", "\n\n//", 1)):
        source.write_text(changed)
        assert p4_compile.sources_digest(copy) != before


def test_a_renamed_source_changes_the_digest(copy):
    before = p4_compile.sources_digest(copy)
    (copy / "v1model" / "drop.p4").rename(copy / "v1model" / "drops.p4")
    assert p4_compile.sources_digest(copy) != before


def test_the_sources_are_those_that_the_program_includes():
    seen, todo = set(), [P4 / p4_compile.PROGRAM]
    while todo:
        path = todo.pop()
        seen.add(path)
        todo += [
            (path.parent / name).resolve() for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        ]
    assert seen == set(p4_compile.sources())


def test_a_missing_compiler_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("P4C", "no-such-compiler")
    with pytest.raises(p4_compile.CompileError, match=r"no-such-compiler is not on PATH[\s\S]*p4lang-p4c"):
        p4_compile.compile_program(tmp_path)


def test_constants_equal_those_of_the_wire():
    found = constants()
    expected = {
        "DLCP_PORT_BASE": UDP_PORT_BASE,
        "DLCP_PORT_MASK": 0x10000 - UDP_PORT_COUNT,
        "DLCP_UDP_LENGTH_MIN": 8 + HEADER_BYTES,
        "DLCP_VERSION": VERSION,
        "DLCP_DATA": PacketType.DATA,
        "QUEUE_ORDINARY": Queue.ORDINARY,
        "QUEUE_EXCESS": Queue.EXCESS,
        "QUEUE_CONTROL": Queue.CONTROL,
        "CLASS_NEVER": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert {name for name in found if name.startswith(("DLCP_", "QUEUE_", "CLASS_"))} == set(expected) | {"QUEUE_WIDTH"}
    assert 1 << found["QUEUE_WIDTH"] == 1 << FIELD_BITS["queue"] == len(range(Queue.EXCESS, Queue.CONTROL + 1))


def test_what_trimming_leaves_is_the_headers():
    found = constants()
    assert found["TRIMMED_IPV4_LENGTH"] == 20 + 8 + HEADER_BYTES
    assert found["TRIMMED_FRAME_BYTES"] == 14 + found["TRIMMED_IPV4_LENGTH"]
    assert found["TRIMMED_DSCP"] == dscp(Queue.CONTROL, droppable=False)


def test_indices_hold_a_port_a_queue_a_class_and_an_event():
    found = constants()
    event_bits, class_bits = 3, (DROP_CLASSES - 1).bit_length()
    assert found["DEPTH_INDEX_WIDTH"] == found["PORT_INDEX_WIDTH"] + found["QUEUE_WIDTH"]
    assert found["EVENT_INDEX_WIDTH"] == found["DEPTH_INDEX_WIDTH"] + class_bits + event_bits
    assert found["TRUST_TABLE_SIZE"] == 1 << found["PORT_INDEX_WIDTH"]
    assert found["THRESHOLD_TABLE_SIZE"] == DROP_CLASSES << found["QUEUE_WIDTH"]
    assert found["ECN_TABLE_SIZE"] == 1 << found["QUEUE_WIDTH"]


@pytest.mark.parametrize("array", ["ingress_events", "egress_events"])
def test_events_of_one_array_have_numbers_of_their_own_and_are_counted(array):
    numbers = events()[array]
    assert sorted(numbers.values()) == list(range(len(numbers)))
    text = "".join(path.read_text() for path in p4_compile.sources())
    counted = set()
    for call in re.findall(rf"{array}\.count\(\s*EVENT_INDEX\(([^;]+)\)\);", text):
        name = call.split(",")[-1].strip()
        counted |= set(re.findall(rf"\b{name} = (EVENT_\w+);", text)) or {name}
    assert counted == set(numbers)
