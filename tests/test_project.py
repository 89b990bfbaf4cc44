# SPDX-License-Identifier: Apache-2.0
"""Properties of the project as a whole."""

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest

import dlcp
from dlcp.cli import COMMANDS
from dlcp.doctor.examination import OLDEST_PYTHON, OLDEST_TORCH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE_FOLDERS = ("dlcp", "controller", "sim", "p4", "tests", ".ci")
PACKAGED = {"dlcp": "dlcp", "controller": "dlcp/controller", "sim": "dlcp/sim", "p4/build": "dlcp/switch/p4"}
"""Folders of the project, and where each is once installed."""
SOURCE_SUFFIXES = {".py", ".p4", ".lua", ".c", ".h", ".stf", ".sh"}
HEAVY = {"torch", "numba", "scapy", "msgspec", "rich", "jinja2", "sklearn", "mxnet", "tensorflow", "jax"}
HEAVY |= {"finsy", "grpc", "google", "yaml", "prometheus_client", "simpy", "matplotlib"}


def files(*folders):
    """Every file below the folders of the project, without what tools leave behind."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and not {"__pycache__", ".hypothesis"} & set(path.parts):
                yield path


def test_every_source_file_names_its_licence():
    sources = [path for path in files(*SOURCE_FOLDERS) if path.suffix in SOURCE_SUFFIXES or path.parent.name == ".ci"]
    assert len(sources) > 20
    unnamed = [
        str(path.relative_to(ROOT))
        for path in [*sources, ROOT / "Makefile"]
        if not any("SPDX-License-Identifier: Apache-2.0" in line for line in path.read_text().splitlines()[:2])
    ]
    assert unnamed == []


def test_tests_import_as_packages():
    texts = {path: path.read_text() for path in files("tests") if path.suffix == ".py"}
    assert {path.parent for path in texts} == {path.parent for path in texts if path.name == "__init__.py"}
    own = "|".join(sorted({path.stem for path in texts} - {"__init__", "__main__"}))
    wrong = re.compile(rf"^\s*(?:from|import) (?:{own})\b|\bsys\.path\.(?:append|extend|insert)\b", re.MULTILINE)
    found = {path.relative_to(ROOT).as_posix() for path, text in texts.items() if wrong.search(text)}
    assert found == set(), "write: from tests.folder.module import name"


@pytest.mark.parametrize(
    "module", ["dlcp", "dlcp.wire", "dlcp.wire.dissector", "dlcp.values.tags", "dlcp.inputs.configuration", "dlcp.cli"]
)
def test_the_core_imports_nothing_heavy(module):
    script = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert set(run.stdout.split()) & HEAVY == set()


def test_the_layers_hold():
    pytest.importorskip("importlinter", reason="layers are checked with import-linter: pip install dlcp[dev]")
    call = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], no_cache=True))"
    command = [sys.executable, "-c", call, str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout


def test_only_what_draws_loads_matplotlib():
    commands = [f"dlcp.commands.{name}" for name in COMMANDS]
    script = f"import sys, {', '.join(commands)}, dlcp.demo.run; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_no_two_public_classes_or_constants_share_a_name():
    classes, constants = defaultdict(set), defaultdict(set)
    for path in files("dlcp", "controller", "sim"):
        for node in ast.parse(path.read_text()).body if path.suffix == ".py" else ():
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path.relative_to(ROOT).as_posix())
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for name in ast.walk(node):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        constants[name.id].add(path.relative_to(ROOT).as_posix())
    # A type variable has one letter.
    constants = {name: places for name, places in constants.items() if name.isupper() and len(name) > 1}
    for found in (classes, constants):
        assert len(found) > 100
        shared = {name: places for name, places in found.items() if name[0] != "_" and len(places) > 1}
        assert shared == {}, "which one a reader sees must be clear from its name"


def test_p4_is_no_python_package():
    assert not (ROOT / "p4" / "__init__.py").exists(), "p4/__init__.py would hide the p4 package of P4Runtime's stubs"


def test_the_version_stands_in_one_place():
    version = dlcp.__version__
    assert "version" not in PROJECT["project"]
    assert metadata.version("dlcp") == version
    places = [
        str(path.relative_to(ROOT))
        for path in [*files("dlcp"), ROOT / "pyproject.toml"]
        if path.suffix in (".py", ".toml") and re.search(rf"""["']{re.escape(version)}["']""", path.read_text())
    ]
    assert places == ["dlcp/__init__.py"]


def test_the_least_versions_are_those_that_the_doctor_asks_for():
    oldest_python, oldest_torch = (".".join(map(str, version)) for version in (OLDEST_PYTHON, OLDEST_TORCH))
    assert PROJECT["project"]["requires-python"] == f">={oldest_python}"
    assert PROJECT["project"]["optional-dependencies"]["torch"] == [f"torch>={oldest_torch}"]
    for page in ("docs/install.md", "dlcp/examples/frameworks/README.md"):
        assert f"PyTorch {oldest_torch} or newer" in (ROOT / page).read_text()


def test_the_changelog_is_about_this_version():
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", dlcp.__version__]


def test_a_wheel_holds_every_file_that_the_package_needs(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel takes setuptools 77")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "README.md")
    for folder in PACKAGED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    script = "from setuptools import build_meta; build_meta.build_wheel('wheels')"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    needed = {
        f"{package}/{path.relative_to(tmp_path / folder).as_posix()}"
        for folder, package in PACKAGED.items()
        for path in (tmp_path / folder).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".c", ".h") and "tna" not in path.parts
    }
    assert needed <= packed, "declare the patterns of these files in pyproject.toml"
    assert not [name for name in packed if name.endswith((".c", ".h"))], "the library says what it was compiled from"
    assert "dlcp/native/_native.abi3.so" in packed
    assert wheel.name.endswith("-cp310-abi3-linux_x86_64.whl") or platform.machine() != "x86_64"
    assert {name.partition("/")[0] for name in packed if ".dist-info/" not in name} == {"dlcp"}
    assert {"dlcp/switch/p4/dlcp.json", "dlcp/switch/p4/dlcp.p4info.txtpb", "dlcp/wire/dissector.lua"} <= packed


def test_the_commands_of_the_readme_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    told = set(re.findall(r"(?:^|`)make ([a-z0-9]+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= told <= set(re.findall(r"^([a-z0-9]+):", makefile, re.MULTILINE))


def test_every_relative_link_in_the_documents_leads_somewhere():
    documents = [
        *ROOT.glob("*.md"),
        *(path for path in files("dlcp", "controller", "sim", "p4", "docs") if path.suffix == ".md"),
    ]
    assert {"README.md", "architecture.md", "glossary.md", "CONTRIBUTING.md"} <= {
        document.name for document in documents
    }
    broken = [
        f"{document.relative_to(ROOT)}: {link}"
        for document in documents
        for link in re.findall(r"\]\(([^)#:]+)[^)]*\)", document.read_text())
        if link not in ("http", "https") and not (document.parent / link).exists()
    ]
    assert broken == []


def test_the_files_that_the_architecture_page_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:dlcp|controller|sim|p4|tests)/[\w./]*)`", page))
    assert len(named) > 30
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_continuous_integration_runs_what_the_readme_says():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"\nmake test 2>&1 \| tee out/test.log \|\| status=\$\?\n", script.read_text())
