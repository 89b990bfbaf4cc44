# SPDX-License-Identifier: Apache-2.0
"""All-reduce in two hops: every rank sends each shard to its owner, which averages and sends the result to all.

The first hop may lose packets within the bound. The result is delivered whole, so that replicas never drift apart.
A parameter server is the case of one owner that contributes nothing itself (see :mod:`dlcp.collectives.server`).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.shards import inbound_rates, shard_bounds, weights_for_rates
from dlcp.dtypes import ValueType
from dlcp.ledger import Ledger
from dlcp.tags import PacketTags, Segment, Tagger
from dlcp.transport import RELIABLE, Arrival, Delivery, Endpoint, LossBound, MessageKey

RATE = np.dtype(">f4")
"""What follows the values of a result: the rates at which its sender reaches each contributor, in bit/s."""
PUSH = 0
PULL = 1
MESSAGES_PER_STEP = 1 << 16


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """What an all-reduce may lose and how it makes up for it.

    Parameters
    ----------
    bound
        The loss that the first hop may suffer.
    error_feedback
        Send what was lost with the next step.
    rescale
        Divide each sum by how many ranks it holds rather than by how many there are, so that loss does not shrink it.
    adaptive_shards
        Give ranks that receive slowly, because their port is congested, less to add up.
    """

    bound: LossBound = field(default_factory=lambda: LossBound(0.1))
    error_feedback: bool = True
    rescale: bool = True
    adaptive_shards: bool = True


@dataclass(slots=True)
class Bucket:
    """A buffer of gradients: flat ``values`` in the storage of ``value_type``, and the layers in it.

    The average is written back into ``values``.
    """

    values: NDArray[np.generic]
    value_type: ValueType
    segments: Sequence[Segment]


def message_number(sequence: int, phase: int, receiver: int, ranks: int) -> int:
    """Return the number of a message within its step.

    It differs between receivers, for a switch knows a message by job, step, number and sender.

    Raises
    ------
    ValueError
        The step has more messages than the header can number.
    """
    number = (sequence * 2 + phase) * ranks + receiver
    if number >= MESSAGES_PER_STEP:
        raise ValueError(
            f"bucket {sequence} among {ranks} ranks needs message number {number}, the header has {MESSAGES_PER_STEP}; "
            "use larger buckets"
        )
    return number


def average(
    shares: Mapping[int, NDArray[np.generic]],
    delivered: Mapping[int, NDArray[np.bool_]],
    value_type: ValueType,
    values_per_packet: int,
    *,
    rescale: bool,
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

    Returns
    -------
    The average, and what of the sum it leaves out or counts too much: ``sum - ranks * average``.
    """
    total: NDArray[np.floating] | None = None
    for rank in sorted(shares):
        part = value_type.widen(shares[rank])
        total = part.copy() if total is None else np.add(total, part, out=total)
    assert total is not None
    counts = np.sum([delivered[rank] for rank in sorted(delivered)], axis=0)
    ranks = len(shares)
    if not rescale or (counts == ranks).all():
        return total / total.dtype.type(ranks), np.zeros(0, total.dtype)
    divisor = np.repeat(np.maximum(counts, 1), values_per_packet)[: len(total)].astype(total.dtype)
    mean = total / divisor
    # What is not finite is for this step's loss scaler; owed, it would spoil the next one.
    even = (divisor == ranks) | ~np.isfinite(mean)
    with np.errstate(invalid="ignore"):
        return mean, np.where(even, 0, total - ranks * mean).astype(total.dtype)


