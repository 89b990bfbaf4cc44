# SPDX-License-Identifier: Apache-2.0
"""Means of what every rank has of its own, such as the loss on its part of the data."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.session.group import Group


def mean_over_ranks(values: NDArray[Any], group: Group) -> NDArray[np.float64]:
    """Return the mean of an array over all ranks, nothing lost, bit by bit the same on all; between steps.

    Parameters
    ----------
    values
        Of one shape on all ranks.

    Raises
    ------
    TransportError
        A rank was not reached, or not in time; the message names it.
    """
    total = np.zeros(values.shape)
    for rank in range(group.size):
        theirs = np.array(values, np.float64, order="C")
        group.broadcast(theirs, rank)
        total += theirs
    return total / group.size


def average_metrics(metrics: Mapping[str, Any], group: Group) -> dict[str, float]:
    """Return the mean of each metric over all ranks; all ranks must give metrics of the same names.

    Raises
    ------
    TransportError
        A rank was not reached, or not in time; the message names it.
    """
    names = sorted(metrics)
    means = mean_over_ranks(np.array([metrics[name] for name in names], np.float64), group)
    return dict(zip(names, means.tolist(), strict=True))
