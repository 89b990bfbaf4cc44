# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom, and their files hold what they print."""

import re

import pytest

pytest.importorskip("nbclient", reason="notebooks are run with nbclient: pip install 'dlcp[dev]'")
pytest.importorskip("ipykernel")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
pytest.importorskip("torch")
pytest.importorskip("simpy")

import nbformat

from tests.docs import notebooks
from tests.train.preloaded import Preloaded, write_programs

LARGEST_BYTES = 200_000
REPEATABLE = {"simulator"}
"""Notebooks that print the same each time; others print measured times."""


def kinds(cell):
    """Return what kinds of output a cell has: text that was printed, and types of what was shown."""
    return {kind for output in cell.get("outputs", ()) for kind in output.get("data", [output.output_type])}


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_file_has_the_outputs(path, tmp_path):
    kept = nbformat.read(path, as_version=4)
    assert path.stat().st_size < LARGEST_BYTES
    assert not re.search(r"/(home|root|tmp|work)/|iopub", path.read_text()), "no paths of one machine, no times"
    (programs := tmp_path / "programs").mkdir()
    (folder := tmp_path / "folder").mkdir()
    with Preloaded() as python:
        write_programs(python, programs)
        done = notebooks.execute(path, folder, [programs])
    for before, after in zip(kept.cells, done.cells, strict=True):
        assert kinds(before) == kinds(after), f"run: python -m tests.docs.notebooks\n{after.source}"
    if path.stem in REPEATABLE:
        assert notebooks.printed(kept) == notebooks.printed(done), "run: python -m tests.docs.notebooks"
