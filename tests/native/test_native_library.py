# SPDX-License-Identifier: Apache-2.0
"""The compiled library: built where there is a compiler, and where it is missing or does not fit, that is said."""

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from dlcp import native

ROOT = Path(__file__).resolve().parents[2]
NEEDS_SOURCES = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs DLCP's source tree")


def has_setuptools():
    with contextlib.suppress(metadata.PackageNotFoundError):
        return int(metadata.version("setuptools").partition(".")[0]) >= 77
    return False


def can_compile():
    """Whether the compiler that setuptools takes is here, and the headers of the C library are too."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, "-x", "c", "-fsyntax-only", "-"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, input=b"#include <stdint.h>\n", capture_output=True, timeout=60).returncode == 0
    return False


NEEDS_SETUPTOOLS = pytest.mark.skipif(not has_setuptools(), reason="needs setuptools 77")
NEEDS_COMPILER = pytest.mark.skipif(not can_compile(), reason="needs a C compiler and the C library's headers")


@pytest.fixture
def fresh():
    """Make the next question look again at what is there."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.fixture
def tree(tmp_path):
    """A copy of what the library is built from."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "dlcp/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(
        ROOT / "dlcp/native", tmp_path / "dlcp/native", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return tmp_path


def build(tree):
    """Build as an installation does; return the library."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, timeout=100, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return tree / "dlcp/native/_native.abi3.so"


def look_at(monkeypatch, folder):
    monkeypatch.setattr(native, "FOLDER", folder)
    monkeypatch.setattr(native, "LIBRARY", folder / "_native.abi3.so")
    native.library.cache_clear()


def test_a_missing_library_is_an_error_that_says_what_to_do(fresh, monkeypatch, tmp_path):
    look_at(monkeypatch, tmp_path)
    with pytest.raises(ImportError) as refused:
        native.library()
    assert str(refused.value).startswith(f"DLCP was not compiled, {native.LIBRARY} is missing: install a C compiler")
    assert "apt-get install build-essential" in str(refused.value)
    assert "a wheel that `make dist` has built" in str(refused.value)


def test_a_library_that_does_not_load_is_an_error_that_names_it(fresh, monkeypatch, tmp_path):
    look_at(monkeypatch, tmp_path)
    native.LIBRARY.write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"compiled library does not load, .*_native.abi3.so.*: install a C compiler"):
        native.library()


@pytest.fixture
def uncompiled(tmp_path):
    """DLCP's source tree as nobody has compiled it."""
    shutil.copytree(ROOT / "dlcp", tmp_path / "dlcp", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def python_in(tree, *words):
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=tree, env=environment, timeout=100, text=True, capture_output=True)


def test_the_transport_of_an_uncompiled_tree_refuses_to_be_imported(uncompiled):
    done = python_in(uncompiled, "-c", "import dlcp.transport")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: DLCP was not compiled")


@pytest.mark.parametrize("words", [["doctor"], ["train", "--", "script.py"]], ids=lambda words: words[0])
def test_commands_of_an_uncompiled_tree_say_so_in_a_line(uncompiled, words):
    done = python_in(uncompiled, "-m", "dlcp.cli", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("dlcp: DLCP was not compiled")


@NEEDS_SOURCES
@NEEDS_SETUPTOOLS
@NEEDS_COMPILER
def test_it_is_built_and_used_until_its_sources_change(fresh, monkeypatch, tree):
    library = build(tree)
    look_at(monkeypatch, library.parent)
    assert native.library()._name == str(library)
    with (library.parent / "sources.c").open("a") as source:
        source.write("/* changed */\n")
    native.library.cache_clear()
    with pytest.raises(ImportError, match="sources of DLCP have changed since"):
        native.library()


@NEEDS_SOURCES
@NEEDS_SETUPTOOLS
@NEEDS_COMPILER
def test_it_is_used_where_no_sources_are_as_in_a_wheel(fresh, monkeypatch, tree):
    library = build(tree)
    for source in [*library.parent.glob("*.c"), *library.parent.glob("*.h")]:
        source.unlink()
    look_at(monkeypatch, library.parent)
    assert native.library()._name == str(library)


@NEEDS_SOURCES
def test_it_needs_no_headers_of_python():
    for source in (ROOT / "dlcp/native").glob("*.[ch]"):
        assert "Python.h" not in source.read_text(), f"{source.name} would not compile without Python's headers"


def test_addresses_are_those_of_the_arrays():
    array = np.arange(10, dtype=np.float32)
    fixed = array.copy()
    fixed.flags.writeable = False
    empty = np.empty(0, np.uint8)
    for each in (array, fixed, array[3:]):
        seen = (ctypes.c_float * len(each)).from_address(ctypes.cast(native.address(each), ctypes.c_void_p).value)
        assert list(seen) == each.tolist()
    native.address(empty)
