# SPDX-License-Identifier: Apache-2.0
"""Means of figures that every rank has of its own, such as the loss on its part of the data."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlcp.group.group import Group


def average_metrics(metrics: Mapping[str, Any], group: Group) -> dict[str, float]:
    """Return the mean of each metric over all ranks, nothing lost; all ranks must give metrics of the same names.

    Raises
    ------
    TransportError
        A rank was not reached, or not in time; the message names it.
    """
    names = sorted(metrics)
    total = np.zeros(len(names))
    for rank in range(group.size):
        theirs = np.array([metrics[name] for name in names], np.float64)
        group.broadcast(theirs, rank)
        total += theirs
    return dict(zip(names, (total / group.size).tolist(), strict=True))
