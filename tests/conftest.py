# SPDX-License-Identifier: Apache-2.0
"""Marks the fast tests, which `make check` runs, and holds them to it; skips tests of files that are out of date.

A test is fast if its module matches a line of ``fast.txt``: paths from this folder, with wildcards, ``!`` before what
is left out. A fast test starts no process, trains nothing and takes well below a second on an idle core.
"""

import fnmatch
import functools
import gc
import os
import subprocess
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.p4 import outdated

HERE = Path(__file__).parent
LINES = [line for line in (HERE / "fast.txt").read_text().splitlines() if not line.startswith("#")]

with suppress(ImportError):  # the environments of some frameworks go without
    from hypothesis import settings

    # The same examples in every run, and as much time as a busy machine takes for one.
    settings.register_profile("dlcp", derandomize=True, deadline=None)
    settings.load_profile("dlcp")


@functools.cache
def is_fast(path: Path) -> bool:
    """Return whether a module is among the fast ones; the last line that matches its path decides."""
    name = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""
    matching = [line for line in LINES if fnmatch.fnmatch(name, line.removeprefix("!"))]
    return bool(matching) and not matching[-1].startswith("!")


def pytest_ignore_collect(collection_path, config):
    """Leave the other modules unread where only fast ones are asked for: reading them takes longer than these tests."""
    only_fast = config.option.markexpr == "fast" and collection_path.name.startswith("test_")
    return True if only_fast and not is_fast(collection_path) else None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: is_fast(item.path))  # last: what is short evens out how long workers take
    for item in items:
        if is_fast(item.path):
            item.add_marker(pytest.mark.fast)
    outdated.mark(items)


def pytest_terminal_summary(terminalreporter):
    outdated.summarize(terminalreporter)


@pytest.fixture(autouse=True, scope="session")
def _own_configuration_folder(tmp_path_factory):
    """Keep the user's key file (``~/.config/dlcp/key``) out of tests, and tests out of it; processes inherit this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _collector_skips_what_stays():
    """Spare Python's collector the modules and the collected tests: tests that call it would take seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fast_tests_start_no_process(request, monkeypatch):
    if request.node.get_closest_marker("fast") is None:
        return

    def refuse(*_arguments, **_named):
        raise AssertionError("a fast test starts a process: take its module out of tests/fast.txt")

    for owner, name in ((subprocess.Popen, "__init__"), (BaseProcess, "start"), (os, "fork"), (os, "posix_spawn")):
        monkeypatch.setattr(owner, name, refuse)
