# SPDX-License-Identifier: Apache-2.0
"""Steps to accuracy as a function of loss and precision, from the data files next to this module.

``published.json`` has curves made from published bounds on loss; each cites its sentence. ``measured.json`` has the
results of ``python -m tests.bench.digits_loss``, and ``shortfall.json`` those of ``python -m tests.bench convergence
--curves``. The simulator uses them to convert loss and precision to additional steps.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from dlcp.inputs.error_text import nearest

_FILES: Final = ("published", "measured", "shortfall")
COST_OF_PRECISION: Final = "precision"
"""Fewer bits per value in all contributions and averages; the share is 1 - bits / 32."""


@dataclass(frozen=True, slots=True)
class ConvergenceCurve:
    """The additional steps that loss or lower precision costs.

    Parameters
    ----------
    points
        Pairs of a share of packets lost, or of bits left out, and the steps to the target relative to a run without.
        The first is (0, 1); shares ascend.
    measured
        Whether we measured it; otherwise it is from a paper.
    reached
        The largest share at which every run reached the target. At larger shares, factors are too small.

    Raises
    ------
    ValueError
        The points do not form a curve; the message says why.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    measured: bool
    source: str
    reached: float = math.inf

    def __post_init__(self) -> None:
        if list(self.points[:1]) != [(0.0, 1.0)]:
            raise ValueError("a curve must begin with [0, 1]: without loss, the number of steps is unchanged")
        for number, ((before, _), (share, factor)) in enumerate(pairwise(self.points), 1):
            if not (before < share < 1 and 0 < factor < math.inf):
                raise ValueError(f"point {number}: shares must ascend below 1, and factors must be above 0")

    @property
    def reaches(self) -> float:
        """The largest share that the curve covers."""
        return self.points[-1][0]

    def steps_factor(self, share: float) -> float:
        """Return the factor by which steps increase: linear between points, constant beyond the last one."""
        shares, factors = np.array(self.points).T
        return float(np.interp(share, shares, factors))


def read(path: Path) -> dict[str, ConvergenceCurve]:
    """Return the curves in a file, by name.

    Raises
    ------
    ValueError
        The file is not in the format of :func:`write`; the message says where.
    """
    found: dict[str, ConvergenceCurve] = {}
    for number, entry in enumerate(json.loads(path.read_text(encoding="utf-8"))["curves"]):
        try:
            curve = ConvergenceCurve(**entry | {"points": tuple(map(tuple, entry["points"]))})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path}, curve {number}: {error}") from None
        if curve.name in found:
            raise ValueError(f"{path}, curve {number}: duplicate name {curve.name!r}")
        found[curve.name] = curve
    return found


def write(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write curves, one per line; each has the fields of :class:`ConvergenceCurve`."""
    lines = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    path.write_text(f'{{"curves": [\n  {lines}\n]}}\n', encoding="utf-8")


@cache
def curves() -> dict[str, ConvergenceCurve]:
    """Return all curves by name."""
    found: dict[str, ConvergenceCurve] = {}
    for name in _FILES:
        with resources.as_file(resources.files("dlcp.convergence").joinpath(f"{name}.json")) as path:
            found |= read(path)
    return found


def curve(name: str) -> ConvergenceCurve:
    """Return a curve.

    Raises
    ------
    ValueError
        Unknown curve.
    """
    if name not in curves():
        raise ValueError(f"unknown convergence curve {name!r}{nearest(name, curves())}")
    return curves()[name]