class DirectAllReduce:
    """All-reduce of one rank with its peers.

    :meth:`start` may be called from any thread; everything else runs in the endpoint's.

    Parameters
    ----------
    endpoint
        This rank's endpoint.
    contributors
        The ranks that contribute and get the result, this one among them.
    weights
        Each owner's weight in the division into shards; by default the contributors own shards, equal ones or such as
        suit the rates at which they receive.
    options, tagger, ledger, feedback
        What may be lost, how packets are tagged, where messages are entered, and what is owed from before.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        contributors: Sequence[int],
        *,
        weights: Mapping[int, float] | None = None,
        options: ReduceOptions | None = None,
        tagger: Tagger | None = None,
        ledger: Ledger | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.contributors = sorted(contributors)
        self.options = options or ReduceOptions()
        self.weights = dict(weights or dict.fromkeys(self.contributors, 1.0))
        self.adaptive = self.options.adaptive_shards and weights is None
        self.rates_bps: dict[int, NDArray[np.generic]] = {}
        """What each rank told with the step's last bucket, and by which bucket."""
        self.rated_by: dict[int, int] = {}
        self.tagger = tagger or Tagger()
        self.ledger = ledger or Ledger()
        self.feedback = feedback or ErrorFeedback()
        self.ranks = max([*self.contributors, *self.weights]) + 1

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket over the contributors; the future's result is ``bucket.values``, written in place.

        Parameters
        ----------
        step
            Training step; the same on all ranks.
        sequence
            Number of the bucket within the step; the same on all ranks.
        """
        run = _Run(self, step, sequence, bucket)
        self.endpoint.call(run.begin)
        return run.done

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on, and divide buckets as the last step has taught.

        All results of the last step are in on every rank, so that all divide alike.
        """
        if self.adaptive and len(self.rates_bps) == len(self.weights):
            self.weights = weights_for_rates(inbound_rates(self.rates_bps))
        self.rates_bps, self.rated_by = {}, {}
        self.endpoint.call(partial(self._forget_before, step))

    def rates(self) -> NDArray[np.generic]:
        """Return the rates at which this rank reaches each contributor, in bit/s; 0 where it does not know."""
        protocol, rank = self.endpoint.protocol, self.endpoint.rank
        return np.array([0 if peer == rank else protocol.rate_to(peer) for peer in self.contributors], RATE)

    def _forget_before(self, step: int) -> None:
        self.endpoint.protocol.forget_before(step)


