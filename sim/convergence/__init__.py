# SPDX-License-Identifier: Apache-2.0
"""Steps to accuracy as a function of loss, from the data beside this module."""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np

from dlcp.document import Document
from dlcp.suggestion import nearest

_FILES: Final = ("published", "measured")


@dataclass(frozen=True, slots=True)
class ConvergenceCurve:
    """How many additional steps loss costs.

    Parameters
    ----------
    points
        (share of gradient packets lost, steps to the target accuracy over those without loss), ascending.
    measured
        Whether it was measured by us; otherwise it is from a paper.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    measured: bool
    source: str

    def steps_factor(self, loss_ratio: float) -> float:
        """Return the factor by which steps increase: linear between points, constant beyond the last one."""
        losses, factors = np.array(self.points).T
        return float(np.interp(loss_ratio, losses, factors))


@dataclass(frozen=True, slots=True)
class _File:
    curves: tuple[ConvergenceCurve, ...]


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
