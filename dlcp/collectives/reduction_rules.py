# SPDX-License-Identifier: Apache-2.0
"""Ways to combine all ranks' contributions: average, sum, Adasum.

**Weights.** Ranks may have batches of different sizes; every sample has the same weight. Rank r of n has the mean
gradient g_r of its s_r samples; the result should be sum(s_r g_r) / sum(s_r). So each rank contributes x_r = w_r g_r
with the weight w_r = n s_r / sum(s_r), and the plain average of the x_r is that result. If only the ranks in D have
delivered a packet, rescaling divides their sum by the sum of their weights, which the plain average does not. The
weights of all ranks add up to n, so nothing changes for complete packets. Error feedback always divides by n, and lost
values become residual with their weight. So over the steps, n times the averages plus the residual is the sum of all
contributions, as with equal weights. Ding et al. use the same weights (HetSeq, AAAI 2021, arXiv 2009.14783).

**Adasum** (Maleki et al., MLSys 2021, arXiv 2006.02924) adds orthogonal components and averages parallel ones. So the
learning rate need not be tuned again for the number of ranks. For two:

    (1 - g1.g2 / (2 |g1|^2)) g1  +  (1 - g1.g2 / (2 |g2|^2)) g2

and for more, recursively: neighbours first, then pairs of pairs. Every layer is combined separately. If the number of
ranks is not a power of two, the excess ranks are first combined with one of the others each. For any tree, the result
is a linear combination of the ranks' gradients, and every scalar product in it follows from those between ranks. So n
(n+1)/2 scalar products per layer suffice to compute all factors before anything is added.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Segment

if TYPE_CHECKING:  # at run time it is loaded only where needed: most jobs neither compress nor use Adasum
    from dlcp.compress.compressor import Values

AVERAGE: Final = "average"
SUM: Final = "sum"
ADASUM: Final = "adasum"
COMBINES: Final = (AVERAGE, SUM, ADASUM)
MOST_SAMPLES: Final = 1 << 22
"""The most samples per rank and step, because float32 carries them, divided by the number of ranks."""

Products = NDArray[np.float64]
"""Scalar products between ranks, shape (n, n) or for each layer (layers, n, n)."""
Rule = Callable[[Sequence[Callable[[], "Values"]], Sequence[Segment]], "Values"]
"""Combines the ranks' gradients. Its arguments decode them, in the order of ranks, and may be called repeatedly."""

# Weights --------------------------------------------------------------------------------------------------------------


def check_samples(samples: object) -> int:
    """Return a rank's number of samples, if it is valid.

    Raises
    ------
    ValueError
        It is not a whole number from 0 to ``MOST_SAMPLES``.
    """
    if isinstance(samples, float) and samples.is_integer():
        samples = int(samples)
    if isinstance(samples, bool) or not isinstance(samples, int | np.integer) or not 0 <= samples <= MOST_SAMPLES:
        raise ValueError(f"samples must be a whole number from 0 to {MOST_SAMPLES}, got {samples!r}")
    return int(samples)


def weight_of(samples: Mapping[int, int], rank: int) -> float:
    """Return the factor on a rank's mean gradient: its samples over the mean of all ranks' samples.

    It is 0 if no rank has any samples: then the average is 0 as well.
    """
    total = sum(samples.values())
    return len(samples) * samples[rank] / total if total else 0.0


def weigh(values: NDArray[np.floating], weight: float) -> None:
    """Multiply values by a weight, in place; the gradient of no samples is always 0, even if it holds NaN."""
    if weight == 0:
        values.fill(0)
    elif weight != 1:
        np.multiply(values, values.dtype.type(weight), out=values)


def held_samples(delivered: Mapping[int, NDArray[np.bool_]], samples: Mapping[int, int] | None) -> NDArray[np.int64]:
    """Return the number of samples in each packet's sum, or without ``samples`` of ranks, shape (packets,).

    Parameters
    ----------
    delivered
        Which packets of each rank arrived, shape (packets,).
    """
    ranks = sorted(delivered)
    counts = (1 if samples is None else samples[rank] for rank in ranks)
    parts = [delivered[rank].astype(np.int64) * count for rank, count in zip(ranks, counts, strict=True)]
    held: NDArray[np.int64] = np.sum(parts, axis=0)
    return held


