# SPDX-License-Identifier: Apache-2.0
"""The output of p4c's back end for Tofino, against the figures in p4/README.md and p4/tna/README.md."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.tna.p4text import P4, read

TNA = P4 / "build" / "tna"

spec = importlib.util.spec_from_file_location("p4_compile_both", P4 / "compile.py")
p4_compile = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = p4_compile  # where its dataclass looks for its own module
spec.loader.exec_module(p4_compile)

COMPILER = p4_compile.compiler(p4_compile.TNA)

pytestmark = pytest.mark.compiled("tna")
ROWS = {
    "logical tables": "logical_tables",
    "SRAM blocks": "srams",
    "map RAM blocks": "map_rams",
    "TCAM blocks": "tcams",
    "ALUs of meters, registers and selectors": "meter_alus",
    "ALUs of counters": "statistics_alus",
    "gateways": "gateways",
}
STAGE = {"logical_tables": 16, "srams": 80, "map_rams": 48, "tcams": 24, "meter_alus": 4, "statistics_alus": 4}
"""The resources of a stage of a Tofino."""


@pytest.fixture(scope="module")
def resources():
    return json.loads((TNA / "resources.json").read_text())


@pytest.fixture(scope="module")
def schema():
    return {table["name"]: table for table in json.loads((TNA / "bf-rt.json").read_text())["tables"]}


def test_it_fits_the_chip(resources):
    assert resources["stages"]["used"] <= resources["stages"]["of"] == 12
    for stage in resources["by_stage"]:
        assert all(stage[name] <= most for name, most in STAGE.items()), stage
    for name in STAGE:
        assert resources[name] == sum(stage[name] for stage in resources["by_stage"]) > 0
    for containers in resources["phv_containers"].values():
        assert 0 < containers["used"] <= containers["of"]


def test_the_readme_has_the_figures_of_the_compiler(resources):
    text = (P4 / "tna" / "README.md").read_text().split("## Resources on the chip")[1].split("\n## ")[0]
    rows = {name.strip(): (int(used), int(of)) for name, used, of in re.findall(r"\| (.+?) \| (\d+) \| (\d+) \|", text)}
    assert rows.pop("stages") == (resources["stages"]["used"], resources["stages"]["of"])
    for width, containers in resources["phv_containers"].items():
        assert rows.pop(f"PHV containers of {width} bits") == (containers["used"], containers["of"])
    assert {name: used for name, (used, _) in rows.items()} == {name: resources[kind] for name, kind in ROWS.items()}


def test_the_schema_has_every_table_action_and_array_of_the_sources(schema):
    sources = read("tna")
    names = {name.rpartition(".")[2] for name in schema}
    actions = {
        action["name"].rpartition(".")[2] for table in schema.values() for action in table.get("action_specs", ())
    }
    assert set(sources.tables) <= names
    assert sources.arrays - {"share_meter"} <= names  # a direct meter is part of its table
    assert set(sources.actions) - {"refuse"} <= actions  # no table has it


def test_what_does_nothing_is_a_default_only(schema):
    """A route that does nothing leads to port 0; a threshold that does nothing is one of zero."""
    scopes = {
        table["name"]: action["action_scope"]
        for table in schema.values()
        for action in table.get("action_specs", ())
        if action["name"] == "NoAction"
    }
    assert len(scopes) > 1
    assert set(scopes.values()) == {"DefaultOnly"}, scopes


def test_a_budget_slot_is_one_access_to_each_register(schema):
    """The compiler puts a register into one stage, where a packet meets it once."""
    registers = [name for name, table in schema.items() if table["table_type"] == "Register"]
    assert sorted(name.rpartition(".")[2] for name in registers) == [
        "queue_depth",
        "reported_depth",
        "slot_owner",
        "slot_spent",
    ]
    owner = schema["pipe.DlcpIngress.selective_drop.slot_owner"]
    fields = [field["singleton"]["name"].rpartition(".")[2] for field in owner["data"]]
    assert fields == ["owner", "used_ticks"]


def test_the_files_name_no_folder_of_the_machine_that_made_them():
    for name in p4_compile.TNA.outputs:
        assert re.findall(r'"(?:/|~)[^"]*"', (TNA / name).read_text()) == []


def test_the_length_that_the_parser_takes_is_that_of_the_constants():
    constants = (P4 / "shared" / "constants.p4").read_text()
    shortest = int(re.search(r"DLCP_UDP_LENGTH_MIN = (\d+);", constants)[1])
    refused = re.findall(r"_MASK, (\d+) &&& (0x\w+)\): accept", (P4 / "tna" / "parser.p4").read_text())
    short = {length for length in range(1 << 16) for value, mask in refused if length & int(mask, 16) == int(value)}
    assert short == set(range(shortest))


def test_without_the_compiler_its_output_stays_and_it_is_said_why(tmp_path):
    copied = shutil.copytree(P4, tmp_path / "p4")
    environment = {"P4C": "true", "P4C_TOFINO": "no-such-compiler", "PATH": "/usr/bin:/bin"}
    script = (
        "import sys; sys.argv = ['compile.py']; import compile as c; "
        "c.compile_program = lambda target: [(target / n).write_text('x') for n in c.BMV2.outputs]; sys.exit(c.main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=copied, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "p4/build/tna: left as it is. no-such-compiler is not on PATH" in result.stdout
    assert (copied / "build/tna/bf-rt.json").read_bytes() == (TNA / "bf-rt.json").read_bytes()


def test_a_change_of_the_sources_is_noticed(tmp_path):
    copied = shutil.copytree(P4, tmp_path / "p4")
    assert p4_compile.differences(copied, (p4_compile.TNA,)) == []
    (copied / "tna" / "drop.p4").write_text("// nothing\n")
    (problem,) = p4_compile.differences(copied, (p4_compile.TNA,))
    assert "sources changed" in problem
    (copied / "build/tna/resources.json").unlink()
    assert p4_compile.differences(copied, (p4_compile.TNA,)) == [
        "p4/build/tna/resources.json is missing: run `make p4`"
    ]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER}, p4c's back end for Tofino, is not installed")
@pytest.mark.timeout(1200)
def test_compiling_again_gives_the_same_files(tmp_path):
    here, then = p4_compile.compiler_version(p4_compile.TNA), p4_compile.recorded(program=p4_compile.TNA)["compiler"]
    p4_compile.compile_tna(tmp_path)
    if here != then:
        pytest.skip(f"compiled with {COMPILER} {then}, and here is {here}")
    for name in p4_compile.TNA.outputs:
        assert (tmp_path / name).read_bytes() == (TNA / name).read_bytes(), name
