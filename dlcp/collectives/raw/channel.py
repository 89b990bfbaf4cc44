# SPDX-License-Identifier: Apache-2.0
"""Sending and receiving for a process group's collectives: keys, tags, outcomes, and cleanup."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dlcp.collectives.message_numbers import collective_number, horizon_number
from dlcp.collectives.raw.elementwise_ops import ElementwiseOp
from dlcp.collectives.raw.operation import Operation
from dlcp.collectives.raw.point_to_point import PointToPoint
from dlcp.transport import (
    RELIABLE,
    Arrival,
    Delivery,
    Endpoint,
    LossBound,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    TransportError,
)
from dlcp.transport.ledger import Ledger
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, PacketTags, Segment, Tagger, plain_tags

EAGER_BYTES = 16 << 10
"""Messages up to this size are sent from a copy, so a collective can end before they are acknowledged. Not tuned."""
HORIZON_EVERY = 256
"""Ranks exchange the horizon, below which all messages are finished, once per this number of collectives. Not tuned."""
RANKS_MAX = 2048
"""The most ranks that can have message numbers of their own in every round of a collective."""


@dataclass(slots=True)
class AllowedLoss:
    """The loss bound of contributions to a reduction, and the record of their losses.

    There is no error feedback, because a group cannot match a tensor to that of the last step. Instead, the sum of the
    delivered contributions is scaled up.
    """

    bound: LossBound
    tagger: Tagger = field(default_factory=Tagger)
    ledger: Ledger = field(default_factory=Ledger)
    least_values: int = 1024
    """Smaller buffers arrive in full: they cost little, and often hold a norm or a count, not a gradient."""


@dataclass(slots=True)
class Collective:
    """An issued collective."""

    number: int
    operation: Operation
    label: str
    loss: AllowedLoss | None
    op: ElementwiseOp | None


class Channel:
    """Messages of one rank's collectives within its group. Thread-safe.

    One failed collective ends the whole group: this rank notifies the others, and every pending or later collective
    fails with the same error.

    Parameters
    ----------
    endpoint
        This rank's endpoint; closed by :meth:`close`.
    ranks
        Number of ranks, 0 to ``ranks - 1``.
    name
        The group's name, for error messages.
    """

    def __init__(self, endpoint: Endpoint, ranks: int, name: str) -> None:
        if ranks > RANKS_MAX:
            raise ValueError(f"group {name} has {ranks} ranks; messages can be numbered for {RANKS_MAX}")
        self.endpoint, self.connection = endpoint, endpoint.connection
        self.rank, self.ranks, self.name = self.connection.rank, ranks, name
        self.peers = [rank for rank in range(ranks) if rank != self.rank]
        self._lock = threading.RLock()
        self._next = 0
        self._failure: TransportError | None = None
        self._under_way: dict[int, Operation] = {}
        self._floors: dict[int, int] = dict.fromkeys(self.peers, 0)
        self._unconfirmed = 0
        """Parts that peers have not acknowledged."""
        self._adder = ThreadPoolExecutor(1, f"dlcp-{name}-add")
        where = f"group {name}, rank {self.rank}"
        self.point_to_point = PointToPoint(self.connection, where, self._fail, self.peers, lambda: self._next)

    @property
    def busy(self) -> bool:
        """Whether a collective is in progress."""
        return bool(self._under_way)

    def close(self, reason: str | None = None) -> None:
        """Close the channel. Without a ``reason``, wait until the peers have all data; with one, send it to them."""
        end_s = time.monotonic() + self.connection.options.silence_s
        while reason is None and self._unconfirmed and not self._failure and time.monotonic() < end_s:
            time.sleep(0.002)
        self.endpoint.close(reason)
        self._fail(TransportError(f"group {self.name}, rank {self.rank}: the group has been closed"))
        self._adder.shutdown(wait=True, cancel_futures=True)

    def start(
        self, what: str, loss: AllowedLoss | None = None, op: ElementwiseOp | None = None, size: int = 0
    ) -> Collective:
        """Return a numbered collective.

        A reduction of ``size`` bytes may lose packets within ``loss``, if its op allows it.
        """
        if loss and op:
            values = size // op.storage.itemsize
            if not op.bears_loss or values < loss.least_values or loss.bound.ratio == 0:
                loss = None
        with self._lock:
            number = self._next
            self._next += 1
            where = f"group {self.name}, rank {self.rank}: {what} number {number}"
            operation = Operation(where, self._fail, self._later)
            collective = Collective(number, operation, f"{what} number {number} of group {self.name}", loss, op)
            if self._failure:
                operation.fail(self._failure)
            else:
                if self.connection.timeline is not None:
                    self.connection.timeline.note("issued", number, 0, what)
                self._under_way[number] = operation
                operation.done.add_done_callback(lambda _: self._end(number))
        if number % HORIZON_EVERY == HORIZON_EVERY - 1:
            self.call(partial(self._exchange_horizon, number))
        return collective

    def begin(self, collective: Collective, action: Callable[[], None]) -> None:
        """Start a collective in the endpoint's thread, where all callbacks run, too."""
        collective.operation.hold()

        def act() -> None:
            with collective.operation:
                action()

        self.call(act, collective.operation)

    def aside(self, collective: Collective, function: Callable[[], None], then: Callable[[], None]) -> None:
        """Run a long function in the work thread, in order, and then ``then`` in the endpoint's thread."""
        collective.operation.hold()

        def conclude(done: "Future[None]") -> None:
            with collective.operation:
                done.result()
                then()

        self._adder.submit(function).add_done_callback(
            lambda done: self.call(partial(conclude, done), collective.operation)
        )

    def call(self, action: Callable[[], None], operation: Operation | None = None) -> None:
        """Run an action in the endpoint's thread. If the thread has ended, the operation fails."""
        try:
            self.endpoint.call(action)
        except TransportError as error:
            if operation:
                operation.fail(error)

    # Parts of collectives, in the endpoint's thread -------------------------------------------------------------------

    def send_part(
        self,
        collective: Collective,
        peer: int,
        phase: int,
        data: memoryview,
        *,
        then: Callable[[], None] | None = None,
        lossy: bool = False,
        own: bool = False,
    ) -> None:
        """Send a part of a collective, in full or, if ``lossy``, within its bound; an empty part is not sent.

        Parameters
        ----------
        then
            Called once the peer has the part; the collective waits for that. Without it, the collective may end
            earlier.
        own
            Whether the data belongs to the collective, and no longer changes.
        """
        if collective.operation.done.done():
            return
        if not len(data):
            if then:
                then()
            return
        operation, size = collective.operation, len(data)
        copied = size <= EAGER_BYTES and not (own or then or lossy)
        if copied:
            data = memoryview(bytes(data))
        key = self.key(collective, phase, peer)
        tags, bound = (
            (self._lossy_tags(collective, data), collective.loss.bound)
            if lossy and collective.loss
            else (None, RELIABLE)
        )
        self._unconfirmed += 1

        def on_delivery(delivery: Delivery) -> None:
            if tags and collective.loss:
                collective.loss.ledger.record(key, peer, collective.label, tags, bound, delivery)
            if then:
                then()

        if tags or then:
            part = operation.part(on_delivery)
        elif own or copied:
            part = _ignore  # the operation does not wait for it, and may have ended
        else:
            part = operation.part_in_place(size, partial(self.connection.detach, peer, key))

        def on_sent(delivery: Delivery) -> None:
            part(delivery)  # if it raises, on_failure is called
            self._unconfirmed -= 1

        def on_failure(error: Exception) -> None:
            self._unconfirmed -= 1
            operation.fail(error)

        request = SendRequest(peer, key, data, tags or self._plain_tags(size), bound, collective.label)
        self.connection.send(request, on_sent, on_failure)

    def receive_part(
        self, collective: Collective, peer: int, phase: int, data: memoryview, then: Callable[[], None] | None = None
    ) -> None:
        """Receive a part of a collective in full into ``data``, and call ``then``; an empty part completes at once."""
        if len(data):
            key = self.key(collective, phase, self.rank)
            request = ReceiveRequest(peer, key, len(data), RELIABLE, collective.label, into=data)
            self.post_receive(collective, request, (lambda _: then()) if then else (lambda _: None))
        elif then:
            then()

    def post_receive(self, collective: Collective, request: ReceiveRequest, then: Callable[[Arrival], None]) -> None:
        """Post a receive for a part of a collective, and call ``then`` with its arrival."""
        if not collective.operation.done.done():
            self.connection.receive(request, collective.operation.part(then), collective.operation.fail)

    def key(self, collective: Collective, phase: int, receiver: int) -> MessageKey:
        """Return the key of a message."""
        return MessageKey(collective.number, collective_number(phase, receiver, self.ranks))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.call(partial(self.connection.call_later, delay_s, action))

    def _plain_tags(self, size: int) -> PacketTags:
        return plain_tags(-(-size // self.connection.options.payload_bytes))

    def _lossy_tags(self, collective: Collective, data: memoryview) -> PacketTags:
        assert collective.loss
        assert collective.op
        value_type = ValueType(collective.op.format_name)
        values = np.frombuffer(data, value_type.storage)
        # Buffers of the same size are treated as the same kind, with comparable magnitudes.
        layer = Layer(f"{collective.operation.where.rsplit(' number', 1)[0]}, {len(values)} values", 128)
        segment = Segment(layer, 0, len(values))
        packet = self.connection.options.payload_bytes // value_type.storage.itemsize
        return collective.loss.tagger.tag(values, value_type, [segment], packet)

    # Finished steps ---------------------------------------------------------------------------------------------------

    def _exchange_horizon(self, number: int) -> None:
        """Exchange with each peer the lowest step that may still have messages.

        Steps below every rank's are refused from then on, and forgotten.
        """
        operation = Operation(f"group {self.name}, rank {self.rank}: horizon {number}", self._fail)
        key = MessageKey(number, horizon_number())
        label = f"the horizon of group {self.name}"

        def learn(peer: int, arrival: Arrival) -> None:
            with self._lock:
                self._floors[peer] = int(arrival.payload.view(">u4")[0])
                horizon = min([*self._floors.values(), *self._under_way, self._next])
            self.call(partial(self.connection.begin_step, horizon))

        with operation:
            for peer in self.peers:
                floor = np.array([self.point_to_point.lowest_step(peer)], ">u4").tobytes()
                request = SendRequest(peer, key, memoryview(floor), self._plain_tags(4), RELIABLE, label)
                self.connection.send(request, operation.part(), operation.fail)
                posted = ReceiveRequest(peer, key, 4, RELIABLE, label)
                self.connection.receive(posted, operation.part(partial(learn, peer)), operation.fail)

    def _end(self, number: int) -> None:
        if self.connection.timeline is not None:
            self.connection.timeline.note("done", number, 0)
        with self._lock:
            del self._under_way[number]

    def _fail(self, error: TransportError) -> None:
        with self._lock:
            if self._failure:
                return
            self._failure = error
            under_way = list(self._under_way.values())

        def tell() -> None:
            self.connection.liveness.abort(str(error))
            self.connection.fail(error)

        self.call(tell)
        cause = error.__cause__ or error
        for operation in under_way:
            operation.fail(cause)
        self.point_to_point.fail(error)


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy from one buffer to another of the same size, which may be the same."""
    theirs, ours = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    if theirs.ctypes.data != ours.ctypes.data:
        np.copyto(ours, theirs)


def _ignore(_: Delivery) -> None:
    """Do nothing with a delivery."""
