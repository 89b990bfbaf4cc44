# SPDX-License-Identifier: Apache-2.0
"""Step metadata: what ranks tell each other as a step begins, about their samples and about what they saw of late.

It travels as an ordinary bucket, the first of the step, of which nothing may be lost: a table with a row for each rank,
of which each rank fills in its own. The average times the number of ranks is the whole table, with the same bits on
every rank. So ranks that decide by it decide alike, over any collective, and the framework can finish the exchange if
DLCP cannot.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.dtypes import ValueType
from dlcp.tags import Layer, Segment

LAYER: Final = Layer("step metadata", 0)


class StepMetadata(NamedTuple):
    """One rank's row. All but ``samples`` is about the last step; 0 if not known.

    Attributes
    ----------
    samples
        How many samples its gradients of this step will be the mean of.
    step_s, backward_s, waited_s
        How long the last step took, from its first gradients to those of this one; how long until its last gradients
        were ready; and how long after that until all averages were in.
    packets, wanting, lost
        How many packets it sent to its peers in the last step, how many of these did not arrive at first, and how many
        of those never did.
    worst
        The largest share of a message that did not arrive at first.
    protected
        The share of packets that may not be lost.
    rtt_s
        The longest of its smoothed round-trip times.
    rate_bps
        The rate at which its slowest peer takes in what is sent.
    norm
        The L2 norm of the last step's average gradient.
    """

    samples: float = 1.0
    step_s: float = 0.0
    backward_s: float = 0.0
    waited_s: float = 0.0
    packets: float = 0.0
    wanting: float = 0.0
    lost: float = 0.0
    worst: float = 0.0
    protected: float = 0.0
    rtt_s: float = 0.0
    rate_bps: float = 0.0
    norm: float = 0.0


FIELDS: Final = len(StepMetadata._fields)


def table_of(metadata: StepMetadata, index: int, ranks: int) -> NDArray[np.float32]:
    """Return what a rank contributes, flat: its metadata in its own row, zeros in the others.

    Parameters
    ----------
    index
        Of this rank among the contributors, ascending.
    """
    table: NDArray[np.float32] = np.zeros((ranks, FIELDS), np.float32)
    table[index] = metadata
    # The average divides and the reader multiplies: an infinity or NaN would spoil every row.
    np.nan_to_num(table, copy=False, posinf=0.0, neginf=0.0)
    return table.ravel()


def bucket_of(table: NDArray[np.float32]) -> Bucket:
    """Return the bucket that carries a table of :func:`table_of`."""
    return Bucket(table, ValueType.FLOAT32, segments_of(len(table)), exact=True)


def segments_of(values: int) -> list[Segment]:
    """Return the one segment of a table of so many values."""
    return [Segment(LAYER, 0, values)]


def is_step_metadata(segments: Sequence[Segment]) -> bool:
    """Return whether a bucket of these segments carries step metadata."""
    return len(segments) == 1 and segments[0].layer is LAYER


def read_table(average: NDArray[np.floating], contributors: Sequence[int]) -> dict[int, StepMetadata]:
    """Return every rank's metadata, by rank, from the average of their tables."""
    ranks = sorted(contributors)
    table = average.astype(np.float64).reshape(len(ranks), FIELDS) * len(ranks)
    rows = zip(ranks, table.tolist(), strict=True)
    return {rank: StepMetadata(*row)._replace(samples=round(row[0])) for rank, row in rows}


def samples_of(metadata: Mapping[int, StepMetadata]) -> dict[int, int]:
    """Return how many samples each rank has."""
    return {rank: int(each.samples) for rank, each in metadata.items()}
