# SPDX-License-Identifier: Apache-2.0
"""The C files call in one direction only: no file calls another that calls it back, directly or through others."""

import shutil
import subprocess
from graphlib import CycleError, TopologicalSorter

import pytest

from dlcp import native
from tests.native.compiled import can_compile, compiler

pytestmark = pytest.mark.skipif(not (can_compile() and shutil.which("nm")), reason="needs DLCP's sources, cc and nm")


def calls_between(sources, folder):
    """Return which files each file calls, by name, as their object files tell."""
    defined, needed = {}, {}
    for source in sources:
        target = folder / f"{source.stem}.o"
        subprocess.run([*compiler(), "-std=gnu11", "-c", str(source), "-o", str(target)], check=True, timeout=60)
        symbols = subprocess.run(["nm", str(target)], capture_output=True, text=True, check=True, timeout=60).stdout
        for *_, kind, name in map(str.split, symbols.splitlines()):
            if kind == "U":
                needed.setdefault(source.stem, set()).add(name)
            elif kind.isupper():
                defined[name] = source.stem
    return {name: {defined[each] for each in needed.get(name, ()) if each in defined} for name in defined.values()}


def test_no_circle_leads_through_c_files(tmp_path):
    calls = calls_between(sorted(native.FOLDER.glob("*.c")), tmp_path)
    assert {"tx", "rx", "io"} <= calls["engine"]
    order = list(TopologicalSorter(calls).static_order())
    assert order[-1] == "engine" or not any("engine" in called for called in calls.values())


def test_a_circle_would_be_found(tmp_path):
    for name, other in (("one", "two"), ("two", "three"), ("three", "one")):
        (tmp_path / f"{name}.c").write_text(f"void {other}(void);\nvoid {name}(void) {{ {other}(); }}\n")
    with pytest.raises(CycleError):
        list(TopologicalSorter(calls_between(sorted(tmp_path.glob("*.c")), tmp_path)).static_order())
