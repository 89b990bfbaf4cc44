# SPDX-License-Identifier: Apache-2.0
"""Messages on their way in to one rank, until their senders know that they are done.

They are known from their first packet or from when somebody waits for them, whichever is first.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from dlcp.transport.buffers import BufferPool
from dlcp.transport.control_packets import MORE, ControlPackets
from dlcp.transport.engine import MESSAGE_PACKETS_MAX, Engine, Incoming
from dlcp.transport.errors import DeadlineError, MessageMismatchError, TransportError, at_step
from dlcp.transport.messages import EMPTY, Arrival, Bytes, MessageKey, ReceiveRequest
from dlcp.transport.options import TransportOptions
from dlcp.transport.promise import Promise
from dlcp.transport.receiving import (
    STOP_REPEAT_MAX_S,
    STOP_REPEAT_S,
    Awaited,
    Name,
    Receiving,
    Stopping,
)
from dlcp.wire import Header, PacketType

STEPS_AHEAD_MAX = 1 << 16
KNOWN_AFTER_S = 1.0
TELL_AGAIN_S = 0.2
"""A sender that does not know that its message is done asks within the first of these, and a rank that leaves tells it
for the second. Both are several of a sender's timeouts, or of the times between STOPs. Chosen by us."""


class Inbox:
    """Messages on their way in. Not thread-safe: the thread of the protocol drives it.

    Parameters
    ----------
    engine
        What stores their packets.
    packets
        What answers their senders.
    job
        Job number, for error messages.
    options
        See :class:`dlcp.transport.TransportOptions`.
    buffers
        Memory for messages that come early.
    refused, counted
        Where packets that are refused are counted by reason, and other events by name.
    """

    def __init__(
        self,
        engine: Engine,
        packets: ControlPackets,
        *,
        job: int,
        options: TransportOptions,
        buffers: BufferPool,
        refused: Counter[str],
        counted: Counter[str],
    ) -> None:
        self.on_unexpected: Callable[[int, MessageKey], None] | None = None
        """Called with sender and key of a message that comes before anybody waits for it."""
        self.finished: set[Name] = set()
        """Messages that are done, of which late packets may come."""
        self.stashed_bytes = 0
        """Memory for messages that nobody waits for yet."""
        self.oldest_step = 0
        """What is older is over."""
        self._engine, self._packets, self._job, self._options, self._buffers = engine, packets, job, options, buffers
        self._refused, self._counted = refused, counted
        self._incoming: dict[Name, Receiving] = {}
        self._awaited: dict[int, dict[Name, Awaited]] = {}
        """Those that somebody waits for, by sender; in the order of their deadlines, for all are given equally long."""
        self._stopping: dict[Name, Stopping] = {}
        self._told: dict[Name, tuple[int, float]] = {}
        """Packets of those that came whole, and when, oldest first: their senders were told with an acknowledgement."""
        self._told_again_s = -math.inf
        self._failed = False

    # Who waits --------------------------------------------------------------------------------------------------------

    def wait(self, request: ReceiveRequest, awaited: Awaited, now_s: float) -> None:
        """Wait for a message; see :class:`dlcp.transport.ReceiveRequest`."""
        name, into = (request.peer, *request.key), request.checked_into()
        message_bytes = awaited.message_bytes
        receiving = self._incoming.get(name)
        if receiving is None:
            if message_bytes is None:
                raise ValueError(
                    f"{at_step(self._job, name[1])}: nothing of {awaited.label} has come from rank {name[0]}: "
                    "size unknown"
                )
            receiving = self._expect(request, into, now_s)
        elif not self._agrees(receiving.message, message_bytes):
            self._disagree(receiving, awaited, receiving.message.packets)
            return
        else:
            self.stashed_bytes -= len(receiving.stash)
            self._unstash(receiving, request, into)
        receiving.awaited, receiving.placed = awaited, into is not None
        waited_for = self._awaited.setdefault(name[0], {})
        waited_for.pop(name, None)
        waited_for[name] = awaited
        message = receiving.message
        if request.reduction is not None:
            receiving.reduction = request.reduction
            request.reduction.join(message, request.position)
        last = 0 if message_bytes is None else message_bytes - (message.packets - 1) * self._options.payload_bytes
        bound = awaited.bound
        self._engine.wait(message, bound.required(message.packets), bound.immediate, last, now_s)

    def waits_for(self, rank: int) -> bool:
        """Return whether somebody waits for a message from a rank."""
        return bool(self._awaited.get(rank))

    def awaited_from(self, rank: int) -> Iterator[tuple[int, str]]:
        """Return step and label of what somebody waits for from a rank."""
        return ((name[1], awaited.label) for name, awaited in self._awaited.get(rank, {}).items())

    @property
    def settled(self) -> bool:
        """Whether every sender knows what is done, but for whole messages: of those it asks."""
        return not self._stopping

    def tell_again(self, now_s: float) -> None:
        """Tell senders of whole messages again, for a moment or until they confirm it: soon nobody can be asked.

        Who has not asked for long knows.
        """
        for name, (packets, came_s) in self._told.items():
            if came_s > now_s - KNOWN_AFTER_S:
                self._stopping[name] = Stopping(b"", packets, now_s, now_s + TELL_AGAIN_S, {0})
                self._stop(name, self._stopping[name], now_s)
        self._told.clear()

    def forget(self, peer: int, key: MessageKey) -> None:
        """Forget that a message is done, of which no packets will come any more."""
        self.finished.discard((peer, *key))

    def begin_step(self, step: int) -> None:
        """Declare all steps before ``step`` over: packets of them are refused, and who waits for some gets an error."""
        self.oldest_step = max(self.oldest_step, step)
        over = [(name, receiving.awaited) for name, receiving in self._incoming.items() if name[1] < step]
        for name, _ in over:
            self._drop(name)
        for name, awaited in over:
            if awaited is not None and not awaited.done.done():
                awaited.done.set_exception(
                    TransportError(
                        f"{at_step(self._job, name[1])} is over: {awaited.label} of rank {name[0]} is not waited for "
                        "any more"
                    )
                )
        self.finished = {name for name in self.finished if name[1] >= step}

    def fail(self) -> list[Promise[Arrival]]:
        """Drop everything and take in no more; return what has been waited for."""
        self._failed = True
        waited_for = [awaited.done for by_name in self._awaited.values() for awaited in by_name.values()]
        for name in list(self._incoming):
            self._drop(name)
        self._stopping.clear()
        self._told.clear()
        return waited_for

    # From first packet to last ----------------------------------------------------------------------------------------

    def _expect(self, request: ReceiveRequest, into: Bytes | None, now_s: float) -> Receiving:
        name, message_bytes, reduction = (request.peer, *request.key), request.message_bytes, request.reduction
        assert message_bytes is not None
        if into is None and reduction is None:
            into = np.empty(message_bytes - len(request.tail), np.uint8)
        elif reduction is not None and reduction.needs_buffer(request.position):
            into = self._buffers.take(message_bytes)
        packets = -(-message_bytes // self._options.payload_bytes)
        message = self._engine.expect(name[0], MessageKey(*name[1:]), packets, into, request.tail)
        receiving = self._incoming[name] = Receiving(name, message, now_s, EMPTY)
        receiving.payload = EMPTY if into is None else into
        message.owner = receiving
        return receiving

    def _stash(self, name: Name, packets: int, now_s: float) -> Receiving | None:
        size = packets * self._options.payload_bytes
        if not 0 < packets <= MESSAGE_PACKETS_MAX:
            self._refused["malformed"] += 1
            return None
        if self.stashed_bytes + size > self._options.early_buffer_bytes:
            self._counted["stash_full"] += 1  # nothing is lost: unacknowledged packets are sent again
            return None
        stash = self._buffers.take(size)
        message = self._engine.expect(name[0], MessageKey(*name[1:]), packets, stash, EMPTY)
        receiving = self._incoming[name] = Receiving(name, message, now_s, stash)
        message.owner = receiving
        self.stashed_bytes += size
        if self.on_unexpected:
            self.on_unexpected(name[0], MessageKey(*name[1:]))
        return receiving

    def _unstash(self, receiving: Receiving, request: ReceiveRequest, into: Bytes | None) -> None:
        message_bytes, tail = request.message_bytes, request.tail
        stash, receiving.stash = receiving.stash, EMPTY
        if request.reduction is not None:
            receiving.payload = stash  # what came is summed from where it is
            return
        if into is None and message_bytes is not None:
            receiving.payload = stash[: message_bytes - len(tail)]
            if len(tail):
                self._engine.move(receiving.message, receiving.payload, tail)
            return
        if into is None:
            receiving.payload = stash  # as long as the sender says, which only its last packet tells
            return
        self._engine.move(receiving.message, into, tail)
        self._buffers.give(stash)
        receiving.payload = into

    def _agrees(self, message: Incoming, message_bytes: int | None) -> bool:
        if message_bytes is None:
            return True
        last = message_bytes - (message.packets - 1) * self._options.payload_bytes
        return 0 < last <= self._options.payload_bytes and message.last_bytes in (0, last)

    def _remove(self, name: Name) -> Receiving:
        self._awaited.get(name[0], {}).pop(name, None)
        return self._incoming.pop(name)

    def _drop(self, name: Name) -> None:
        receiving = self._remove(name)
        self.stashed_bytes -= len(receiving.stash)
        self._close(receiving)

    def _close(self, receiving: Receiving) -> None:
        """Take no more of a message; a sum lets go of its messages itself."""
        message = receiving.message
        self._engine.close(message)
        message.owner = None  # else the two would keep each other, and all they hold, until Python looks for such pairs
        if receiving.reduction is None:
            self._engine.free(message)

    def _disagree(self, receiving: Receiving, awaited: Awaited, packets: int) -> None:
        name = receiving.name
        self._drop(name)
        self.finished.add(name)
        if not awaited.done.done():
            awaited.done.set_exception(
                MessageMismatchError(
                    f"{at_step(self._job, name[1])}: rank {name[0]} sends {awaited.label} in {packets} packets, but "
                    f"{awaited.message_bytes} bytes were expected; do all ranks run the same model and options?"
                )
            )

    # What the engine asks and tells -----------------------------------------------------------------------------------

    def on_unknown(self, rank: int, header: Header, size: int, now_s: float) -> Incoming | None:
        """Return where to store data of a message that is not known yet, if anywhere."""
        name = (rank, header.step, header.message)
        if not self._is_current(header.step):
            self._refused["stale"] += 1
            return None
        if self._failed:
            return None
        if name in self.finished:
            self._counted["late"] += 1
            stopping = self._stopping.get(name)
            if stopping and now_s > stopping.due_s - stopping.repeat_s / 2:
                self._stop(name, stopping, now_s)
            elif name in self._told and now_s > max(self._told_again_s, self._told[name][1]) + STOP_REPEAT_S / 2:
                self._told_again_s = now_s
                self._tell_whole(name)
            return None
        payload_bytes = self._options.payload_bytes
        is_last = header.index == header.count - 1
        if header.index >= header.count or not (size == payload_bytes or (is_last and 0 < size < payload_bytes)):
            self._refused["malformed"] += 1
            return None
        receiving = self._stash(name, header.count, now_s)
        return receiving.message if receiving else None

    def on_misfit(self, rank: int, header: Header, payload: memoryview) -> None:
        """Refuse data that does not fit its message: whoever waits for that learns that sizes differ."""
        self._refused["malformed"] += 1
        receiving = self._incoming.get((rank, header.step, header.message))
        if receiving is None or receiving.awaited is None:
            return
        is_last = header.index == header.count - 1
        payload_bytes = self._options.payload_bytes
        whole = 0 < len(payload) <= payload_bytes and (is_last or len(payload) == payload_bytes)
        if whole and (header.count != receiving.message.packets or is_last):
            self._disagree(receiving, receiving.awaited, header.count)

    def on_settled(self, message: Incoming, now_s: float) -> None:
        """Hand over a message that is done, and tell its sender."""
        receiving: Receiving = message.owner
        name, awaited = receiving.name, receiving.awaited
        assert awaited
        self._remove(name)
        self.finished.add(name)
        if awaited.message_bytes is None:
            size = (message.packets - 1) * self._options.payload_bytes + message.last_bytes
            receiving.payload = receiving.payload[:size]
        arrival = receiving.arrival(now_s, self._options.payload_bytes)
        self._close(receiving)
        if arrival.whole:
            self._told[name] = len(arrival.delivered), now_s
        else:
            span, give_up_s = self._packets.bitmap_packets, now_s + self._options.deadline_s
            self._stopping[name] = Stopping.of(arrival.delivered, span, now_s, give_up_s)
            self._stop(name, self._stopping[name], now_s)
        if not awaited.done.done():
            awaited.done.set_result(arrival)

    def _is_current(self, step: int) -> bool:
        return self.oldest_step <= step <= self.oldest_step + STEPS_AHEAD_MAX

    # What senders ask and answer --------------------------------------------------------------------------------------

    def on_probe(self, rank: int, header: Header, payload: memoryview, now_s: float) -> None:
        """Answer what is missing, or that no more is needed."""
        name, key = (rank, header.step, header.message), MessageKey(header.step, header.message)
        stopping = self._stopping.get(name)
        if stopping:
            self._stop(name, stopping, now_s)
            return
        if name in self._told:
            self._tell_whole(name)
            return
        if name in self.finished or not self._is_current(header.step):
            self._refused["stale"] += 1
            return
        receiving = self._incoming.get(name) or self._stash(name, header.count, now_s)
        if receiving is None:
            return
        message = receiving.message
        if header.count != message.packets or header.index > message.packets:
            self._refused["malformed"] += 1
            return
        if payload != MORE and self._engine.ask(message, header.index, now_s):
            return
        bitmap = np.packbits(message.bitmap()).tobytes()
        for first in range(0, message.packets, self._packets.bitmap_packets):
            self._packets.send_bitmap(rank, PacketType.BITMAP, key, bitmap, first, message.packets)

    def on_stop_ack(self, rank: int, header: Header) -> None:
        """Note that a sender knows one part of what became of its message."""
        name = (rank, header.step, header.message)
        stopping = self._stopping.get(name)
        if stopping:
            stopping.unconfirmed.discard(header.index)
            if not stopping.unconfirmed:
                del self._stopping[name]
        self._told.pop(name, None)

    def _tell_whole(self, name: Name) -> None:
        self._packets.send(name[0], PacketType.STOP, MessageKey(*name[1:]), count=self._told[name][0])

    def _stop(self, name: Name, stopping: Stopping, now_s: float) -> None:
        for first in stopping.unconfirmed:
            key = MessageKey(*name[1:])
            self._packets.send_bitmap(name[0], PacketType.STOP, key, stopping.bitmap, first, stopping.packets)
        stopping.due_s = now_s + stopping.repeat_s
        stopping.repeat_s = min(STOP_REPEAT_MAX_S, stopping.repeat_s * 2)

    # What time brings -------------------------------------------------------------------------------------------------

    def on_time(self, now_s: float) -> float:
        """Tell again what senders have not confirmed; return when to do so next. Forget who has not asked for long."""
        expired = []
        due_s = math.inf
        for name, stopping in list(self._stopping.items()):
            if now_s >= stopping.give_up_s:
                del self._stopping[name]
                continue
            if now_s >= stopping.due_s:
                self._stop(name, stopping, now_s)
            due_s = min(due_s, stopping.due_s, stopping.give_up_s)
        for name, (_, came_s) in self._told.items():
            if now_s < came_s + 2 * self._options.silence_s:
                break
            expired.append(name)
        for name in expired:
            del self._told[name]
        return due_s

    def overdue(self, now_s: float) -> TransportError | None:
        """Return the error of a message that is not in by its deadline, if there is one."""
        for waited_for in self._awaited.values():
            for name, awaited in waited_for.items():
                if now_s >= awaited.deadline_s:
                    return self._late(self._incoming[name], awaited)
                break  # the others are due later
        return None

    def _late(self, receiving: Receiving, awaited: Awaited) -> TransportError:
        message, name = receiving.message, receiving.name
        need = awaited.bound.required(message.packets) / message.packets
        return DeadlineError(
            f"{at_step(self._job, name[1])}: rank {name[0]} delivered "
            f"{message.arrived / message.packets:.0%} of {awaited.label} (bound {need:.0%}) "
            f"in {self._options.deadline_s:.1f} s"
        )
