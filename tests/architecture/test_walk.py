# SPDX-License-Identifier: Apache-2.0
"""The walk of a gradient is as short as docs/architecture.md says, and goes where it says."""

import re

import pytest

from tests.architecture.walk import ROOT, walk_of_a_bucket

FILES_MAX = 17
MOVES_MAX = 72
C_FUNCTIONS_MAX = 7
FRAMES_MAX = 13
"""The present counts (16 files, 67 moves, 7 C functions), and what one late acknowledgement adds."""


@pytest.fixture(scope="module")
def walk():
    return walk_of_a_bucket()


def test_the_way_of_a_gradient_stays_short(walk):
    assert len(walk.files) <= FILES_MAX, walk.files
    assert len(walk.calls) <= MOVES_MAX, walk.calls
    assert len(walk.crossings) <= C_FUNCTIONS_MAX, walk.crossings
    assert len(walk.frames) <= FRAMES_MAX, walk.frames


def test_the_way_of_a_gradient_is_the_documented_one(walk):
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| `(dlcp/[\w/]+\.py)`", page, re.MULTILINE)
    assert len(rows) >= 8
    assert set(rows) <= set(walk.files)


def test_c_calls_no_python():
    binding = (ROOT / "dlcp" / "transport").rglob("*.py")
    callers = [path for path in binding if "CFUNCTYPE" in path.read_text()]
    assert callers == [], "what became complete is an event, read once the batch is through"
