# SPDX-License-Identifier: Apache-2.0
"""Pair exchange: the all-reduce of a small bucket between two ranks, in one hop.

Each rank sends the other its whole contribution, and both average. Between two ranks this takes as many bytes as two
hops, but half the messages and half the latency, which dominates a small bucket's time.

Replicas stay equal even with packet loss: the peer's acknowledgement tells a rank which packets of its contribution
arrived. The rank leaves out the others, as the peer must, and keeps them as residual.
"""

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, BucketRun, RankContext
from dlcp.collectives.message_numbers import REDUCE_SCATTER
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import average
from dlcp.collectives.shards import DirectPlan
from dlcp.transport import Arrival, Delivery, MessageKey, ReceiveRequest, SendRequest
from dlcp.values.dtypes import ValueType


class PairRun(BucketRun):
    """One bucket of two ranks in progress.

    Parameters
    ----------
    plan
        A plan in which the peer owns everything.
    """

    def __init__(self, context: RankContext, plan: DirectPlan, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(context, step, sequence, bucket)
        self.plan, self.rank = plan, context.rank
        (self.peer,) = context.peers
        if self.context.options.error_feedback:
            self.context.residual.apply(bucket.values, bucket.segments, bucket.value_type)
        tags = self.plan.tag(self.context, bucket, step)
        self.tags = self.plan.tags_of(self.peer, tags)
        self.delivery: Delivery | None = None
        """The peer's acknowledgement of this rank's contribution; None until it arrives."""
        self.arrival: Arrival | None = None
        """The peer's contribution; None until it arrives."""
        self.averaged: NDArray[np.generic] | None = None
        """A copy of the average, which the peer may need; the caller reuses its own buffer."""
        self._note("tagged", self.plan.bits)

    def begin(self) -> None:
        """Post the receive, and contribute."""
        peer, plan, connection = self.peer, self.plan, self.context.connection
        contribution, bound, label = self.bucket.values.view(np.uint8), plan.loss_bounds[peer], plan.labels[peer]
        theirs = ReceiveRequest(peer, self._key(self.rank), len(contribution), bound, label)
        connection.receive(theirs, self._on_contribution, self.fail)
        order = plan.orders[peer]
        ours = SendRequest(peer, self._key(peer), contribution.data, self.tags, bound, label, order=order)
        connection.send(ours, self._on_contributed, self.fail)

    def _key(self, receiver: int) -> MessageKey:
        return self.context.key(self.step, self.sequence, REDUCE_SCATTER, receiver)

    def _on_contribution(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self._note("contributed", self.peer)
        if self.delivery is not None:
            self._average(self.delivery, arrival)

    def _on_contributed(self, delivery: Delivery) -> None:
        plan, peer = self.plan, self.peer
        self.context.ledger.record(
            self._key(peer), peer, plan.labels[peer], self.tags, plan.loss_bounds[peer], delivery
        )
        self.delivery = delivery
        if self.arrival is not None:
            self._average(delivery, self.arrival)

    def _average(self, delivery: Delivery, arrival: Arrival) -> None:
        """Average what has arrived on both sides, in the order of ranks, and give the caller the bucket."""
        bucket, ours, options = self.bucket, self.bucket.values, self.context.options
        theirs = arrival.payload.view(ours.dtype)
        if delivery.lost:
            positions = self._positions(~delivery.delivered, len(ours))
            if options.error_feedback:
                self.context.residual.add_at(positions, bucket.value_type.widen(ours)[positions], bucket.segments)
            ours[positions] = 0
        first, second = (ours, theirs) if self.rank < self.peer else (theirs, ours)
        with np.errstate(over="ignore", invalid="ignore"):  # the loss scaler handles these
            if bucket.value_type is ValueType.FLOAT32 and not options.rescale:
                np.add(first, second, out=ours)
                np.multiply(ours, np.float32(0.5 * bucket.factor), out=ours)
            else:
                mean = average(
                    {self.rank: ours, self.peer: theirs},
                    {self.rank: delivery.delivered, self.peer: arrival.delivered},
                    bucket.value_type,
                    self.values_per_packet,
                    rescale=options.rescale,
                    samples=bucket.samples,
                )
                ours[:] = bucket.value_type.narrow(
                    mean if bucket.factor == 1 else mean * mean.dtype.type(bucket.factor)
                )
        self.averaged = ours.copy()
        self._note("summed")
        self._note("gathered", self.peer)
        self.set_result(ours)

    def partial_result(self) -> PartialResult:
        """Return this rank's state of the bucket."""
        widen, packets = self.bucket.value_type.widen, -(-len(self.bucket.values) // self.values_per_packet)
        if self.averaged is None or self.delivery is None or self.arrival is None:
            values = widen(self.bucket.values).copy()
            return PartialResult.untouched(self.rank, values, self.values_per_packet)
        included = {self.rank: self.delivery.delivered[:packets], self.peer: self.arrival.delivered[:packets]}
        final = np.ones(packets, np.bool_)
        return PartialResult(widen(self.averaged), self.values_per_packet, final, dict(included))