def all_samples(ranks: int, samples: Mapping[int, int] | None) -> int:
    """Return the number of samples in a complete sum, or without ``samples`` of ranks."""
    return ranks if samples is None else sum(samples.values())


def divisors(held: NDArray[np.integer], ranks: int, samples: Mapping[int, int] | None) -> NDArray[np.float64]:
    """Return the divisor of each packet's sum, shape (packets,): ``ranks`` if nothing is missing.

    Parameters
    ----------
    held
        The number of samples in each packet's sum, or without ``samples`` of ranks.
    """
    whole = all_samples(ranks, samples)
    found = held.astype(np.float64)
    if samples is not None:
        found *= ranks / whole if whole else 0.0
        found[held == whole] = ranks
    found[found == 0] = 1.0  # a sum of ranks without samples stays 0
    return found


# Averages -------------------------------------------------------------------------------------------------------------


def average(
    contributions: Mapping[int, NDArray[np.generic]],
    delivered: Mapping[int, NDArray[np.bool_]],
    value_type: ValueType,
    values_per_packet: int,
    *,
    rescale: bool,
    samples: Mapping[int, int] | None = None,
) -> NDArray[np.floating]:
    """Average contributions in the order of ranks, so that the result does not depend on arrival order.

    Parameters
    ----------
    contributions
        Each rank's contribution, with zeros for lost packets; all of the same length.
    delivered
        Which packets of each rank arrived, shape (packets,).
    rescale
        Divide by the number of ranks that delivered a packet, instead of the number of all ranks.
    samples
        Each rank's number of samples, if its values were multiplied by its weight. Ranks that delivered a packet then
        count by their samples.
    """
    total: NDArray[np.floating] | None = None
    for rank in sorted(contributions):
        part = value_type.widen(contributions[rank])
        total = part.copy() if total is None else np.add(total, part, out=total)
    assert total is not None
    held = None
    if rescale and not all(packets.all() for packets in delivered.values()):
        held = held_samples(delivered, samples)
    return divide(total, held, len(contributions), values_per_packet, samples)


def divide(
    total: NDArray[np.floating],
    held: NDArray[np.integer] | None,
    ranks: int,
    values_per_packet: int,
    samples: Mapping[int, int] | None = None,
) -> NDArray[np.floating]:
    """Divide a sum by the number of ranks in it, or by their weights; return the average.

    Parameters
    ----------
    total
        The sum; overwritten.
    held
        The number of ranks in each packet's sum, shape (packets,), or with ``samples`` of samples. None: all.
    """
    if held is None or (held == all_samples(ranks, samples)).all():
        total /= total.dtype.type(ranks)
    else:
        divisor = np.repeat(divisors(held, ranks, samples), values_per_packet)[: len(total)]
        total /= divisor.astype(total.dtype)
    return total


def divide_by_samples(
    values: NDArray[np.float32],
    held: NDArray[np.integer],
    ranks: int,
    values_per_packet: int,
    samples: Mapping[int, int],
) -> None:
    """Turn incomplete packets, divided by the number of ranks, into means of their samples, in place."""
    by_packet = divisors(held, ranks, samples)
    for packet in np.flatnonzero(by_packet != ranks).tolist():
        part = values[packet * values_per_packet : (packet + 1) * values_per_packet]
        with np.errstate(invalid="ignore", over="ignore"):
            part *= np.float32(ranks / by_packet[packet])


# Sums -----------------------------------------------------------------------------------------------------------------


def multiply_for_sum(values: NDArray[np.generic], value_type: ValueType, ranks: int) -> None:
    """Multiply a buffer by the number of ranks, in place, so that the average is the sum of all ranks' buffers.

    This precedes the average, so that lost values become residual on the same scale as sent ones.
    """
    wide = value_type.widen(values)
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(values, value_type.narrow(wide * wide.dtype.type(ranks)))


