# SPDX-License-Identifier: Apache-2.0
"""An experiment and a simulated packet cross no more files than `sim/README.md` says."""

import re

import pytest

from tests.architecture.simulated_walk import walk_of_a_packet, walk_of_an_experiment
from tests.architecture.walk import ROOT

EXPERIMENT_FILES_MAX = 29
PACKET_FILES_MAX = 16
"""The present counts."""


@pytest.mark.parametrize(
    ("walk", "most"), [(walk_of_an_experiment, EXPERIMENT_FILES_MAX), (walk_of_a_packet, PACKET_FILES_MAX)]
)
def test_the_way_stays_short(walk, most):
    files = walk()
    assert len(files) <= most, files


def test_the_readme_says_how_many_files_they_are():
    page = " ".join((ROOT / "sim" / "README.md").read_text().split())
    found = re.search(r"crosses (\d+) files from its description to its plots, and a packet (\d+)", page)
    assert found
    assert tuple(map(int, found.groups())) == (EXPERIMENT_FILES_MAX, PACKET_FILES_MAX)
