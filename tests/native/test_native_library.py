# SPDX-License-Identifier: Apache-2.0
"""The compiled library: built where there is a compiler, and where it is missing or does not fit, that is said."""

import contextlib
import os
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from tests.native.compiled import ROOT, can_compile


def has_setuptools():
    with contextlib.suppress(metadata.PackageNotFoundError):
        return int(metadata.version("setuptools").partition(".")[0]) >= 77
    return False


NEEDS_SETUPTOOLS = pytest.mark.skipif(not has_setuptools(), reason="needs setuptools 77")
NEEDS_COMPILER = pytest.mark.skipif(
    not can_compile(), reason="needs DLCP's source tree, a C compiler and Python's headers"
)


@pytest.fixture
def uncompiled(tmp_path):
    """DLCP's source tree before compilation."""
    shutil.copytree(ROOT / "dlcp", tmp_path / "dlcp", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def python_in(tree, *words):
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=tree, env=environment, timeout=100, text=True, capture_output=True)


def refusal_in(tree, module="dlcp.native"):
    """Return why a tree refuses to be imported, the last line of the error."""
    done = python_in(tree, "-c", f"import {module}")
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_tree_that_is_not_compiled_says_what_to_do(uncompiled):
    said = refusal_in(uncompiled, "dlcp.transport")
    missing = uncompiled / "dlcp/native/_native.abi3.so"
    assert said.startswith(f"ImportError: DLCP was not compiled, {missing} is missing: install a C compiler")
    assert "apt-get install build-essential python3-dev" in said
    assert "a wheel that `make dist` has built" in said


def test_a_library_that_does_not_load_is_an_error_that_names_it(uncompiled):
    library = uncompiled / "dlcp/native/_native.abi3.so"
    library.write_bytes(b"not a library")
    said = refusal_in(uncompiled)
    assert said.startswith(f"ImportError: DLCP's compiled library does not load, {library}")
    assert ": install a C compiler" in said


@pytest.mark.parametrize("words", [["doctor"], ["train", "--", "script.py"]], ids=lambda words: words[0])
def test_commands_of_an_uncompiled_tree_say_so_in_a_line(uncompiled, words):
    done = python_in(uncompiled, "-m", "dlcp.cli", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("dlcp: DLCP was not compiled")


@NEEDS_SETUPTOOLS
@NEEDS_COMPILER
def test_it_is_built_and_used_until_its_sources_change_or_are_gone_as_in_a_wheel(uncompiled):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, uncompiled)
    done = python_in(uncompiled, "setup.py", "build_ext", "--inplace")
    assert done.returncode == 0, done.stderr
    use = "-c", "from dlcp import native; print(native.LIBRARY, native.lib.PATHS_MAX)"
    assert python_in(uncompiled, *use).stdout == f"{uncompiled}/dlcp/native/_native.abi3.so 64\n"
    sources = [*uncompiled.glob("dlcp/native/*.c"), *uncompiled.glob("dlcp/native/*.h")]
    with sources[0].open("a") as source:
        source.write("/* changed */\n")
    assert "sources of DLCP have changed since" in refusal_in(uncompiled)
    for source in sources:
        source.unlink()
    assert python_in(uncompiled, *use).returncode == 0
