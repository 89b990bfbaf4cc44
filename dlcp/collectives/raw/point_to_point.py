# SPDX-License-Identifier: Apache-2.0
"""Messages from one rank to another, matched by tag, in sending order.

No receiver knows beforehand when such a message arrives, so each has a header. If a message and its header fit into one
packet, the message goes *eagerly*, along with the header; otherwise the header announces the message (*rendezvous*).
Headers are received whenever they arrive. A header without a matching posted receive waits in the unexpected queue.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

from dlcp.collectives.message_numbers import POINT_TO_POINT, POINT_TO_POINT_SLOTS, point_to_point_number
from dlcp.collectives.raw.operation import Operation
from dlcp.transport import (
    RELIABLE,
    Arrival,
    Connection,
    DeadlineError,
    MessageKey,
    MessageMismatchError,
    ReceiveRequest,
    SendRequest,
    TransportError,
)
from dlcp.values.tags import plain_tags

PROBE_EVERY_S: Final = 1.0
"""Time between a posted receive's checks that the sender is alive; short compared with ``silence_s``."""
FORGET_AFTER_S: Final = 30.0
"""Time for which a complete message is remembered, to recognise its late packets; longer than any delay."""
_HEADER: Final = struct.Struct(">BQqQ")


class _Kind(IntEnum):
    """Purposes of a header."""

    CONTENT = 0
    PROBE = 1
    """Carries nothing; its acknowledgement shows that a rank is alive."""


class _Stamp(NamedTuple):
    """The number of the next message to a rank."""

    step: int
    slot: int


@dataclass(slots=True)
class _SendState:
    """State of sending to one rank."""

    stamp: _Stamp = field(default_factory=lambda: _Stamp(0, 0))
    order: int = 0
    unconfirmed: dict[_Stamp, int] = field(default_factory=dict)
    probing: bool = False


class _Header(NamedTuple):
    """The header of a message; ``content`` is that of an eager message."""

    source: int
    key: MessageKey
    tag: int
    size: int
    content: bytes


@dataclass(slots=True)
class _PostedReceive:
    """A posted receive whose header has not arrived."""

    source: int | None
    tag: int
    data: memoryview
    operation: Operation
    answer: "Future[int]"
    deadline_s: float

    def matches(self, header: _Header) -> bool:
        return self.tag == header.tag and self.source in (None, header.source)


