# SPDX-License-Identifier: Apache-2.0
"""A parameter server: a rank that contributes nothing, averages what the workers send, and sends the average to all."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import RATE, ReduceOptions, guard
from dlcp.collectives.deferral import Deferral
from dlcp.collectives.message_numbers import ALL_GATHER, two_hop_number
from dlcp.collectives.reduction_rules import average
from dlcp.collectives.step_metadata import read_table, samples_of
from dlcp.dtypes import ValueType
from dlcp.ledger import Ledger
from dlcp.magnitudes import packet_magnitudes
from dlcp.tags import PacketTags, queue_of_layer
from dlcp.transport import (
    Arrival,
    Connection,
    Delivery,
    LossBound,
    MessageKey,
    PeerSilentError,
    ReceiveRequest,
    SendRequest,
    Then,
)

log = logging.getLogger("dlcp")

SERVER_TERMS: Final = "loss_bound", "immediate", "deferral_bound", "rescale", "weighted", "float32"
"""What workers and server must have alike, in the order in which workers tell it; see :func:`worker_terms`."""
ASK_AGAIN_S: Final = 0.1
"""Time after which a worker asks the server again, since packets may be lost. Not tuned."""
SMALL_LAYER_PACKETS: Final = 3
"""Layers of so few packets are never put off. Chosen by us: what workers take for small
(``TagPolicy.small_layer_values``) fits into three packets of an MTU of 1500."""


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
        Divide each sum by how many workers it holds. Only without error feedback: with both, lost gradients would count
        twice.
    weighted
        Workers say at the beginning of each step how many samples they have, and multiply what they send by their
        weight (:mod:`dlcp.collectives.reduction_rules`). Only float32.
    deferral_bound
        The largest share of a message's packets that may be put off to a later step, in both directions
        (:mod:`dlcp.collectives.deferral`). Only with error feedback, for workers keep what is put off.
    """

    bound: LossBound = field(default_factory=lambda: LossBound(0.1))
    value_type: ValueType = ValueType.FLOAT32
    rescale: bool = False
    weighted: bool = False
    deferral_bound: float = 0.0

    def __post_init__(self) -> None:
        if self.weighted and self.value_type is not ValueType.FLOAT32:
            raise ValueError(f"a server whose workers weigh differently takes float32, not {self.value_type.value}")
        if self.deferral_bound and self.rescale:
            raise ValueError("a server that puts packets off must not rescale: workers send them with the next step")

    def differing(self, terms: Mapping[str, Any]) -> str:
        """Return in what a worker's terms and these differ, and what to do; empty if they agree.

        Parameters
        ----------
        terms
            See :func:`worker_terms`.
        """
        mine = {
            "loss_bound": self.bound.ratio,
            "immediate": self.bound.immediate,
            "deferral_bound": self.deferral_bound,
            "rescale": self.rescale,
            "weighted": self.weighted if self.rescale else terms.get("weighted"),
        }
        for name, value in mine.items():
            if name in terms and terms[name] != value:
                option = f"--{name.replace('_', '-')}"
                switch = option if isinstance(value, bool) else f"{option} {terms[name]}"
                remedy = f"without {option}" if terms[name] is False else f"with {switch}"
                return (
                    f"the parameter server has {name}={value!r} and the workers {terms[name]!r}; start it {remedy}, or "
                    "change the workers"
                )
        if terms.get("float32") and self.value_type is not ValueType.FLOAT32:
            return (
                f"the parameter server has value_type={self.value_type.value!r}, and {terms['float32']} of the workers "
                "needs float32; start it with --value-type float32, or leave that out"
            )
        return ""

    @property
    def contribution_bound(self) -> LossBound:
        """What a contribution may lose, and what of it a worker may put off."""
        return replace(self.bound, deferral=self.deferral_bound)


