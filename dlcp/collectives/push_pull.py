# SPDX-License-Identifier: Apache-2.0
"""Two hops: shares go to whoever adds them up (push), results come back (pull)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.samples import divisors, held_samples
from dlcp.dtypes import ValueType

RATE = np.dtype(">f4")
"""What follows the values of a result: the rates at which its sender reaches each contributor, in bit/s."""
PUSH = 0
PULL = 1


def average(
    shares: Mapping[int, NDArray[np.generic]],
    delivered: Mapping[int, NDArray[np.bool_]],
    value_type: ValueType,
    values_per_packet: int,
    *,
    rescale: bool,
    samples: Mapping[int, int] | None = None,
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Average what the ranks sent, in the order of ranks, so that the result does not depend on who came first.

    Parameters
    ----------
    shares
        What each rank sent, with zeros where packets were lost; all of one length.
    delivered
        Which packets of each rank arrived, shape (packets,).
    rescale
        Divide by how many ranks delivered a packet, else by the number of ranks.
    samples
        How many samples each rank's values are of, which have been multiplied by its weight: then those who delivered
        a packet count by their samples (:mod:`dlcp.collectives.samples`).

    Returns
    -------
    The average, and what of the sum it leaves out or counts too much: ``sum - ranks * average``.
    """
    total: NDArray[np.floating] | None = None
    for rank in sorted(shares):
        part = value_type.widen(shares[rank])
        total = part.copy() if total is None else np.add(total, part, out=total)
    assert total is not None
    ranks = len(shares)
    if not rescale or all(packets.all() for packets in delivered.values()):
        return total / total.dtype.type(ranks), np.zeros(0, total.dtype)
    by_packet = divisors(held_samples(delivered, samples), ranks, samples)
    divisor = np.repeat(by_packet, values_per_packet)[: len(total)].astype(total.dtype)
    mean = total / divisor
    # What is not finite is for this step's loss scaler; owed, it would spoil the next one.
    even = (divisor == ranks) | ~np.isfinite(mean)
    with np.errstate(invalid="ignore"):
        return mean, np.where(even, 0, total - ranks * mean).astype(total.dtype)
