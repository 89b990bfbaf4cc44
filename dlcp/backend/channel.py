# SPDX-License-Identifier: Apache-2.0
"""What a process group's collectives send and receive: keys, tags, what becomes of messages, and when all is over."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dlcp.backend.elementwise_ops import ElementwiseOp
from dlcp.backend.operation import Operation
from dlcp.backend.point_to_point import PointToPoint
from dlcp.collectives.message_numbers import collective_number, horizon_number
from dlcp.dtypes import ValueType
from dlcp.ledger import Ledger
from dlcp.tags import Layer, PacketTags, Segment, Tagger, plain_tags
from dlcp.transport import (
    RELIABLE,
    Arrival,
    Delivery,
    Endpoint,
    LossBound,
    MessageKey,
    Outcome,
    ReceiveRequest,
    SendRequest,
    TransportError,
)

EAGER_BYTES = 16 << 10
"""What is as small as this is sent from a copy, and need not be confirmed for a collective to end. Chosen by us."""
HORIZON_EVERY = 256
"""Every so many collectives the ranks tell each other which messages are over for good. Chosen by us."""
RANKS_MAX = 2048
"""So many have a message number of their own in every round of a collective."""


@dataclass(slots=True)
class AllowedLoss:
    """What contributions to a reduction may lose, and where it is entered.

    There is no error feedback: nothing tells that a tensor is the one that was reduced in the last step. What is lost
    is made up for by scaling the sum of those who delivered.
    """

    bound: LossBound
    tagger: Tagger = field(default_factory=Tagger)
    ledger: Ledger = field(default_factory=Ledger)
    least_values: int = 1024
    """Smaller buffers arrive whole: they are cheap, and more often a norm or a count than a gradient."""


@dataclass(slots=True)
class Collective:
    """A collective that has been issued."""

    number: int
    operation: Operation
    label: str
    loss: AllowedLoss | None
    op: ElementwiseOp | None


class Channel:
    """What one rank's collectives send to and receive from its group. Its methods may be called from any thread.

    A collective that fails ends the whole group: the other ranks are told, and everything under way and to come fails
    with that error.

    Parameters
    ----------
    endpoint
        This rank's endpoint; closed by :meth:`close`.
    ranks
        How many ranks there are, 0 to ``ranks - 1``.
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
        """Parts that peers have not confirmed."""
        self._adder = ThreadPoolExecutor(1, f"dlcp-{name}-add")
        where = f"group {name}, rank {self.rank}"
        self.point_to_point = PointToPoint(self.connection, where, self._fail, self.peers, lambda: self._next)

    @property
    def busy(self) -> bool:
        """Whether a collective is under way."""
        return bool(self._under_way)

    def close(self, reason: str | None = None) -> None:
        """End; without a ``reason`` once the peers have what they wait for, with one after telling them of it."""
        end_s = time.monotonic() + self.connection.options.silence_s
        while reason is None and self._unconfirmed and not self._failure and time.monotonic() < end_s:
            time.sleep(0.002)
        self.endpoint.close(reason)
        self._fail(TransportError(f"group {self.name}, rank {self.rank}: the group has been closed"))
        self._adder.shutdown(wait=True, cancel_futures=True)

    def start(
        self, what: str, loss: AllowedLoss | None = None, op: ElementwiseOp | None = None, size: int = 0
    ) -> Collective:
        """Give a collective its number; a reduction of ``size`` bytes may lose what ``loss`` allows and it bears."""
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
        """Do a collective's first things in the endpoint's thread, where all that follows is done, too."""
        collective.operation.hold()

        def act() -> None:
            with collective.operation:
                action()

        self.call(act, collective.operation)

    def aside(self, collective: Collective, function: Callable[[], None], then: Callable[[], None]) -> None:
        """Do what takes long in a thread for such things, one after the other, and ``then`` in the endpoint's."""
        collective.operation.hold()

        def conclude(done: "Future[None]") -> None:
            with collective.operation:
                done.result()
                then()

        self._adder.submit(function).add_done_callback(
            lambda done: self.call(partial(conclude, done), collective.operation)
        )

    def call(self, action: Callable[[], None], operation: Operation | None = None) -> None:
        """Do something in the endpoint's thread. If that has ended, an operation fails that needs it."""
        try:
            self.endpoint.call(action)
        except TransportError as error:
            if operation:
                operation.fail(error)

    # Parts of collectives, for the endpoint's thread ------------------------------------------------------------------

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
        """Send a part of a collective, whole or, if ``lossy``, within its bound; an empty one is not sent.

        Parameters
        ----------
        then
            Called once the peer has it, which the collective then waits for. Else it may end before.
        own
            The data is the collective's own, and changes no more.
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
            part = operation.part_in_copy()
        else:
            part = operation.part_in_place(size, partial(self.connection.detach, peer, key))

        def on_outcome(outcome: Outcome[Delivery]) -> None:
            part(outcome)
            self._unconfirmed -= 1

        request = SendRequest(peer, key, data, tags or self._plain_tags(size), bound, collective.label)
        self.connection.send(request, on_outcome)

    def receive_part(
        self, collective: Collective, peer: int, phase: int, data: memoryview, then: Callable[[], None] | None = None
    ) -> None:
        """Let a part of a collective come whole into ``data``, and call ``then``; an empty one is there at once."""
        if len(data):
            key = self.key(collective, phase, self.rank)
            request = ReceiveRequest(peer, key, len(data), RELIABLE, collective.label, into=data)
            self.post_receive(collective, request, (lambda _: then()) if then else (lambda _: None))
        elif then:
            then()

    def post_receive(self, collective: Collective, request: ReceiveRequest, then: Callable[[Arrival], None]) -> None:
        """Post a receive for a part of a collective, and call ``then`` with what arrived of it."""
        if not collective.operation.done.done():
            self.connection.receive(request, collective.operation.part(then))

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
        # Buffers of one size are taken for one kind, of which the magnitudes are comparable.
        layer = Layer(f"{collective.operation.where.rsplit(' number', 1)[0]}, {len(values)} values", 128)
        segment = Segment(layer, 0, len(values))
        packet = self.connection.options.payload_bytes // value_type.storage.itemsize
        return collective.loss.tagger.tag(values, value_type, [segment], packet)

    # What is over -----------------------------------------------------------------------------------------------------

    def _exchange_horizon(self, number: int) -> None:
        """Tell each peer the lowest step of which messages may still come, and learn the same of it.

        What is older than all say is refused from then on, and need not be remembered any longer.
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
                self.connection.send(request, operation.part())
                posted = ReceiveRequest(peer, key, 4, RELIABLE, label)
                self.connection.receive(posted, operation.part(partial(learn, peer)))

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
            self.connection.abort(str(error))
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
