# SPDX-License-Identifier: Apache-2.0
"""The sizes and names in p4/README.md are those of the compiled program and its sources."""

import json
import re

import pytest

from tests.p4.p4source import P4

PAGE = (P4 / "README.md").read_text()
P4INFO = (P4 / "build" / "dlcp.p4info.txtpb").read_text()


def section(title: str) -> str:
    """Return a section of the page."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables in a text, without headings."""
    found = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in found if cells[0].startswith("`")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w./]+)`", cell)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def compiled(*kinds: str) -> dict[str, tuple[int, int]]:
    """Return size and width of the program's objects, by the last part of their names; the width is 0 if none."""
    found = {}
    for kind, body in re.findall(r"^(\w+) \{\n(.*?)^\}", P4INFO, re.MULTILINE | re.DOTALL):
        if kind in kinds:
            name = re.search(r'^    alias: "(\w+)"', body, re.MULTILINE)
            size = re.search(r"^  size: (\d+)", body, re.MULTILINE)
            width = re.search(r"bitwidth: (\d+)", body) if kind == "registers" else None
            assert name
            assert size
            found[name[1]] = int(size[1]), int(width[1]) if width else 0
    return found


@pytest.mark.compiled("v1model")
def test_tables_have_their_sizes():
    tables = {names(cells[0])[0]: number(cells[1]) for cells in rows(section("Tables"))}
    assert tables == {name: size for name, (size, _) in compiled("tables").items()}
    ((profile, members),) = re.findall(r"^`(\w+)`.* has ([\d,]+) members", section("Tables"), re.MULTILINE)
    assert {profile: (number(members), 0)} == compiled("action_profiles")


@pytest.mark.compiled("v1model")
def test_registers_and_counters_have_their_sizes_and_widths():
    found = {}
    for arrays, cells, _, holds in rows(section("Registers and counters")):
        widths = re.findall(r"\d+", holds.partition(";")[2]) if "bits" in holds else ["0"] * len(names(arrays))
        found |= {name: (number(cells), int(width)) for name, width in zip(names(arrays), widths, strict=True)}
    assert found == compiled("registers", "counters")


@pytest.mark.compiled("tna")
def test_the_resources_of_the_chip_are_those_of_the_compiler():
    used = json.loads((P4 / "build" / "tna" / "resources.json").read_text())
    shown = re.findall(
        r"(\d+) of \d+ (?:[a-z]+ )*?(stages|tables|SRAM|TCAM)", " ".join(section("Resources on a chip").split())
    )
    assert {name: int(value) for value, name in shown} == {
        "stages": used["stages"]["used"],
        "tables": used["logical_tables"],
        "SRAM": used["srams"],
        "TCAM": used["tcams"],
    }


def test_what_a_file_needs_is_what_it_names():
    """A program that includes a file needs these members, also for controls that it does not apply."""
    table = [cells for cells in rows(section("Merge it into another P4 program")) if cells[0].endswith(".p4`")]
    assert len(table) == 4
    for file, controls, headers, metadata in table:
        text = re.sub(r"//.*", "", (P4 / names(file)[0]).read_text())
        assert names(controls) == re.findall(r"^control (\w+)", text, re.MULTILINE)
        assert names(headers) == sorted(set(re.findall(r"\bhdr\.(\w+)", text)))
        assert names(metadata) == sorted(set(re.findall(r"\bmeta\.(\w+)", text)))