# Adasum ---------------------------------------------------------------------------------------------------------------


def coefficients(products: Products) -> NDArray[np.float64]:
    """Return the factors of the ranks' gradients of a layer in Adasum, shape (n,), bitwise equal everywhere.

    Parameters
    ----------
    products
        Scalar products of the ranks' gradients, shape (n, n).
    """
    ranks = len(products)
    own = list(np.eye(ranks))
    even = 1 << ranks.bit_length() - 1
    combined = [_pair(products, own[r], own[r + even]) if r + even < ranks else own[r] for r in range(even)]
    while len(combined) > 1:
        combined = [_pair(products, *two) for two in zip(combined[::2], combined[1::2], strict=True)]
    return combined[0]


def scalar_products(parts: "Sequence[Values]", borders: Sequence[int]) -> Products:
    """Return the scalar products between arrays, by layer; bitwise equal everywhere.

    Parameters
    ----------
    parts
        One for each rank, shape (m,).
    borders
        The start of each layer, and the end of the last one.

    Returns
    -------
    Shape (layers, n, n).
    """
    from dlcp.compress.low_rank import folded_sum  # only Adasum of compressed gradients needs it

    ranks = len(parts)
    found = np.zeros((len(borders) - 1, ranks, ranks))
    for layer, (start, stop) in enumerate(pairwise(borders)):
        wide = [part[start:stop].astype(np.float64) for part in parts]
        for one in range(ranks):
            for other in range(one + 1):
                with np.errstate(all="ignore"):
                    found[layer, one, other] = found[layer, other, one] = folded_sum(wide[one] * wide[other])
    return found


def combine_with(parts: "Sequence[Values]", borders: Sequence[int], factors: NDArray[np.float64]) -> "Values":
    """Return the sum of arrays, each layer of each multiplied by its factor, shape (layers, n)."""
    total: Values = np.zeros_like(parts[0])
    lengths = np.diff(borders)
    with np.errstate(all="ignore"):
        for rank, part in enumerate(parts):
            total += part * np.repeat(factors[:, rank].astype(part.dtype), lengths)
    return total


def _pair(products: Products, one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Combine two linear combinations of gradients."""
    from dlcp.compress.low_rank import folded_sum  # only Adasum of compressed gradients needs it

    def product(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
        with np.errstate(invalid="ignore"):
            return float(folded_sum((left[:, None] * products * right[None, :]).ravel()))

    between, first, second = product(one, other), product(one, one), product(other, other)
    # A gradient of 0 has no direction; its factor does not matter. NaN must propagate.
    return _factor(between, first) * one + _factor(between, second) * other


def _factor(between: float, square: float) -> float:
    return 1.0 if square <= 0 else 1 - between / (2 * square)


# Rules for a compressed all-gather -----------------------------------------------------------------------------------


def average_of(parts: "Sequence[Callable[[], Values]]", segments: Sequence[Segment]) -> "Values":
    """Return the average; only one decoded part exists at a time."""
    from dlcp.compress.compressor import average as average_of_values  # most jobs do not compress

    return average_of_values(part() for part in parts)


def sum_of(parts: "Sequence[Callable[[], Values]]", segments: Sequence[Segment]) -> "Values":
    """Return the sum."""
    mean = average_of(parts, segments)
    mean *= mean.dtype.type(len(parts))
    return mean


def adasum_of(parts: "Sequence[Callable[[], Values]]", segments: Sequence[Segment]) -> "Values":
    """Return Adasum."""
    decoded = [part() for part in parts]
    borders = [segment.start for segment in segments] + [segments[-1].stop]
    products = scalar_products(decoded, borders)
    return combine_with(decoded, borders, np.array([coefficients(layer) for layer in products]))


REDUCTION_RULES: Final[dict[str, Rule]] = {AVERAGE: average_of, SUM: sum_of, ADASUM: adasum_of}
"""By name."""
