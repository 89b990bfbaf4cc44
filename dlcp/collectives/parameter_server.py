# SPDX-License-Identifier: Apache-2.0
"""A parameter server, and how its workers divide buckets for it.

A server has no gradients. It averages the workers' contributions once all have arrived, and sends the average to all. A
large undivided bucket would first occupy the server's inbound port, and then its outbound port. So workers divide large
buckets: the server sends the average of one part while contributions to others arrive. P3 (MLSys 2019) and
ByteScheduler (SOSP 2019) divide gradients, too.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, BucketRun, ContributionTail, RankContext, ReduceOptions
from dlcp.collectives.direct import DirectAllReduce, DirectRun
from dlcp.collectives.message_numbers import ALL_GATHER, part_number, parts_allowed, two_hop_number
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import average
from dlcp.collectives.step_metadata import read_samples
from dlcp.transport import (
    RELIABLE,
    Arrival,
    Connection,
    Delivery,
    MessageKey,
    PeerLeftError,
    ReceiveRequest,
    SendRequest,
)
from dlcp.transport.ledger import Ledger
from dlcp.transport.messages import at_step
from dlcp.values.planes import FULL_BITS, PlaneLayout
from dlcp.values.tags import PacketTags, Segment, queue_of_layer

if TYPE_CHECKING:
    from dlcp.collectives.pair import PairRun

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

    def __init__(self, context: RankContext, server: int) -> None:
        self.context, self.server = context, server
        self.plain = DirectAllReduce(replace(context, noted=False), weights={server: 1.0})
        self._layouts: dict[int, tuple[tuple[object, ...], list[_Part]]] = {}
        """Parts by bucket number, with their layout; every step has the same buckets."""

    def begin_step(self, step: int, bits: int = FULL_BITS) -> None:
        """See :meth:`dlcp.collectives.Reducer.begin_step`."""
        self.plain.begin_step(step, bits)

    def start(self, step: int, sequence: int, bucket: Bucket) -> "PartsRun":
        """Begin to average a bucket, and return its run. See :class:`Strategy`."""
        return PartsRun(self, step, sequence, bucket).start()

    def parts_of(self, sequence: int, bucket: Bucket, values_per_packet: int) -> list[_Part]:
        """Divide a bucket at packet borders."""
        suits = len(bucket.values), bucket.values.itemsize, tuple(bucket.segments)
        known = self._layouts.get(sequence)
        if known is None or known[0] != suits:
            most = min(parts_allowed(sequence, self.context.ranks), max(1, bucket.values.nbytes // PART_BYTES_MIN))
            known = self._layouts[sequence] = suits, divide(bucket, most, values_per_packet)
        return known[1]

    def close(self) -> None:
        """Close the reducer of the parts."""
        self.plain.close()


class PartsRun(BucketRun):
    """One bucket in progress, part by part."""

    def __init__(self, reducer: AllReduceInParts, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer.context, step, sequence, bucket)
        self.server, per_packet = reducer.server, self.values_per_packet
        self.parts = reducer.parts_of(sequence, bucket, per_packet)
        if self.context.options.error_feedback:  # a layer's is added at once, and some layers span several parts
            self.context.residual.apply(bucket.values, bucket.segments, bucket.value_type)
        self.runs: list[DirectRun | PairRun] = []
        """The parts' runs, until all are done."""
        self.averages: list[NDArray[np.generic]] = []
        """The parts' averages, once all are done: another worker may need them."""
        for index, part in enumerate(self.parts):
            magnitudes = bucket.magnitudes
            if magnitudes is not None:
                magnitudes = magnitudes[part.start // per_packet : -(-part.stop // per_packet)]
            values = bucket.values[part.start : part.stop]
            piece = replace(bucket, values=values, segments=part.segments, magnitudes=magnitudes)
            number = part_number(sequence, index, self.context.ranks)
            self.runs.append(reducer.plain.prepare(step, number, piece))
        self._note("tagged", min(run.plan.bits for run in self.runs))

    def begin(self) -> None:
        """Begin all parts; only now, since losses of the first one are for the next step."""
        for run in self.runs:
            run.add_done_callback(self._on_part)
            run.attempt(run.begin)

    def _on_part(self, part: "Future[NDArray[np.generic]]") -> None:
        error = part.exception()
        if isinstance(error, Exception):
            self.fail(error)
        elif all(run.done() for run in self.runs) and not self.done():
            self.averages = [run.averaged for run in self.runs if run.averaged is not None]
            self.runs = []
            self._note("gathered", self.server)
            self.set_result(self.bucket.values)

    def partial_result(self) -> PartialResult:
        """Return this rank's state of the bucket."""
        per_packet, widen = self.values_per_packet, self.bucket.value_type.widen
        if self.averages:
            return PartialResult.averaged(self.context.contributors, widen(np.concatenate(self.averages)), per_packet)
        values = widen(self.bucket.values).copy()
        packets = -(-len(values) // per_packet)
        final, unconfirmed = np.ones(packets, np.bool_), np.zeros(packets, np.bool_)
        included: dict[int, NDArray[np.bool_]] = {}
        residual: NDArray[np.floating] | None = None
        for part, run in zip(self.parts, self.runs, strict=True):
            result = run.partial_result()
            if result is None:
                continue
            of_values = slice(part.start, part.stop)
            of_packets = slice(of_values.start // per_packet, -(-of_values.stop // per_packet))
            values[of_values], final[of_packets] = result.values, result.final
            for rank, bits in result.included.items():
                included.setdefault(rank, np.zeros(packets, np.bool_))[of_packets] = bits
            if result.unconfirmed is not None:
                unconfirmed[of_packets] = result.unconfirmed
            if result.residual is not None:
                residual = np.zeros(len(values), values.dtype) if residual is None else residual
                residual[of_values] = result.residual
        return PartialResult(values, per_packet, final, included, residual, unconfirmed)


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


class ParameterServer:
    """Serves the buckets of all steps until its endpoint is closed.

    Contributions carry the sizes and formats of buckets.

    Parameters
    ----------
    connection
        The server's connection; the workers are its peers.
    workers
        Ranks of the workers.
    options
        The workers' options. The workers apply the bounds of single layers.
    weighted
        Whether each step begins with the workers' numbers of samples (:mod:`dlcp.collectives.step_metadata`).
    ledger
        The record of the averages that it sends.

    Attributes
    ----------
    failed
        Resolves with an error if the server cannot continue.
    """

    def __init__(
        self,
        connection: Connection,
        workers: Sequence[int],
        *,
        options: ReduceOptions | None = None,
        weighted: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.connection = connection
        self.workers = sorted(workers)
        self.options, self.weighted = options or ReduceOptions(), weighted
        self.ledger = ledger or Ledger()
        self.failed: Future[None] = Future()
        self._ranks = max([*self.workers, connection.rank]) + 1
        self._buckets: dict[MessageKey, dict[int, Arrival]] = {}
        """Contributions by the key of their messages and by worker."""
        self._rounded: dict[int, NDArray[np.float32]] = {}
        """Rounding errors of the latest average of a bucket of gradients, by its number."""
        self._applied: dict[int, NDArray[np.float32]] = {}
        """Rounding errors of the average before, which the latest one includes, if workers may revoke that."""
        self._samples: tuple[int, dict[int, int]] = (-1, {})
        """The latest step with known samples, and their number on each worker."""
        connection.call(partial(connection.listen, self._receive, self._check_workers))

    def _receive(self, worker: int, key: MessageKey) -> None:
        """Post a receive for a contribution whose first packet has arrived."""
        request = ReceiveRequest(worker, key, None, self.options.bound, self._label(key))
        self.connection.receive(request, partial(self._on_contribution, worker, key), self._fail)

    def _on_contribution(self, worker: int, key: MessageKey, contribution: Arrival) -> None:
        bucket = self._buckets.setdefault(key, {})
        bucket[worker] = contribution
        if len(bucket) == len(self.workers):
            del self._buckets[key]
            self._send_average(key, bucket)
            # A worker is at most one step ahead of another: it cannot start the next without this one's average.
            self.connection.begin_step(key.step - 1)
        else:
            self._check_workers()

    def _check_workers(self) -> None:
        """Fail if a worker has left without a contribution that the others wait for."""
        for key, bucket in self._buckets.items():
            where = at_step(self.connection.membership.job, key.step)
            for worker in self.workers:
                if worker not in bucket and (why := self.connection.peers[worker].left):
                    what = f"rank {worker} has left ({why}) while others waited for {self._label(key)}"
                    self._fail(PeerLeftError(f"{where}: {what}"))

    def _send_average(self, key: MessageKey, bucket: dict[int, Arrival]) -> None:
        sequence, payload_bytes = self._sequence(key), self.connection.options.payload_bytes
        tails = {worker: ContributionTail.decode(arrival.payload) for worker, arrival in bucket.items()}
        shape = {worker: (*tail[:4], tail.revoked) for worker, tail in tails.items()}
        if len(set(shape.values())) > 1 or key.message % self._ranks != self.connection.rank:
            sent = {w: f"{t.values} values of {t.value_type.value} in {t.bits} bits" for w, t in tails.items()}
            raise ValueError(f"step {key.step}, {self._label(key)}: workers sent {sent}; do all run the same model?")
        tail = next(iter(tails.values()))
        layout = PlaneLayout.of(tail.values, tail.value_type.storage.itemsize, tail.bits, payload_bytes)
        expected = tail.bytes + (layout.bytes if layout else tail.values * tail.value_type.storage.itemsize)
        for worker, arrival in bucket.items():
            if len(arrival.payload) != expected:
                size = f"{len(arrival.payload)} bytes instead of {expected}"
                raise ValueError(f"step {key.step}, {self._label(key)}: the contribution of rank {worker} has {size}")
        mean = self._mean(key, bucket, tail, layout)
        if self.weighted and sequence == 0:
            self._samples = key.step, read_samples(mean, self.workers)
        if layout is None:
            content = np.ascontiguousarray(tail.value_type.narrow(mean)).view(np.uint8)
        else:
            content = np.empty(layout.bytes, np.uint8)
            rest = np.empty(layout.values, np.float32) if self.options.error_feedback else None
            layout.round(np.asarray(mean, np.float32), content, rest)
            if rest is not None:
                self._rounded[sequence] = rest
        payload = memoryview(content.tobytes())
        tags = _tags_of(bucket, -(-len(payload) // payload_bytes))
        for worker in self.workers:
            reply = MessageKey(key.step, two_hop_number(sequence, ALL_GATHER, worker, self._ranks))
            request = SendRequest(worker, reply, payload, tags, RELIABLE, self._label(key), layout=layout)
            self.connection.send(request, partial(self._on_sent, request), self._fail)

    def _mean(
        self, key: MessageKey, bucket: dict[int, Arrival], tail: ContributionTail, layout: PlaneLayout | None
    ) -> NDArray[np.floating]:
        """Return the average of contributions, plus the rounding errors of the last average of the same gradients."""
        contributions = {worker: arrival.payload[: -tail.bytes] for worker, arrival in bucket.items()}
        mean: NDArray[np.floating]
        if layout is None:
            mean = average(
                {worker: content.view(tail.value_type.storage) for worker, content in contributions.items()},
                {worker: arrival.delivered for worker, arrival in bucket.items()},
                tail.value_type,
                self.connection.options.payload_bytes // tail.value_type.storage.itemsize,
                rescale=self.options.rescale,
                samples=self._samples[1] if self._samples[0] == key.step else None,
            )
        else:
            total = np.zeros(tail.values, np.float32)
            for worker in self.workers:
                layout.add(contributions[worker], total, bucket[worker].delivered)
            total /= np.float32(len(self.workers))
            mean = total
        if tail.gradients:
            self._add_rounded(self._sequence(key), mean, tail)
        return mean

    def _add_rounded(self, sequence: int, mean: NDArray[np.floating], tail: ContributionTail) -> None:
        """Add the rounding errors of the bucket's last average; where no worker used that, those of the one before.

        See :meth:`dlcp.collectives.residual.Residual.revoke`.
        """
        held = [kept.pop(sequence, None) for kept in (self._rounded, self._applied)]
        rounded, before = (each if each is not None and len(each) == len(mean) else None for each in held)
        if rounded is None and (before is None or not tail.revoked):
            return
        if rounded is None:
            rounded = np.zeros(len(mean), np.float32)
        for start, stop in tail.revoked:
            rounded[start:stop] = 0 if before is None else before[start:stop]
        mean += rounded
        if tail.revocable:
            self._applied[sequence] = rounded

    def _on_sent(self, request: SendRequest, delivery: Delivery) -> None:
        sent = request.label, request.tags, request.bound
        self.ledger.record(request.key, request.peer, *sent, delivery, request.layout)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _sequence(self, key: MessageKey) -> int:
        return key.message // self._ranks // 2

    def _label(self, key: MessageKey) -> str:
        return f"part {self._sequence(key)}"


def _tags_of(bucket: dict[int, Arrival], packets: int) -> PacketTags:
    """Tag an average like its gradients; a layer that no worker delivered is sent first."""
    arrivals = list(bucket.values())
    layer: NDArray[np.uint8] = np.zeros(len(arrivals[0].layer), np.uint8)
    for arrival in arrivals:
        layer = np.where(arrival.delivered, arrival.layer, layer)
    layer = layer[:packets]  # a contribution has a tail
    nothing = np.zeros(packets, np.uint8)
    return PacketTags(queue_of_layer(layer), nothing, layer, nothing.astype(np.bool_))
