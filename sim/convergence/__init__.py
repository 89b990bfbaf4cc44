# SPDX-License-Identifier: Apache-2.0
"""Steps to accuracy as a function of what is lost or deferred, from the data beside this module.

``published.yaml`` has what papers say of loss, ``measured.yaml`` what `dlcp.sim.convergence.measure` found, and
``shortfall.yaml`` what ``dlcp bench convergence --curves`` did.
"""

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from dlcp.document import Document, PlaceError
from dlcp.suggestion import nearest

_FILES: Final = ("published", "measured", "shortfall")


@dataclass(frozen=True, slots=True)
class ConvergenceCurve:
    """How many additional steps it costs to lose or to defer.

    Parameters
    ----------
    points
        (share of packets lost or deferred, steps to the target over those of a run that lacks nothing), from (0, 1) on,
        by ascending share.
    measured
        Whether it was measured by us; otherwise it is from a paper.
    reached
        The largest share of which every run reached the target. Beyond it factors are too small.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    measured: bool
    source: str
    reached: float = math.inf

    def __post_init__(self) -> None:
        if list(self.points[:1]) != [(0.0, 1.0)]:
            raise PlaceError("a curve begins with [0, 1]: where nothing is missing, steps are as many", "points")
        for number, ((before, _), (share, factor)) in enumerate(pairwise(self.points), 1):
            if not (before < share < 1 and 0 < factor < math.inf):
                raise PlaceError("shares ascend and are below 1, and factors are above 0", "points", number)

    @property
    def reaches(self) -> float:
        """Return the largest share of which it says something."""
        return self.points[-1][0]

    def steps_factor(self, share: float) -> float:
        """Return the factor by which steps increase: linear between points, constant beyond the last one."""
        shares, factors = np.array(self.points).T
        return float(np.interp(share, shares, factors))


@dataclass(frozen=True, slots=True)
class _File:
    curves: tuple[ConvergenceCurve, ...]

    def __post_init__(self) -> None:
        names = [curve.name for curve in self.curves]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise PlaceError(f"a curve before it is called {name!r}, too", "curves", number, "name")


def read(path: Path) -> tuple[ConvergenceCurve, ...]:
    """Return the curves in a file.

    Raises
    ------
    DocumentError
        It is not what it should be; the message says where.
    """
    return Document(path).convert(_File).curves


@cache
def curves() -> dict[str, ConvergenceCurve]:
    """Return all curves by name."""
    found: dict[str, ConvergenceCurve] = {}
    for name in _FILES:
        with resources.as_file(resources.files("dlcp.sim.convergence").joinpath(f"{name}.yaml")) as path:
            found |= {curve.name: curve for curve in read(Path(path))}
    return found


def curve(name: str) -> ConvergenceCurve:
    """Return a curve.

    Raises
    ------
    ValueError
        There is no curve of that name.
    """
    if name not in curves():
        raise ValueError(f"there is no convergence curve {name!r}{nearest(name, curves())}")
    return curves()[name]