class PointToPoint:
    """Point-to-point messages of one rank. Thread-safe.

    Parameters
    ----------
    connection
        This rank's connection.
    where
        Group and rank, for error messages.
    on_failure
        Called with the error if a message cannot be delivered.
    peers
        The other ranks.
    step
        Returns the current step. Messages are numbered within it, because peers refuse steps far from their own.
    """

    def __init__(
        self,
        connection: Connection,
        where: str,
        on_failure: Callable[[TransportError], None],
        peers: Sequence[int],
        step: Callable[[], int],
    ) -> None:
        self._connection, self._where, self._on_failure = connection, where, on_failure
        self._peers, self._step = peers, step
        self._lock = threading.Lock()
        self._send_states: dict[int, _SendState] = {}
        self._early: dict[int, dict[int, _Header]] = {}
        """Headers by source and order whose predecessors are still in flight."""
        self._next_order: dict[int, int] = {}
        self._complete: deque[tuple[float, int, MessageKey]] = deque()
        """Completed messages: when, source and key."""
        self._unexpected: list[_Header] = []
        self._posted: list[_PostedReceive] = []
        self._under_way: set[Operation] = set()
        self._probing = False
        self._failure: TransportError | None = None
        connection.call(partial(connection.listen, self._on_unexpected))

    def send(self, data: memoryview, peer: int, tag: int) -> "Future[None]":
        """Send a message; done when the peer has received it. Until then ``data`` must not change."""
        label = f"message to rank {peer} with tag {tag}"
        operation = Operation(f"{self._where}: {label}", self._on_failure)
        self._begin(operation, partial(self._send, operation, data, peer, tag, label))
        return operation.done

    def receive(self, data: memoryview, peer: int | None, tag: int) -> "Future[int]":
        """Receive the oldest message of this tag, from one rank or any; the future's result is the sender's rank."""
        sender = "any rank" if peer is None else f"rank {peer}"
        operation = Operation(f"{self._where}: message from {sender} with tag {tag}", self._on_failure)
        deadline_s = time.monotonic() + self._connection.options.deadline_s
        posted = _PostedReceive(peer, tag, data, operation, Future(), deadline_s)
        operation.done.add_done_callback(partial(_pass_error, posted.answer))
        self._begin(operation, partial(self._post_receive, posted))
        return posted.answer

    def lowest_step(self, peer: int) -> int:
        """Return the lowest step whose messages to a rank may be in flight, now or later."""
        state = self._send_states.get(peer)
        return min([self._step(), *(stamp.step for stamp in state.unconfirmed)] if state else [self._step()])

    def fail(self, error: TransportError) -> None:
        """End all pending and future operations with ``error``."""
        with self._lock:
            self._failure = self._failure or error
            under_way, self._under_way = self._under_way, set()
        for operation in under_way:
            operation.fail(error)

    def _begin(self, operation: Operation, action: Callable[[], None]) -> None:
        """Start an operation in the endpoint's thread, where all callbacks run, too."""
        with self._lock:
            if not self._failure:
                self._under_way.add(operation)
                operation.done.add_done_callback(lambda _: self._under_way.discard(operation))
        if self._failure:
            operation.fail(self._failure)
            return

        def act() -> None:
            if not operation.done.done():
                with operation:
                    action()

        try:
            self._connection.call(act)
        except TransportError as error:
            operation.fail(error)

    # Sending ----------------------------------------------------------------------------------------------------------

    def _send(self, operation: Operation, data: memoryview, peer: int, tag: int, label: str) -> None:
        state = self._send_states.setdefault(peer, _SendState())
        order, state.order = state.order, state.order + 1
        packed = _HEADER.pack(_Kind.CONTENT, order, tag, len(data))
        inside = len(packed) + len(data) <= self._connection.options.payload_bytes
        stamp = self._send_header(peer, state, operation, packed + (bytes(data) if inside else b""), label)
        if not inside:
            self._send_message(peer, state, operation, stamp, 1, data, label)

    def _send_header(self, peer: int, state: _SendState, operation: Operation, packed: bytes, label: str) -> _Stamp:
        step, slot = state.stamp
        if self._step() > step:
            step, slot = self._step(), 0
        elif slot == POINT_TO_POINT_SLOTS:
            step, slot = step + 1, 0
        stamp = _Stamp(step, slot)
        state.stamp = _Stamp(step, slot + 1)
        self._send_message(peer, state, operation, stamp, 0, memoryview(packed), label)
        return stamp

    def _send_message(
        self, peer: int, state: _SendState, operation: Operation, stamp: _Stamp, part: int, data: memoryview, label: str
    ) -> None:
        state.unconfirmed[stamp] = state.unconfirmed.get(stamp, 0) + 1

        def on_confirmed(_: object) -> None:
            state.unconfirmed[stamp] -= 1
            if not state.unconfirmed[stamp]:
                del state.unconfirmed[stamp]

        key = MessageKey(stamp.step, point_to_point_number(stamp.slot, part))
        tags = plain_tags(-(-len(data) // self._connection.options.payload_bytes))
        request = SendRequest(peer, key, data, tags, RELIABLE, label)
        self._connection.send(request, operation.part(on_confirmed), operation.fail)

    # Receiving --------------------------------------------------------------------------------------------------------

    def _on_unexpected(self, source: int, key: MessageKey) -> None:
        if key.message < POINT_TO_POINT.first or key.message % 2:
            return
        request = ReceiveRequest(source, key, None, RELIABLE, f"header from rank {source}")
        operation = Operation(f"{self._where}: packed from rank {source}", self._on_failure)
        with operation:
            self._connection.receive(request, operation.part(partial(self._on_header, source, key)), operation.fail)

    def _on_header(self, source: int, key: MessageKey, arrival: Arrival) -> None:
        self._note_complete(source, key)
        packed = arrival.payload.tobytes()
        kind, order, tag, size = _HEADER.unpack_from(packed)
        if kind == _Kind.PROBE or order < self._next_order.get(source, 0):
            return
        early = self._early.setdefault(source, {})
        content = packed[_HEADER.size :]
        early[order] = _Header(source, MessageKey(key.step, key.message + 1), tag, size, content)
        while (header := early.pop(self._next_order.get(source, 0), None)) is not None:
            self._next_order[source] = self._next_order.get(source, 0) + 1
            self._deliver(header)

    def _deliver(self, header: _Header) -> None:
        for posted in self._posted:
            if posted.matches(header):
                self._posted.remove(posted)
                self._accept(posted, header)
                return
        self._unexpected.append(header)

    def _post_receive(self, posted: _PostedReceive) -> None:
        posted.operation.hold()  # until a header has been matched
        for header in self._unexpected:
            if posted.matches(header):
                self._unexpected.remove(header)
                self._accept(posted, header)
                return
        self._posted.append(posted)
        self._schedule_probe()

    def _accept(self, posted: _PostedReceive, header: _Header) -> None:
        def on_done(done: "Future[None]") -> None:
            if done.exception() is None:
                posted.answer.set_result(header.source)

        posted.operation.done.add_done_callback(on_done)
        label = f"message from rank {header.source} with tag {header.tag}"
        with posted.operation:
            if header.size != len(posted.data):
                raise MessageMismatchError(f"rank {header.source} sends {header.size} bytes, not {len(posted.data)}")
            if len(header.content) == header.size:
                posted.data[:] = header.content
            else:
                content = ReceiveRequest(header.source, header.key, header.size, RELIABLE, label, into=posted.data)
                on_content = posted.operation.part(lambda _: self._note_complete(header.source, header.key))
                self._connection.receive(content, on_content, posted.operation.fail)

    def _note_complete(self, source: int, key: MessageKey) -> None:
        """Make the endpoint forget old completed messages: without collectives, no horizon does so."""
        now_s = time.monotonic()
        self._complete.append((now_s, source, key))
        while self._complete and self._complete[0][0] < now_s - FORGET_AFTER_S:
            _, peer, old = self._complete.popleft()
            self._connection.engine.forget(peer, old)

    # Waiting ----------------------------------------------------------------------------------------------------------

    def _schedule_probe(self) -> None:
        if not self._probing:
            self._probing = True
            self._connection.call_later(PROBE_EVERY_S, self._probe)

    def _probe(self) -> None:
        """Probe the awaited senders: if one does not acknowledge, the endpoint reports it as silent."""
        self._probing = False
        self._posted = [posted for posted in self._posted if not posted.operation.done.done()]
        if not self._posted or self._failure:
            return
        now_s = time.monotonic()
        late = [posted for posted in self._posted if now_s >= posted.deadline_s]
        sources = {posted.source for posted in self._posted}
        for peer in self._peers if None in sources else sources:
            assert peer is not None
            self._probe_peer(peer)
        self._schedule_probe()
        for posted in late:
            posted.operation.fail(DeadlineError(f"nothing arrived in {self._connection.options.deadline_s:.1f} s"))

    def _probe_peer(self, peer: int) -> None:
        state = self._send_states.setdefault(peer, _SendState())
        if state.probing:
            return
        state.probing = True
        operation = Operation(f"{self._where}: waiting for a message from rank {peer}", self._on_failure)
        operation.done.add_done_callback(lambda _: setattr(state, "probing", False))
        with operation:
            self._send_header(peer, state, operation, _HEADER.pack(_Kind.PROBE, 0, 0, 0), f"a message from rank {peer}")


def _pass_error(answer: "Future[int]", done: "Future[None]") -> None:
    error = done.exception()
    if error and not answer.done():
        answer.set_exception(error)
