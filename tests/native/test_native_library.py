# SPDX-License-Identifier: Apache-2.0
"""The compiled library is optional: built where there is a compiler, used where it fits, and done without elsewhere."""

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
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
    native._load.cache_clear()
    yield
    native._load.cache_clear()


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


def build(tree, **environment):
    """Build as an installation does; return what it said, and the library if there is one."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=tree, env=environment, timeout=100, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, tree / "dlcp/native/_native.abi3.so"


def look_at(monkeypatch, folder):
    monkeypatch.setattr(native, "FOLDER", folder)
    monkeypatch.setattr(native, "LIBRARY", folder / "_native.abi3.so")
    monkeypatch.delenv("DLCP_NATIVE", raising=False)
    native._load.cache_clear()


def test_what_is_in_use_is_said():
    assert native.status().startswith("NumPy: " if native.library() is None else "native: /")


def test_it_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv("DLCP_NATIVE", "0")
    assert native.library() is None
    assert native.status() == "NumPy: DLCP_NATIVE=0"


def test_it_can_be_switched_off_for_a_while_in_one_thread():
    usual = native.library()
    with ThreadPoolExecutor(1) as pool, native.switched_off():
        assert native.library() is None
        assert pool.submit(native.library).result(10) is usual
    assert native.library() is usual


def test_without_a_library_the_reason_is_said(fresh, monkeypatch, tmp_path):
    look_at(monkeypatch, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native.library() is None
    assert "no C compiler" in native.status()
    native._load.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "compiling failed" in native.status()


def test_a_library_that_does_not_load_is_done_without(fresh, monkeypatch, tmp_path):
    look_at(monkeypatch, tmp_path)
    native.LIBRARY.write_bytes(b"not a library")
    assert native.library() is None
    assert str(native.LIBRARY) in native.status()


@NEEDS_SOURCES
@NEEDS_SETUPTOOLS
@NEEDS_COMPILER
def test_it_is_built_and_used_until_its_sources_change(fresh, monkeypatch, tree):
    _, library = build(tree)
    look_at(monkeypatch, library.parent)
    assert isinstance(native.library(), ctypes.CDLL)
    assert native.status() == f"native: {library}"
    with (library.parent / "sources.c").open("a") as source:
        source.write("/* changed */\n")
    native._load.cache_clear()
    assert native.library() is None
    assert "sources have changed" in native.status()


@NEEDS_SOURCES
@NEEDS_SETUPTOOLS
@NEEDS_COMPILER
def test_it_is_used_where_no_sources_are_as_in_a_wheel(fresh, monkeypatch, tree):
    _, library = build(tree)
    for source in [*library.parent.glob("*.c"), *library.parent.glob("*.h")]:
        source.unlink()
    look_at(monkeypatch, library.parent)
    assert native.status() == f"native: {library}"


@NEEDS_SOURCES
@NEEDS_SETUPTOOLS
def test_without_a_compiler_the_installation_goes_on_and_says_what_it_does_without(tree):
    said, library = build(tree, CC="/bin/false")
    assert "without its compiled data path" in said
    assert "apt-get install gcc" in said
    assert not library.exists()


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
