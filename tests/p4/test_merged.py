# SPDX-License-Identifier: Apache-2.0
"""The example of another program with DLCP's controls compiles, and handles packets as its packet test says."""

import shutil
import subprocess

import pytest

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from dlcp.switch import Program
from tests.p4.p4source import P4, load_compile
from tests.packet import stf

EXAMPLES = P4 / "examples"
COMPILER = load_compile().compiler()

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """The example, compiled as p4/README.md says."""
    target = tmp_path_factory.mktemp("merged") / "merged.json"
    options = ["--std", "p4-16", "--Wdisable=unused", "--Werror", "-o", str(target)]
    done = subprocess.run(
        [COMPILER, *options, str(EXAMPLES / "merged.p4")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("backend", ["python", "numba"])
def test_its_packets_are_routed_by_it_and_dropped_by_dlcp(merged, backend):
    if backend == "numba":
        pytest.importorskip("numba")
    outcome = stf.run(stf.read(EXAMPLES / "merged.stf"), stf.BuiltIn(Program.load(merged, backend=backend)))
    assert outcome.passed, outcome.failures
    assert outcome.packets > 10