def worker_terms(options: ReduceOptions, *, weighted: bool = False, float32: str = "") -> dict[str, float | bool | str]:
    """Return the worker's options that must equal the server's.

    Parameters
    ----------
    weighted
        Whether workers say how many samples they have.
    float32
        What options send values of that format to the server, whatever that of the gradients is.
    """
    return {
        "loss_bound": options.bound.ratio,
        "immediate": options.bound.immediate,
        "deferral_bound": options.deferral_bound if options.error_feedback else 0.0,
        "rescale": options.rescale,
        "weighted": weighted,
        "float32": float32,
    }


def agree_with_server(connection: Connection, server: int, terms: Mapping[str, Any], limit_s: float) -> str:
    """Ask a server whether it has the same terms; return in what they differ, or an empty string.

    Raises
    ------
    PeerSilentError
        It has not answered in time.
    """
    answer: Future[str] = Future()

    def on_notice(peer: int, content: bytes) -> None:
        if peer == server and not answer.done():
            answer.set_result(content.decode(errors="replace"))

    connection.call(partial(setattr, connection, "on_notice", on_notice))
    # Without names: a notice has to fit the smallest packets.
    question = json.dumps([terms[name] for name in SERVER_TERMS], separators=(",", ":")).encode()
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        connection.call(partial(connection.notify, server, question))
        with suppress(FutureTimeoutError):
            return answer.result(ASK_AGAIN_S)
    raise PeerSilentError(f"the parameter server has not said in {limit_s:.0f} s how it was started")


