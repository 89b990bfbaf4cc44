# SPDX-License-Identifier: Apache-2.0
"""Messages from one rank to another, found by tag, in the order in which they were sent.

Nobody knows beforehand when such a message comes. So an envelope announces each: a message that fits into one packet is
in it, and of any other it says where to find it. The receiver takes envelopes whenever they come, and a message once
somebody asks for it.
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

from dlcp.backend.operation import Operation
from dlcp.collectives.message_numbers import POINT_TO_POINT, POINT_TO_POINT_SLOTS, point_to_point_number
from dlcp.tags import plain_tags
from dlcp.transport import (
    RELIABLE,
    Arrival,
    DeadlineError,
    Endpoint,
    MessageKey,
    MessageMismatchError,
    ReceiveRequest,
    SendRequest,
    TransportError,
)

WATCH_EVERY_S: Final = 1.0
"""How often somebody who waits asks whether the other is alive. Chosen by us, to be small against ``silence_s``."""
FORGET_AFTER_S: Final = 30.0
"""So long a message that has been taken is known, so that late packets of it are. Chosen by us: none is as late."""
_ENVELOPE: Final = struct.Struct(">BQqQ")


class _Kind(IntEnum):
    """What an envelope is for."""

    CONTENT = 0
    WATCH = 1
    """Nothing: only to be confirmed by a rank that lives."""


class _Stamp(NamedTuple):
    """The number that the next message to a rank gets."""

    step: int
    slot: int


@dataclass(slots=True)
class _Outbox:
    """What goes to one rank."""

    stamp: _Stamp = field(default_factory=lambda: _Stamp(0, 0))
    order: int = 0
    unconfirmed: dict[_Stamp, int] = field(default_factory=dict)
    watching: bool = False


class _Letter(NamedTuple):
    """A message that an envelope has announced; ``content`` is that of a short one."""

    source: int
    key: MessageKey
    tag: int
    size: int
    content: bytes


@dataclass(slots=True)
class _Wanted:
    """Somebody waits for a message."""

    source: int | None
    tag: int
    data: memoryview
    operation: Operation
    answer: "Future[int]"
    deadline_s: float

    def fits(self, letter: _Letter) -> bool:
        return self.tag == letter.tag and self.source in (None, letter.source)


class Mailbox:
    """Point-to-point messages of one rank. Its methods may be called from any thread.

    Parameters
    ----------
    endpoint
        This rank's endpoint.
    where
        Group and rank, for error messages.
    on_failure
        Called with the error if a message cannot be delivered.
    peers
        The other ranks.
    step
        Tells the current step: messages are numbered within it, for peers refuse what is far behind or ahead.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        where: str,
        on_failure: Callable[[TransportError], None],
        peers: Sequence[int],
        step: Callable[[], int],
    ) -> None:
        self._endpoint, self._where, self._on_failure = endpoint, where, on_failure
        self._peers, self._step = peers, step
        self._lock = threading.Lock()
        self._outboxes: dict[int, _Outbox] = {}
        self._early: dict[int, dict[int, _Letter]] = {}
        """Letters by source and order whose predecessors are still on their way."""
        self._next_order: dict[int, int] = {}
        self._taken: deque[tuple[float, int, MessageKey]] = deque()
        """When each message was complete, its source and its key."""
        self._unclaimed: list[_Letter] = []
        self._wanted: list[_Wanted] = []
        self._under_way: set[Operation] = set()
        self._watching = False
        self._failure: TransportError | None = None
        endpoint.call(partial(setattr, endpoint, "on_unexpected", self._on_unexpected))

    def send(self, data: memoryview, peer: int, tag: int) -> "Future[None]":
        """Send a message; done when the other has taken it. Until then ``data`` must not change."""
        label = f"message to rank {peer} with tag {tag}"
        operation = Operation(f"{self._where}: {label}", self._on_failure)
        self._begin(operation, partial(self._send, operation, data, peer, tag, label))
        return operation.done

    def receive(self, data: memoryview, peer: int | None, tag: int) -> "Future[int]":
        """Wait for the oldest unclaimed message of this tag, from one rank or any; done with the rank it is from."""
        sender = "any rank" if peer is None else f"rank {peer}"
        operation = Operation(f"{self._where}: message from {sender} with tag {tag}", self._on_failure)
        deadline_s = time.monotonic() + self._endpoint.options.deadline_s
        wanted = _Wanted(peer, tag, data, operation, Future(), deadline_s)
        operation.done.add_done_callback(partial(_pass_error, wanted.answer))
        self._begin(operation, partial(self._want, wanted))
        return wanted.answer

    def floor(self, peer: int) -> int:
        """Return the lowest step of a message that may still be on its way to a rank, now or later."""
        outbox = self._outboxes.get(peer)
        return min([self._step(), *(stamp.step for stamp in outbox.unconfirmed)] if outbox else [self._step()])

    def fail(self, error: TransportError) -> None:
        """End everything that waits, and everything asked for from now on, with ``error``."""
        with self._lock:
            self._failure = self._failure or error
            under_way, self._under_way = self._under_way, set()
        for operation in under_way:
            operation.fail(error)

    def _begin(self, operation: Operation, action: Callable[[], None]) -> None:
        """Do the first things for an operation in the endpoint's thread, where all that follows is done, too."""
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
            self._endpoint.call(act)
        except TransportError as error:
            operation.fail(error)

    # Sending ----------------------------------------------------------------------------------------------------------

    def _send(self, operation: Operation, data: memoryview, peer: int, tag: int, label: str) -> None:
        outbox = self._outboxes.setdefault(peer, _Outbox())
        order, outbox.order = outbox.order, outbox.order + 1
        envelope = _ENVELOPE.pack(_Kind.CONTENT, order, tag, len(data))
        inside = len(envelope) + len(data) <= self._endpoint.options.payload_bytes
        stamp = self._post(peer, outbox, operation, envelope + (bytes(data) if inside else b""), label)
        if not inside:
            self._dispatch(peer, outbox, operation, stamp, 1, data, label)

    def _post(self, peer: int, outbox: _Outbox, operation: Operation, envelope: bytes, label: str) -> _Stamp:
        step, slot = outbox.stamp
        if self._step() > step:
            step, slot = self._step(), 0
        elif slot == POINT_TO_POINT_SLOTS:
            step, slot = step + 1, 0
        stamp = _Stamp(step, slot)
        outbox.stamp = _Stamp(step, slot + 1)
        self._dispatch(peer, outbox, operation, stamp, 0, memoryview(envelope), label)
        return stamp

    def _dispatch(
        self, peer: int, outbox: _Outbox, operation: Operation, stamp: _Stamp, part: int, data: memoryview, label: str
    ) -> None:
        outbox.unconfirmed[stamp] = outbox.unconfirmed.get(stamp, 0) + 1

        def on_confirmed(_: object) -> None:
            outbox.unconfirmed[stamp] -= 1
            if not outbox.unconfirmed[stamp]:
                del outbox.unconfirmed[stamp]

        key = MessageKey(stamp.step, point_to_point_number(stamp.slot, part))
        tags = plain_tags(-(-len(data) // self._endpoint.options.payload_bytes))
        operation.wait_for(self._endpoint.send(SendRequest(peer, key, data, tags, RELIABLE, label)), on_confirmed)

    # Receiving --------------------------------------------------------------------------------------------------------

    def _on_unexpected(self, source: int, key: MessageKey) -> None:
        if key.message < POINT_TO_POINT.first or key.message % 2:
            return
        arriving = self._endpoint.receive(ReceiveRequest(source, key, None, RELIABLE, f"envelope from rank {source}"))
        operation = Operation(f"{self._where}: envelope from rank {source}", self._on_failure)
        with operation:
            operation.wait_for(arriving, partial(self._on_envelope, source, key))

    def _on_envelope(self, source: int, key: MessageKey, arrival: Arrival) -> None:
        self._note_taken(source, key)
        envelope = arrival.payload.tobytes()
        kind, order, tag, size = _ENVELOPE.unpack_from(envelope)
        if kind == _Kind.WATCH or order < self._next_order.get(source, 0):
            return
        early = self._early.setdefault(source, {})
        content = envelope[_ENVELOPE.size :]
        early[order] = _Letter(source, MessageKey(key.step, key.message + 1), tag, size, content)
        while (letter := early.pop(self._next_order.get(source, 0), None)) is not None:
            self._next_order[source] = self._next_order.get(source, 0) + 1
            self._deliver(letter)

    def _deliver(self, letter: _Letter) -> None:
        for wanted in self._wanted:
            if wanted.fits(letter):
                self._wanted.remove(wanted)
                self._open(wanted, letter)
                return
        self._unclaimed.append(letter)

    def _want(self, wanted: _Wanted) -> None:
        wanted.operation.hold()  # until a letter has been opened
        for letter in self._unclaimed:
            if wanted.fits(letter):
                self._unclaimed.remove(letter)
                self._open(wanted, letter)
                return
        self._wanted.append(wanted)
        self._keep_watch()

    def _open(self, wanted: _Wanted, letter: _Letter) -> None:
        def on_done(done: "Future[None]") -> None:
            if done.exception() is None:
                wanted.answer.set_result(letter.source)

        wanted.operation.done.add_done_callback(on_done)
        label = f"message from rank {letter.source} with tag {letter.tag}"
        with wanted.operation:
            if letter.size != len(wanted.data):
                raise MessageMismatchError(f"rank {letter.source} sends {letter.size} bytes, not {len(wanted.data)}")
            if len(letter.content) == letter.size:
                wanted.data[:] = letter.content
            else:
                content = ReceiveRequest(letter.source, letter.key, letter.size, RELIABLE, label, into=wanted.data)
                wanted.operation.wait_for(
                    self._endpoint.receive(content),
                    lambda _: self._note_taken(letter.source, letter.key),
                )

    def _note_taken(self, source: int, key: MessageKey) -> None:
        """Let the endpoint forget what was complete long ago: without collectives no horizon would ever do so."""
        now_s = time.monotonic()
        self._taken.append((now_s, source, key))
        while self._taken and self._taken[0][0] < now_s - FORGET_AFTER_S:
            _, peer, old = self._taken.popleft()
            self._endpoint.forget(peer, old)

    # Waiting ----------------------------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._endpoint.call_later(WATCH_EVERY_S, self._watch)

    def _watch(self) -> None:
        """Ask those who are waited for whether they live: one who does not confirm it is found to be silent."""
        self._watching = False
        self._wanted = [wanted for wanted in self._wanted if not wanted.operation.done.done()]
        if not self._wanted or self._failure:
            return
        now_s = time.monotonic()
        late = [wanted for wanted in self._wanted if now_s >= wanted.deadline_s]
        sources = {wanted.source for wanted in self._wanted}
        for peer in self._peers if None in sources else sources:
            assert peer is not None
            self._ask(peer)
        self._keep_watch()
        for wanted in late:
            wanted.operation.fail(DeadlineError(f"nothing came in {self._endpoint.options.deadline_s:.1f} s"))

    def _ask(self, peer: int) -> None:
        outbox = self._outboxes.setdefault(peer, _Outbox())
        if outbox.watching:
            return
        outbox.watching = True
        operation = Operation(f"{self._where}: waiting for a message from rank {peer}", self._on_failure)
        operation.done.add_done_callback(lambda _: setattr(outbox, "watching", False))
        with operation:
            self._post(peer, outbox, operation, _ENVELOPE.pack(_Kind.WATCH, 0, 0, 0), f"a message from rank {peer}")


def _pass_error(answer: "Future[int]", done: "Future[None]") -> None:
    error = done.exception()
    if error and not answer.done():
        answer.set_exception(error)
