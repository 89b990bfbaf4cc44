# SPDX-License-Identifier: Apache-2.0
"""Partial sums: how they grow from rank to rank, and how the last rank makes an average of them."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.samples import all_samples, divisors
from dlcp.dtypes import ValueType

COUNT = np.dtype(">u2")
"""How many ranks a packet's sum holds; one for each packet follows the values."""
SAMPLES = np.dtype(">u4")
"""How many samples it is of, in the place of that, where ranks weigh differently."""
HALF_BYTES = 2


def scale_of_hop(hop: int) -> float:
    """Return by what a sum in a 16-bit format is multiplied to be sent on a hop: 1 / 2**ceil(log2(hop + 1)).

    A sum of many would exceed the largest float16, 65504, where its average does not. Powers of two cost no precision.
    """
    return 1.0 / (1 << hop.bit_length())


def clear_missing(
    sum_bytes: NDArray[np.uint8],
    missing: NDArray[np.intp],
    packet_bytes: int,
    counts: NDArray[np.unsignedinteger] | None,
) -> None:
    """Set packets that did not arrive to zero, and how many ranks they hold."""
    for packet in missing.tolist():
        sum_bytes[packet * packet_bytes : (packet + 1) * packet_bytes] = 0
    if counts is not None:
        counts[missing] = 0


def total_at(
    hop: int, arrived: NDArray[np.generic], own: NDArray[np.generic], value_type: ValueType
) -> NDArray[np.floating]:
    """Return the sum of what arrived over a hop and a rank's own values, in the wider format.

    ``arrived`` is overwritten if its format is as wide.
    """
    total = value_type.widen(arrived)
    if value_type.storage.itemsize == HALF_BYTES:
        total = total / np.float32(scale_of_hop(hop))
    np.add(total, value_type.widen(own), out=total)
    return total


def sent_over(hop: int, total: NDArray[np.floating], value_type: ValueType) -> NDArray[np.generic]:
    """Return what is sent over a hop for a sum: rounded to 16 bits at every hop, if that is the format."""
    if value_type.storage.itemsize > HALF_BYTES:
        return total
    return value_type.narrow(total * np.float32(scale_of_hop(hop)))


def held_by(hop: int, sent: NDArray[np.generic], value_type: ValueType) -> NDArray[np.floating]:
    """Return the sum that was sent over a hop, in the wider format; not a copy if its format is as wide."""
    held = value_type.widen(sent)
    return held / np.float32(scale_of_hop(hop)) if value_type.storage.itemsize == HALF_BYTES else held


def mean_of(
    total: NDArray[np.floating],
    ranks: int,
    counts: NDArray[np.unsignedinteger] | None,
    values_per_packet: int,
    samples: Mapping[int, int] | None = None,
) -> tuple[NDArray[np.floating], NDArray[np.floating] | None]:
    """Divide a sum by how many ranks it holds, or by their weights.

    Parameters
    ----------
    total
        The sum; overwritten where nothing is missing.
    counts
        How many ranks each packet holds, shape (packets,), or with ``samples`` how many samples; without it, all.
    samples
        How many samples each rank's values are of, which have been multiplied by its weight.

    Returns
    -------
    The average, and what of the sum it leaves out or counts too much: ``total - ranks * average``; None for nothing.
    """
    if counts is None or (counts == all_samples(ranks, samples)).all():
        return np.divide(total, total.dtype.type(ranks), out=total), None
    by_packet = divisors(counts, ranks, samples)
    divisor = np.repeat(by_packet, values_per_packet)[: len(total)].astype(total.dtype)
    mean = total / divisor
    # What is not finite is for this step's loss scaler; owed, it would spoil the next one.
    even = (divisor == ranks) | ~np.isfinite(mean)
    with np.errstate(invalid="ignore"):
        return mean, np.where(even, 0, total - ranks * mean).astype(total.dtype)
