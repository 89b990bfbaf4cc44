# SPDX-License-Identifier: Apache-2.0
"""Step metadata: the ranks' reports at the start of a step, on their samples and the last gradient.

It is the first bucket of the step, a table with a row per rank, and is sent without loss. Each rank fills in its own
row and leaves the others 0. The average times the number of ranks is the whole table, bitwise equal on every rank. So
ranks make the same decisions from it, with any collective. The framework can finish the exchange if DLCP cannot.
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
    """One rank's row.

    Attributes
    ----------
    samples
        The number of samples behind its mean gradients of this step.
    norm
        The L2 norm of the last step's average gradient.
    """

    samples: float = 1.0
    norm: float = 0.0


FIELDS: Final = len(StepMetadata._fields)


def table_of(metadata: StepMetadata, index: int, ranks: int) -> NDArray[np.float32]:
    """Return a rank's contribution, flat: its metadata in its own row, zeros in the others.

    Parameters
    ----------
    index
        Index of this rank among the contributors, ascending.
    """
    table: NDArray[np.float32] = np.zeros((ranks, FIELDS), np.float32)
    table[index] = metadata
    # The average divides and the reader multiplies: infinity or NaN would spoil every row.
    np.nan_to_num(table, copy=False, posinf=0.0, neginf=0.0)
    return table.ravel()


def bucket_of(table: NDArray[np.float32]) -> Bucket:
    """Return the bucket that carries a table of :func:`table_of`."""
    return Bucket(table, ValueType.FLOAT32, segments_of(len(table)), exact=True)


def segments_of(values: int) -> list[Segment]:
    """Return the one segment of a table of this many values."""
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
    """Return each rank's number of samples."""
    return {rank: int(each.samples) for rank, each in metadata.items()}
