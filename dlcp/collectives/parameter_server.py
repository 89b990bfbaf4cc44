# SPDX-License-Identifier: Apache-2.0
"""A parameter server: a rank without gradients, which averages the workers' gradients and sends the result to all."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import FORMATS, RATE, ReduceOptions, guard
from dlcp.collectives.deferral import Deferral
from dlcp.collectives.message_numbers import ALL_GATHER, two_hop_number
from dlcp.collectives.reduction_rules import average
from dlcp.collectives.step_metadata import read_table, samples_of
from dlcp.dtypes import ValueType
from dlcp.ledger import Ledger
from dlcp.magnitudes import packet_magnitudes
from dlcp.tags import PacketTags, queue_of_layer
from dlcp.transport import Arrival, Connection, Delivery, LossBound, MessageKey, ReceiveRequest, SendRequest

SMALL_LAYER_PACKETS: Final = 3
"""Layers of at most this many packets are never deferred. Small layers by the workers' definition
(``TagPolicy.small_layer_values``) fit into three packets of an MTU of 1500."""


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
        self._bound = replace(self.options.bound, deferral=self.options.deferral_bound)
        self._average_bound = LossBound(deferral=self.options.deferral_bound)
        self._deferral = Deferral(connection.rank, self.workers, self.options.deferral_bound)
        self._step = -1
        self._ranks = max([*self.workers, connection.rank]) + 1
        self._buckets: dict[MessageKey, dict[int, Arrival]] = {}
        """Contributions by the key of their messages and by worker."""
        self._samples: tuple[int, dict[int, int]] = (-1, {})
        """The latest step with known samples, and their number on each worker."""
        connection.call(partial(setattr, connection, "on_unexpected", self._receive))

    def _receive(self, worker: int, key: MessageKey) -> None:
        """Post a receive for a contribution whose first packet has arrived."""
        request = ReceiveRequest(worker, key, None, self._bound, self._label(key))
        self.connection.receive(request, guard(partial(self._on_contribution, worker, key), self._fail))

    def _on_contribution(self, worker: int, key: MessageKey, contribution: Arrival) -> None:
        bucket = self._buckets.setdefault(key, {})
        bucket[worker] = contribution
        if len(bucket) == len(self.workers):
            del self._buckets[key]
            self._send_average(key, bucket)
            # A worker is at most one step ahead of another: it cannot start the next without this one's average.
            self.connection.begin_step(key.step - 1)

    def _send_average(self, key: MessageKey, bucket: dict[int, Arrival]) -> None:
        sequence, contributions = self._sequence(key), {}
        sent: dict[int, str] = {}
        for worker, arrival in bucket.items():
            value_type = FORMATS[int(arrival.payload[-1])]
            contributions[worker] = arrival.payload[:-1].view(value_type.storage)
            sent[worker] = f"{len(arrival.payload) - 1} bytes of {value_type.value}"
        if len(set(sent.values())) > 1 or key.message % self._ranks != self.connection.rank:
            raise ValueError(f"step {key.step}, {self._label(key)}: workers sent {sent}; do all run the same model?")
        mean = average(
            contributions,
            {worker: arrival.delivered for worker, arrival in bucket.items()},
            value_type,
            self.connection.options.payload_bytes // value_type.storage.itemsize,
            rescale=self.options.rescale,
            samples=self._samples[1] if self._samples[0] == key.step else None,
        )
        if self.weighted and sequence == 0:
            self._samples = key.step, samples_of(read_table(mean, self.workers))
        narrowed = np.ascontiguousarray(value_type.narrow(mean))
        no_rates = bytes(len(self.workers) * RATE.itemsize)
        payload = memoryview(narrowed.tobytes() + no_rates)
        tags = _tags_of(bucket, -(-len(payload) // self.connection.options.payload_bytes))
        deferred = None
        if self._bound.deferral:
            deferred = self._choose_deferred(key, narrowed, value_type, bucket, tags)
            self.ledger.note_waiting(sequence, np.zeros(0, np.bool_) if deferred is None else deferred)
        for worker in self.workers:
            reply = MessageKey(key.step, two_hop_number(sequence, ALL_GATHER, worker, self._ranks))
            request = SendRequest(
                worker, reply, payload, tags, self._average_bound, self._label(key), deferred=deferred
            )
            self.connection.send(request, guard(partial(self._on_sent, worker, reply, tags), self._fail))

    def _choose_deferred(
        self,
        key: MessageKey,
        mean: NDArray[np.generic],
        value_type: ValueType,
        bucket: dict[int, Arrival],
        tags: PacketTags,
    ) -> NDArray[np.bool_] | None:
        """Return the mask of packets of an average that are deferred; None if all are sent."""
        if key.step > self._step:
            self._step = key.step
            self._deferral.begin_step({}, set(), {})
        # Workers see whether this port is congested, and know which buckets are exact: of those they defer nothing.
        share = self._deferral.share_through_server(is_clear=not any(each.deferred for each in bucket.values()))
        if not share:
            return None
        per_packet = self.connection.options.payload_bytes // value_type.storage.itemsize
        magnitudes = packet_magnitudes(mean, value_type, per_packet)
        packets = len(magnitudes)
        of_layer = np.bincount(tags.layer[:packets], minlength=256)[tags.layer[:packets]]
        matters = self._deferral.due(0, packets, key.step) | (of_layer <= SMALL_LAYER_PACKETS)
        matters[-1] = True  # what is not deferred ends a message
        limit = self._average_bound.deferrable(len(tags.queue))
        deferred = self._deferral.choose((ALL_GATHER, self._sequence(key)), magnitudes, ~matters, share, limit)
        return None if deferred is None else np.append(deferred, np.zeros(len(tags.queue) - packets, np.bool_))

    def _on_sent(self, worker: int, key: MessageKey, tags: PacketTags, delivery: Delivery) -> None:
        self.ledger.record(key, worker, self._label(key), tags, self._average_bound, delivery)

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
    layer = np.pad(layer, (0, packets - len(layer)), "edge")
    nothing = np.zeros(packets, np.uint8)
    return PacketTags(queue_of_layer(layer), nothing, layer, nothing.astype(np.bool_))
