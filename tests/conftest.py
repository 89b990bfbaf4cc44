# SPDX-License-Identifier: Apache-2.0
"""Marks the fast tests, which `make check` runs, and holds them to it.

A test is fast if its module matches a line of ``fast.txt``: paths from this folder, with wildcards, ``!`` before what
is left out. A fast test starts no process, trains nothing and takes well below a second on an idle core.
"""

import fnmatch
import os
import subprocess
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def is_fast(path: str, lines: list[str]) -> bool:
    """Return whether a module is among the fast ones; the last line that matches its path decides."""
    matching = [line for line in lines if fnmatch.fnmatch(path, line.removeprefix("!"))]
    return bool(matching) and not matching[-1].startswith("!")


def pytest_collection_modifyitems(items):
    lines = [line for line in (HERE / "fast.txt").read_text().splitlines() if not line.startswith("#")]
    for item in items:
        if item.path.is_relative_to(HERE) and is_fast(item.path.relative_to(HERE).as_posix(), lines):
            item.add_marker(pytest.mark.fast)


@pytest.fixture(autouse=True)
def _fast_tests_start_no_process(request, monkeypatch):
    if request.node.get_closest_marker("fast") is None:
        return

    def refuse(*_arguments, **_named):
        raise AssertionError("a fast test starts a process: take its module out of tests/fast.txt")

    for owner, name in ((subprocess.Popen, "__init__"), (BaseProcess, "start"), (os, "fork"), (os, "posix_spawn")):
        monkeypatch.setattr(owner, name, refuse)
