# SPDX-License-Identifier: Apache-2.0
"""Buckets in parts, for a parameter server, which sends the average of one part while contributions to others arrive.

A server sends an average once all workers' contributions have arrived. A large undivided bucket would first occupy the
server's inbound port, and then its outbound port. P3 (MLSys 2019) and ByteScheduler (SOSP 2019) divide gradients, too.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, RankContext
from dlcp.collectives.direct import DirectAllReduce
from dlcp.collectives.message_numbers import part_number, parts_allowed
from dlcp.collectives.partial_result import PartialResult
from dlcp.tags import Segment

PART_BYTES_MIN: Final = 200_000
"""Minimum size of a part; P3 has slices of 50,000 values. Large buckets have larger parts, because the number of parts
is limited."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part's range in its bucket, in values, and its layers."""

    start: int
    stop: int
    segments: tuple[Segment, ...]


class AllReduceInParts:
    """All-reduce by a parameter server, with large buckets in parts. Timelines show buckets, not their parts.

    Parameters
    ----------
    context
        This rank, and the state that its algorithms share.
    server
        The server's rank.
    """

    recoverable = True

    def __init__(self, context: RankContext, server: int) -> None:
        self.plain = DirectAllReduce(replace(context, noted=False), weights={server: 1.0})
        self._server, self._ranks = server, context.ranks
        self._layouts: dict[int, tuple[tuple[object, ...], list[_Part]]] = {}
        """Parts by bucket number, with their layout; every step has the same buckets."""
        self._started: dict[tuple[int, int], tuple[Bucket, list[_Part]]] = {}

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on."""
        self._started = {name: each for name, each in self._started.items() if name[0] >= step - 1}
        self.plain.begin_step(step)

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket; the future's result is ``bucket.values``, written in place. See :class:`Strategy`."""
        parts = self._parts(sequence, bucket)
        self._started[step, sequence] = bucket, parts
        context, per_packet = self.plain.context, self._per_packet(bucket)
        if context.options.error_feedback:  # a layer's residual is added at once, and some layers span several parts
            context.residual.apply(bucket.values, bucket.segments, bucket.value_type)
        averaged: Future[NDArray[np.generic]] = Future()
        timeline, left = context.connection.timeline, set(range(len(parts)))

        def on_done(index: int, future: "Future[NDArray[np.generic]]") -> None:
            left.discard(index)  # always in the endpoint's thread
            error = future.exception()
            if error and not averaged.done():
                averaged.set_exception(error)
            elif not left and not averaged.done():
                if timeline is not None:
                    timeline.note("gathered", step, sequence, self._server)
                averaged.set_result(bucket.values)

        runs = []
        for index, part in enumerate(parts):
            magnitudes = bucket.magnitudes
            if magnitudes is not None:
                magnitudes = magnitudes[part.start // per_packet : -(-part.stop // per_packet)]
            values = bucket.values[part.start : part.stop]
            piece = replace(bucket, values=values, segments=part.segments, magnitudes=magnitudes)
            runs.append(self.plain.prepare(step, part_number(sequence, index, self._ranks), piece))
        if timeline is not None:
            timeline.note("tagged", step, sequence)
        for index, run in enumerate(runs):  # only now: losses of the first one are for the next step
            run.start().add_done_callback(partial(on_done, index))
        return averaged

    def partial_results(self) -> list[PartialResult]:
        """Return this rank's state of unfinished buckets; call it when the endpoint is closed."""
        numbers = {
            (step, part_number(sequence, index, self._ranks)): (step, sequence, index)
            for (step, sequence), (_, parts) in self._started.items()
            for index in range(len(parts))
        }
        held = [(numbers[each.step, each.sequence], each) for each in self.plain.partial_results()]
        held.sort(key=lambda found: found[0])
        return [
            self._joined(name, {index: each for (_, _, index), each in found})
            for name, found in groupby(held, key=lambda found: found[0][:2])
        ]

    def close(self) -> None:
        """Close the reducer of the parts."""
        self.plain.close()

    def _joined(self, name: tuple[int, int], held: Mapping[int, PartialResult]) -> PartialResult:
        """Return this rank's state of a bucket; parts that it no longer tracks are averaged."""
        bucket, parts = self._started[name]
        per_packet, widen = self._per_packet(bucket), bucket.value_type.widen
        values = widen(bucket.values).copy()
        packets = -(-len(values) // per_packet)
        final, unconfirmed = np.ones(packets, np.bool_), np.zeros(packets, np.bool_)
        included: dict[int, NDArray[np.bool_]] = {}
        residual: NDArray[np.floating] | None = None
        for index, result in held.items():
            of_values = slice(parts[index].start, parts[index].stop)
            of_packets = slice(of_values.start // per_packet, -(-of_values.stop // per_packet))
            values[of_values], final[of_packets] = result.values, result.final
            for rank, bits in result.included.items():
                included.setdefault(rank, np.zeros(packets, np.bool_))[of_packets] = bits
            if result.unconfirmed is not None:
                unconfirmed[of_packets] = result.unconfirmed
            if result.residual is not None:
                residual = np.zeros(len(values), values.dtype) if residual is None else residual
                residual[of_values] = result.residual
        return PartialResult(*name, values, per_packet, final, included, residual, unconfirmed)

    def _per_packet(self, bucket: Bucket) -> int:
        return self.plain.context.connection.options.payload_bytes // bucket.values.itemsize

    def _parts(self, sequence: int, bucket: Bucket) -> list[_Part]:
        """Divide a bucket at packet borders."""
        suits = len(bucket.values), bucket.values.itemsize, tuple(bucket.segments)
        known = self._layouts.get(sequence)
        if known is None or known[0] != suits:
            most = min(parts_allowed(sequence, self._ranks), max(1, bucket.values.nbytes // PART_BYTES_MIN))
            known = self._layouts[sequence] = suits, divide(bucket, most, self._per_packet(bucket))
        return known[1]


def divide(bucket: Bucket, parts: int, values_per_packet: int) -> list[_Part]:
    """Divide a bucket into at most this many parts of about equal size, at packet borders."""
    count = len(bucket.values)
    packets = -(-count // values_per_packet)
    borders = np.unique(np.rint(np.linspace(0, packets, parts + 1)).astype(int)) * values_per_packet
    ends = np.minimum(borders, count).tolist()
    if len(ends) < 3:
        return [_Part(0, count, tuple(bucket.segments))]
    return [_Part(start, stop, _within(bucket.segments, start, stop)) for start, stop in pairwise(ends)]


def _within(segments: Sequence[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    """Return the segments in a part of a buffer, at their places in the part."""
    return tuple(
        Segment(
            each.layer,
            max(each.start, start) - start,
            min(each.stop, stop) - start,
            each.offset + max(0, start - each.start),
        )
        for each in segments
        if each.start < stop and each.stop > start
    )