class ParameterServer:
    """Serves the buckets of all steps until its connection is closed. It learns their sizes from the workers' packets.

    Parameters
    ----------
    connection
        The server's connection; the workers are its peers.
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
        connection: Connection,
        workers: Sequence[int],
        *,
        options: ServerOptions | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.connection = connection
        self.workers = sorted(workers)
        self.options = options or ServerOptions()
        self.ledger = ledger or Ledger()
        self.failed: Future[None] = Future()
        self._bound = self.options.contribution_bound
        self._average_bound = LossBound(deferral=self.options.deferral_bound)
        self._deferral = Deferral(connection.rank, self.workers, self.options.deferral_bound)
        self._step = -1
        self._ranks = max([*self.workers, connection.rank]) + 1
        self._buckets: dict[MessageKey, dict[int, Arrival]] = {}
        """Contributions by the key of their messages and by worker."""
        self._samples: tuple[int, dict[int, int]] = (-1, {})
        """The latest step of which samples are known, and how many each worker has."""
        connection.call(partial(setattr, connection, "on_unexpected", self._receive))
        connection.call(partial(setattr, connection, "on_notice", self._on_terms))

    def _on_terms(self, worker: int, content: bytes) -> None:
        """Answer a worker that asks whether this server was started as it has to be."""
        try:
            differing = self.options.differing(dict(zip(SERVER_TERMS, json.loads(content), strict=True)))
            if differing:
                log.warning("DLCP: %s", differing)
            self.connection.notify(worker, differing.encode()[: self.connection.options.payload_bytes - 1])
        except Exception as error:  # of a worker of another version, say: this server has others
            log.warning("worker %d has terms that are not understood: %r", worker, error)

    def _receive(self, worker: int, key: MessageKey) -> None:
        """Post a receive for a contribution whose first packet has come."""
        request = ReceiveRequest(worker, key, None, self._bound, self._label(key))
        self.connection.receive(request, self._guard(partial(self._on_contribution, worker, key)))

    def _on_contribution(self, worker: int, key: MessageKey, contribution: Arrival) -> None:
        bucket = self._buckets.setdefault(key, {})
        bucket[worker] = contribution
        if len(bucket) == len(self.workers):
            del self._buckets[key]
            self._send_average(key, bucket)
            # A worker is at most one step ahead of another: it cannot start the next without this one's average.
            self.connection.begin_step(key.step - 1)

    def _send_average(self, key: MessageKey, bucket: dict[int, Arrival]) -> None:
        value_type, sequence = self.options.value_type, self._sequence(key)
        sizes = {worker: len(arrival.payload) for worker, arrival in bucket.items()}
        if len(set(sizes.values())) > 1 or key.message % self._ranks != self.connection.rank:
            raise ValueError(
                f"step {key.step}, {self._label(key)}: workers sent {sizes} bytes; do all run the same model?"
            )
        mean = average(
            {worker: arrival.payload.view(value_type.storage) for worker, arrival in bucket.items()},
            {worker: arrival.delivered for worker, arrival in bucket.items()},
            value_type,
            self.connection.options.payload_bytes // value_type.storage.itemsize,
            rescale=self.options.rescale,
            samples=self._samples[1] if self._samples[0] == key.step else None,
        )
        if self.options.weighted and sequence == 0:
            self._samples = key.step, samples_of(read_table(mean, self.workers))
        no_rates = bytes(len(self.workers) * RATE.itemsize)
        payload = memoryview(np.ascontiguousarray(value_type.narrow(mean)).tobytes() + no_rates)
        tags = _tags_of(bucket, -(-len(payload) // self.connection.options.payload_bytes))
        deferred = None
        if self._bound.deferral:
            deferred = self._choose_deferred(key, mean, bucket, tags)
            self.ledger.note_waiting(sequence, np.zeros(0, np.bool_) if deferred is None else deferred)
        for worker in self.workers:
            reply = MessageKey(key.step, two_hop_number(sequence, ALL_GATHER, worker, self._ranks))
            request = SendRequest(
                worker, reply, payload, tags, self._average_bound, self._label(key), deferred=deferred
            )
            self.connection.send(request, self._guard(partial(self._on_sent, worker, reply, tags)))

    def _choose_deferred(
        self, key: MessageKey, mean: NDArray[np.floating], bucket: dict[int, Arrival], tags: PacketTags
    ) -> NDArray[np.bool_] | None:
        """Return which packets of an average are put off to a later step, by all workers; None if all are sent."""
        if key.step > self._step:
            self._step = key.step
            self._deferral.begin_step({}, set(), {})
        # Workers see whether this port is congested, and know which buckets are exact: of those they defer nothing.
        share = self._deferral.share_through_server(is_clear=not any(each.deferred for each in bucket.values()))
        if not share:
            return None
        value_type = self.options.value_type
        per_packet = self.connection.options.payload_bytes // value_type.storage.itemsize
        magnitudes = packet_magnitudes(value_type.narrow(mean), value_type, per_packet)
        packets = len(magnitudes)
        of_layer = np.bincount(tags.layer[:packets], minlength=256)[tags.layer[:packets]]
        matters = self._deferral.due(0, packets, key.step) | (of_layer <= SMALL_LAYER_PACKETS)
        matters[-1] = True  # what is not deferred ends a message
        limit = self._average_bound.deferrable(len(tags.queue))
        deferred = self._deferral.choose((ALL_GATHER, self._sequence(key)), magnitudes, ~matters, share, limit)
        return None if deferred is None else np.append(deferred, np.zeros(len(tags.queue) - packets, np.bool_))

    def _on_sent(self, worker: int, key: MessageKey, tags: PacketTags, delivery: Delivery) -> None:
        self.ledger.record(key, worker, self._label(key), tags, self._average_bound, delivery)

    def _guard(self, action: Callable[[Any], None]) -> Then[Any]:
        return guard(action, self._fail)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _sequence(self, key: MessageKey) -> int:
        return key.message // self._ranks // 2

    def _label(self, key: MessageKey) -> str:
        return f"part {self._sequence(key)}"


def _tags_of(bucket: dict[int, Arrival], packets: int) -> PacketTags:
    """Tag an average like the gradients it was made of; a layer that nobody delivered goes first."""
    arrivals = list(bucket.values())
    layer: NDArray[np.uint8] = np.zeros(len(arrivals[0].layer), np.uint8)
    for arrival in arrivals:
        layer = np.where(arrival.delivered, arrival.layer, layer)
    layer = np.pad(layer, (0, packets - len(layer)), "edge")
    nothing = np.zeros(packets, np.uint8)
    return PacketTags(queue_of_layer(layer), nothing, layer, nothing.astype(np.bool_))
