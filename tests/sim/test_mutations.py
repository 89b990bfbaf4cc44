# SPDX-License-Identifier: Apache-2.0
"""Damaged files of all formats are refused in words, or simulated rightly; `tests.sim.mutations` damages thousands."""

import pytest

from tests.sim.mutations import FORMATS, fault, faults, run, warm_up

pytest.importorskip("numba")
COUNT = 12
"""Files of each format in the suite; a thousand take some minutes."""


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    warm_up()


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_or_simulated(name) -> None:
    if name == "infrastructure":
        pytest.importorskip("infragraph")
    assert not list(faults(name, COUNT, seed=7))


@pytest.mark.parametrize("name", FORMATS)
def test_the_undamaged_file_is_simulated(name, tmp_path, monkeypatch) -> None:
    if name == "infrastructure":
        pytest.importorskip("infragraph")
    import random

    from tests.sim import mutations

    for damaging in ("damaged_content", "damaged_text", "damaged_bytes"):
        monkeypatch.setattr(mutations, damaging, lambda content, _: content)
    command = FORMATS[name](tmp_path, random.Random(1))
    outcome = run(command)
    assert (outcome.status, fault(command, outcome)) == (0, ""), outcome.printed
