# SPDX-License-Identifier: Apache-2.0
"""Steps to accuracy as a function of what is lost or deferred, from the data beside this module.

``published.json`` has what papers say of loss: bounds, of which curves were made; each names the sentence it comes
from. ``measured.json`` has what `dlcp.sim.convergence` found, and ``shortfall.json`` what ``python -m tests.bench
convergence --curves`` did. The simulator turns loss and deferral into additional steps by them; the rules of ``adapt``
and ``dlcp advise`` (:mod:`dlcp.tuning.rules`) charge with these steps whatever makes a step shorter.
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

from dlcp.error_text import nearest

_FILES: Final = ("published", "measured", "shortfall")
MEASURED_OPTIMIZERS: Final = ("sgd", "adamw")
"""What curves of deferral and of loss were measured with."""
COST_OF_LOSS: Final = "loss"
COST_OF_DEFERRAL: Final = "deferral"
"""Of contributions to one rank, and of all averages."""
COST_OF_DEFERRAL_TO_ALL: Final = "deferral_servers"
"""Of all contributions, and of all averages."""


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

    Raises
    ------
    ValueError
        The points are no such curve.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    measured: bool
    source: str
    reached: float = math.inf

    def __post_init__(self) -> None:
        if list(self.points[:1]) != [(0.0, 1.0)]:
            raise ValueError("a curve begins with [0, 1]: where nothing is missing, steps are as many")
        for number, ((before, _), (share, factor)) in enumerate(pairwise(self.points), 1):
            if not (before < share < 1 and 0 < factor < math.inf):
                raise ValueError(f"point {number}: shares ascend and are below 1, and factors are above 0")

    @property
    def reaches(self) -> float:
        """Return the largest share of which it says something."""
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
        It is not what :func:`write` writes; the message says where.
    """
    found: dict[str, ConvergenceCurve] = {}
    for number, entry in enumerate(json.loads(path.read_text(encoding="utf-8"))["curves"]):
        try:
            curve = ConvergenceCurve(**entry | {"points": tuple(map(tuple, entry["points"]))})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path}, curve {number}: {error}") from None
        if curve.name in found:
            raise ValueError(f"{path}, curve {number}: a curve before it is called {curve.name!r}, too")
        found[curve.name] = curve
    return found


def write(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write curves, the fields of :class:`ConvergenceCurve` each, one in a line."""
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
        There is no curve of that name.
    """
    if name not in curves():
        raise ValueError(f"there is no convergence curve {name!r}{nearest(name, curves())}")
    return curves()[name]


def steps_factor(what: str, share: float) -> float | None:
    """Return how many times as many steps it takes to the same accuracy, with the optimizer that takes more.

    Where a curve has fewer steps than training that lacks nothing, that is the noise of its seeds, and none are saved.
    Of loss, what papers say counts where nothing was measured.

    Parameters
    ----------
    what
        ``COST_OF_LOSS``, ``COST_OF_DEFERRAL`` or ``COST_OF_DEFERRAL_TO_ALL``.
    share
        Of the packets of a step.

    Returns
    -------
    At least 1; None if so much was not measured, or not every run got there.
    """
    known = [found for by in MEASURED_OPTIMIZERS if (found := curves().get(f"{what}_{by}"))]
    if not known and what == COST_OF_LOSS:
        known = [curve("published")]
    if not known or any(share > min(each.reached, each.reaches) for each in known):
        return None
    return max(1.0, *(each.steps_factor(share) for each in known))
