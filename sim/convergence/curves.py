# SPDX-License-Identifier: Apache-2.0
"""Steps to accuracy as a function of loss, read from the data beside this module."""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np

from dlcp.document import Document
from dlcp.suggestion import nearest

FILES: Final = ("published", "measured")


@dataclass(frozen=True, slots=True)
class Curve:
    """What loss costs.

    Parameters
    ----------
    points
        (share of gradient packets lost, steps to the target accuracy over those without loss), ascending.
    measured
        Whether we measured it; otherwise it is from a paper.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    measured: bool
    source: str

    def steps_factor(self, loss_ratio: float) -> float:
        """Return how many times as many steps are needed; by line between points, constant beyond the last one."""
        losses, factors = np.array(self.points).T
        return float(np.interp(loss_ratio, losses, factors))

    def covers(self, loss_ratio: float) -> bool:
        """Return whether the curve reaches that far."""
        return loss_ratio <= self.points[-1][0]


@dataclass(frozen=True, slots=True)
class _File:
    curves: tuple[Curve, ...]


@cache
def curves() -> dict[str, Curve]:
    """Return all curves by name."""
    found: dict[str, Curve] = {}
    for name in FILES:
        with resources.as_file(resources.files("dlcp.sim.convergence").joinpath(f"{name}.yaml")) as path:
            found |= {curve.name: curve for curve in Document(Path(path)).convert(_File).curves}
    return found


def curve(name: str) -> Curve:
    """Return a curve.

    Raises
    ------
    ValueError
        There is none of that name.
    """
    if name not in curves():
        raise ValueError(f"there is no convergence curve {name!r}{nearest(name, curves())}")
    return curves()[name]