class _Run:
    """One bucket on its way through the all-reduce."""

    def __init__(self, reducer: DirectAllReduce, step: int, sequence: int, bucket: Bucket) -> None:
        self.reducer, self.step, self.sequence, self.bucket = reducer, step, sequence, bucket
        self.rank = reducer.endpoint.rank
        self.done: Future[NDArray[np.generic]] = Future()
        value_type = bucket.value_type
        self.values_per_packet = reducer.endpoint.options.payload_bytes // value_type.storage.itemsize
        self.shards = shard_bounds(len(bucket.values), self.values_per_packet, reducer.weights)
        # What is sent must outlive the step's buffer, and carries what earlier steps lost.
        total = value_type.widen(bucket.values).copy()
        if reducer.options.error_feedback:
            reducer.feedback.add_to(total, bucket.segments)
        self.sent = value_type.narrow(total)
        self.tags = reducer.tagger.tag(self.sent, value_type, bucket.segments, self.values_per_packet)
        self.owed = np.zeros(0, total.dtype)
        self.arrived: dict[int, NDArray[np.generic]] = {}
        self.delivered: dict[int, NDArray[np.bool_]] = {}
        self.waiting = 0

    def begin(self) -> None:
        """Send the shards of others, and wait for what others send."""
        endpoint, reducer = self.reducer.endpoint, self.reducer
        bound = reducer.options.bound
        others = [rank for rank in reducer.contributors if rank != self.rank]
        mine = self.shards.get(self.rank, (0, 0))
        self.waiting = 1
        for owner, (start, stop) in self.shards.items():
            if owner == self.rank or start == stop:
                continue
            self.waiting += 2
            key = self._key(PUSH, owner)
            tags = self._tags(start, stop)
            if owner not in reducer.contributors:
                tags.protected[-1] = True  # tells a parameter server the size
            sending = endpoint.send(
                owner, key, self._bytes(self.sent[start:stop]), tags, bound, self._label(start, stop)
            )
            sending.add_done_callback(self._guard(partial(self._on_pushed, owner, tags)))
            result = endpoint.receive(
                owner,
                self._key(PULL, self.rank),
                (stop - start) * self.sent.itemsize + len(reducer.contributors) * RATE.itemsize,
                RELIABLE,
                self._label(start, stop),
            )
            result.add_done_callback(self._guard(partial(self._on_result, owner)))
        if mine[0] < mine[1]:
            self.waiting += 1
            self.arrived[self.rank] = self.sent[mine[0] : mine[1]]
            self.delivered[self.rank] = np.ones(len(self._tags(*mine).queue), np.bool_)
            for peer in others:
                arrival = endpoint.receive(
                    peer,
                    self._key(PUSH, self.rank),
                    (mine[1] - mine[0]) * self.sent.itemsize,
                    bound,
                    self._label(*mine),
                )
                arrival.add_done_callback(self._guard(partial(self._on_share, peer)))
            if not others:
                self._reduce()
        self._one_done()

    def _on_share(self, peer: int, arrival: Arrival) -> None:
        self.arrived[peer] = arrival.payload.view(self.sent.dtype)
        self.delivered[peer] = arrival.delivered
        if len(self.arrived) == len(self.reducer.contributors):
            self._reduce()

    def _reduce(self) -> None:
        start, stop = self.shards[self.rank]
        options = self.reducer.options
        mean, error = average(
            self.arrived, self.delivered, self.bucket.value_type, self.values_per_packet, rescale=options.rescale
        )
        if len(error):
            self._owe(start, error)
        result = self.bucket.value_type.narrow(mean)
        self.arrived.clear()
        self.bucket.values[start:stop] = result
        rates_bps = self.reducer.rates()
        self._note_rates(self.rank, rates_bps)
        payload = memoryview(np.ascontiguousarray(result).tobytes() + rates_bps.tobytes())
        tags = self._tags(start, stop, len(payload))
        for peer in self.reducer.contributors:
            if peer != self.rank:
                key = self._key(PULL, peer)
                label = self._label(start, stop)
                sending = self.reducer.endpoint.send(peer, key, payload, tags, RELIABLE, label)
                sending.add_done_callback(self._guard(partial(self._enter, key, peer, tags, RELIABLE)))
        self._one_done()

    def _on_result(self, owner: int, arrival: Arrival) -> None:
        start, stop = self.shards[owner]
        values, trailer = np.split(arrival.payload, [(stop - start) * self.sent.itemsize])
        self.bucket.values[start:stop] = values.view(self.sent.dtype)
        self._note_rates(owner, trailer.view(RATE))
        self._one_done()

    def _note_rates(self, owner: int, rates_bps: NDArray[np.generic]) -> None:
        if self.sequence >= self.reducer.rated_by.get(owner, -1):
            self.reducer.rates_bps[owner] = rates_bps
            self.reducer.rated_by[owner] = self.sequence

    def _on_pushed(self, owner: int, tags: PacketTags, delivery: Delivery) -> None:
        start, stop = self.shards[owner]
        self._enter(self._key(PUSH, owner), owner, tags, self.reducer.options.bound, delivery)
        if not delivery.delivered.all():
            lost = np.repeat(~delivery.delivered, self.values_per_packet)[: stop - start]
            self._owe(start, np.where(lost, self.bucket.value_type.widen(self.sent[start:stop]), 0))
        self._one_done()

    def _enter(self, key: MessageKey, peer: int, tags: PacketTags, bound: LossBound, delivery: Delivery) -> None:
        start, stop = self.shards[self.rank if bound is RELIABLE else peer]
        self.reducer.ledger.record(key, peer, self._label(start, stop), tags, bound, delivery)

    def _owe(self, start: int, values: NDArray[np.floating]) -> None:
        if not len(self.owed):
            self.owed = np.zeros(len(self.sent), self.owed.dtype)
        self.owed[start : start + len(values)] += values

    def _one_done(self) -> None:
        self.waiting -= 1
        if self.waiting or self.done.done():
            return
        if len(self.owed) and self.reducer.options.error_feedback:
            self.reducer.feedback.owe(self.owed, self.bucket.segments)
        self.done.set_result(self.bucket.values)

    def _guard(self, action: Callable[[Any], None]) -> Callable[["Future[Any]"], None]:
        def on_done(future: "Future[Any]") -> None:
            try:
                action(future.result())
            except Exception as error:
                if not self.done.done():
                    self.done.set_exception(error)

        return on_done

    def _key(self, phase: int, receiver: int) -> MessageKey:
        return MessageKey(self.step, message_number(self.sequence, phase, receiver, self.reducer.ranks))

    def _tags(self, start: int, stop: int, size: int = 0) -> PacketTags:
        """Return the tags of a shard's packets; of one more, like the last, if ``size`` bytes need it."""
        first, last = start // self.values_per_packet, -(-stop // self.values_per_packet)
        packets = max(last - first, -(-size // self.reducer.endpoint.options.payload_bytes))
        chosen = np.minimum(np.arange(first, first + packets), last - 1)
        tags = self.tags
        return PacketTags(tags.queue[chosen], tags.drop_class[chosen], tags.layer[chosen], tags.protected[chosen])

    def _label(self, start: int, stop: int) -> str:
        names = [s.layer.name for s in self.bucket.segments if s.start < stop and s.stop > start]
        return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"

    @staticmethod
    def _bytes(values: NDArray[np.generic]) -> memoryview:
        return memoryview(np.ascontiguousarray(values).view(np.uint8).data)
