# SPDX-License-Identifier: Apache-2.0
"""A parameter server: a rank that contributes nothing, averages what the workers send, and sends the average to all."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.direct import RATE
from dlcp.collectives.message_numbers import ALL_GATHER, two_hop_number
from dlcp.collectives.reduction_rules import average
from dlcp.collectives.step_metadata import read_table, samples_of
from dlcp.dtypes import ValueType
from dlcp.ledger import Ledger
from dlcp.tags import PacketTags, queue_of_layer
from dlcp.transport import (
    RELIABLE,
    Arrival,
    Delivery,
    Endpoint,
    LossBound,
    MessageKey,
    ReceiveRequest,
    SendRequest,
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the server accepts as complete; the same on workers and server.

    Parameters
    ----------
    bound
        The loss that what a worker sends may suffer.
    value_type
        The format of the gradients.
    rescale
        Divide each sum by how many workers it holds. Only without error feedback: a server has no parameters to keep
        the residual of, so with both, lost gradients would count twice.
    weighted
        Workers say at the beginning of each step how many samples they have, and multiply what they send by their
        weight (:mod:`dlcp.collectives.reduction_rules`). Only float32.
    """

    bound: LossBound = field(default_factory=lambda: LossBound(0.1))
    value_type: ValueType = ValueType.FLOAT32
    rescale: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.weighted and self.value_type is not ValueType.FLOAT32:
            raise ValueError(f"a server whose workers weigh differently takes float32, not {self.value_type.value}")


class ParameterServer:
    """Serves the buckets of all steps until its endpoint is closed. It learns their sizes from the workers' packets.

    Parameters
    ----------
    endpoint
        The server's endpoint; the workers are its peers.
    workers
        Ranks of the workers.
    options
        See :class:`ServerOptions`.
    ledger
        Where the averages it sends are recorded.

    Attributes
    ----------
    failed
        Resolves, with the error, when the server cannot go on.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        workers: Sequence[int],
        *,
        options: ServerOptions | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.workers = sorted(workers)
        self.options = options or ServerOptions()
        self.ledger = ledger or Ledger()
        self.failed: Future[None] = Future()
        self._ranks = max([*self.workers, endpoint.rank]) + 1
        self._buckets: dict[MessageKey, dict[int, Arrival]] = {}
        """Contributions by the key of their messages and by worker."""
        self._samples: tuple[int, dict[int, int]] = (-1, {})
        """The latest step of which samples are known, and how many each worker has."""
        endpoint.call(partial(setattr, endpoint, "on_unexpected", self._receive))

    def _receive(self, worker: int, key: MessageKey) -> None:
        """Post a receive for a contribution whose first packet has come."""
        arriving = self.endpoint.receive(ReceiveRequest(worker, key, None, self.options.bound, self._label(key)))
        arriving.add_done_callback(partial(self._on_contribution, worker, key))

    def _on_contribution(self, worker: int, key: MessageKey, contribution: "Future[Arrival]") -> None:
        try:
            bucket = self._buckets.setdefault(key, {})
            bucket[worker] = contribution.result()
            if len(bucket) == len(self.workers):
                del self._buckets[key]
                self._send_average(key, bucket)
                # A worker is at most one step ahead of another: it cannot start the next without this one's average.
                self.endpoint.begin_step(key.step - 1)
        except Exception as error:
            self._fail(error)

    def _send_average(self, key: MessageKey, bucket: dict[int, Arrival]) -> None:
        value_type, sequence = self.options.value_type, self._sequence(key)
        sizes = {worker: len(arrival.payload) for worker, arrival in bucket.items()}
        if len(set(sizes.values())) > 1 or key.message % self._ranks != self.endpoint.rank:
            raise ValueError(
                f"step {key.step}, {self._label(key)}: workers sent {sizes} bytes; do all run the same model?"
            )
        mean, _ = average(
            {worker: arrival.payload.view(value_type.storage) for worker, arrival in bucket.items()},
            {worker: arrival.delivered for worker, arrival in bucket.items()},
            value_type,
            self.endpoint.options.payload_bytes // value_type.storage.itemsize,
            rescale=self.options.rescale,
            samples=self._samples[1] if self._samples[0] == key.step else None,
        )
        if self.options.weighted and sequence == 0:
            self._samples = key.step, samples_of(read_table(mean, self.workers))
        no_rates = bytes(len(self.workers) * RATE.itemsize)
        payload = memoryview(np.ascontiguousarray(value_type.narrow(mean)).tobytes() + no_rates)
        tags = _tags_of(bucket, -(-len(payload) // self.endpoint.options.payload_bytes))
        for worker in self.workers:
            reply = MessageKey(key.step, two_hop_number(sequence, ALL_GATHER, worker, self._ranks))
            sending = self.endpoint.send(SendRequest(worker, reply, payload, tags, RELIABLE, self._label(key)))
            sending.add_done_callback(partial(self._on_sent, worker, reply, tags))

    def _on_sent(self, worker: int, key: MessageKey, tags: PacketTags, sending: "Future[Delivery]") -> None:
        try:
            self.ledger.record(key, worker, self._label(key), tags, RELIABLE, sending.result())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _sequence(self, key: MessageKey) -> int:
        return key.message // self._ranks // 2

    def _label(self, key: MessageKey) -> str:
        return f"bucket {self._sequence(key)}"


def _tags_of(bucket: dict[int, Arrival], packets: int) -> PacketTags:
    """Tag an average like the gradients it was made of; a layer that nobody delivered goes first."""
    arrivals = list(bucket.values())
    layer: NDArray[np.uint8] = np.zeros(len(arrivals[0].layer), np.uint8)
    for arrival in arrivals:
        layer = np.where(arrival.delivered, arrival.layer, layer)
    layer = np.pad(layer, (0, packets - len(layer)), "edge")
    nothing = np.zeros(packets, np.uint8)
    return PacketTags(queue_of_layer(layer), nothing, layer, nothing.astype(np.bool_))
