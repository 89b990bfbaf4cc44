# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other at the beginning of a step: how many samples they have, and what they have seen of late.

It is told by an ordinary bucket, the first of the step, that nothing of is lost: a table with a row for each rank, of
which each fills in its own. Its average times the number of ranks is the whole table, with the same bits on every rank.
So whatever ranks decide by it they decide alike, over any collective, and the framework can finish the exchange if DLCP
cannot.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.dtypes import ValueType
from dlcp.tags import Layer, Segment

LAYER: Final = Layer("step notice", 0)


class Notice(NamedTuple):
    """What one rank tells. Apart from ``samples`` it is of the last step; 0 if not known.

    Attributes
    ----------
    samples
        How many samples its gradients of this step will be the mean of.
    step_s, backward_s, waited_s
        How long the last step took, from when its first gradients were ready to that of this one; how long it was until
        its last ones were; and how long after that until all averages were in.
    packets, wanting, lost
        How many packets it has offered to its peers in the last step, how many of these did not arrive at first, and
        how many of those never.
    worst
        The largest share of a message that did not arrive at first.
    protected
        The share of packets that may not be lost.
    rtt_s
        The longest of its round trips to its peers, smoothed.
    rate_bps
        At which its slowest peer takes in what is sent.
    norm
        Of the last step's average gradient, L2.
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


FIELDS: Final = len(Notice._fields)


def table_of(notice: Notice, place: int, ranks: int) -> NDArray[np.float32]:
    """Return what a rank contributes, flat: its notice in its own row, zeros in the others.

    Parameters
    ----------
    place
        Of this rank among the contributors, ascending.
    """
    table: NDArray[np.float32] = np.zeros((ranks, FIELDS), np.float32)
    table[place] = notice
    # The average divides and this side multiplies: what overflows or is no number would be so for everybody.
    np.nan_to_num(table, copy=False, posinf=0.0, neginf=0.0)
    return table.ravel()


def bucket_of(values: NDArray[np.float32]) -> Bucket:
    """Return the bucket that tells what :func:`table_of` has made."""
    return Bucket(values, ValueType.FLOAT32, segments_of(len(values)), exact=True)


def segments_of(values: int) -> list[Segment]:
    """Return the one segment of a notice's bucket of so many values."""
    return [Segment(LAYER, 0, values)]


def is_notice(segments: Sequence[Segment]) -> bool:
    """Tell whether a bucket of these segments tells notices."""
    return len(segments) == 1 and segments[0].layer is LAYER


def read_notices(average: NDArray[np.floating], contributors: Sequence[int]) -> dict[int, Notice]:
    """Return every rank's notice, by rank, from the average of their tables."""
    ranks = sorted(contributors)
    table = average.astype(np.float64).reshape(len(ranks), FIELDS) * len(ranks)
    return {rank: Notice(*row)._replace(samples=round(row[0])) for rank, row in zip(ranks, table.tolist(), strict=True)}


def samples_of(notices: Mapping[int, Notice]) -> dict[int, int]:
    """Return how many samples each rank has."""
    return {rank: int(notice.samples) for rank, notice in notices.items()}
