# SPDX-License-Identifier: Apache-2.0
"""Hosts as senders: the next packet of a stream, and packets that are given up for lost."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from dlcp.sim import counters as c
from dlcp.sim.plan import NDP
from dlcp.sim.reference.interface import Interface, may_send, queue_of
from dlcp.sim.reference.packets import data_packet
from dlcp.sim.reference.parts import Known, Message, Packet, Sent, Stream
from numpy.typing import NDArray


class Senders(ABC):
    """What senders do. The engine is made of it, of `Timers` and of `Receivers`, one on top of the other."""

    tally: NDArray[np.int64]
    """What is counted, in the cells of `dlcp.sim.counters`."""

    @property
    @abstractmethod
    def now_ps(self) -> int:
        """Return the time."""

    @abstractmethod
    def at(self, time_ps: int, action: Callable[[], None]) -> None:
        """Let something happen at a time that is not past."""

    @abstractmethod
    def interface_at(self, stream: Stream, host: int) -> Interface:
        """Return the interface by which a host at one end of a stream reaches the other end."""

    @abstractmethod
    def finish(self, message: Message) -> None:
        """Note that a node is done, and let those begin that waited for it."""

    @abstractmethod
    def settle(self, message: Message) -> None:
        """Close a message that is done once nothing refers to it any more."""

    @abstractmethod
    def put_off(self, stream: Stream, *, everything: bool) -> None:
        """Let the tail probe of a stream begin anew, and with ``everything`` its timeout."""

    @abstractmethod
    def arm(self, stream: Stream) -> None:
        """See to it that there is an event when something is due."""

    @abstractmethod
    def probe(self, message: Message, interface: Interface) -> None:
        """Ask what has arrived, if all of a message is sent and some of it may stay lost."""

    def next_packet(self, stream: Stream, interface: Interface) -> Packet | None:
        """Return the next packet that a stream has to send, and note that it is on its way.

        None as well if ``interface``, which has no control packet waiting, has to ask after a message first.
        """
        if not may_send(stream):
            return None
        sent, again = None, False
        while stream.again and sent is None:
            sent = stream.again.popleft()
            message = sent.message
            message.waiting -= 1
            if message.known[sent.index] is not Known.LOST or message.stopped:
                stream.repairing -= 1
                if message.known[sent.index] is Known.LOST:
                    message.known[sent.index] = Known.HOLE
                    message.holes += 1
                sent = None
                # Its acknowledgement came late, when this still waited: nobody has asked yet for what else is missing.
                self.probe(message, interface)
                self.settle(message)
                if interface.control:
                    return None
            else:
                again = True
        while stream.messages and sent is None:
            message = stream.messages[0]
            if not message.stopped:
                while message.resending and message.next < message.packets and not _is_hole(message, message.next):
                    message.next += 1
                if message.next < message.packets:
                    sent = Sent(message, message.next)
                    message.next += 1
                    if message.resending:
                        message.holes -= 1
                        again = True
            if sent is None or (not message.resending and message.next == message.packets):
                stream.messages.popleft()
                message.listed = False
                if sent is None:
                    self.settle(message)
        return None if sent is None else self._depart(stream, sent, again)

    def _depart(self, stream: Stream, sent: Sent, again: bool) -> Packet:
        message = sent.message
        sent.queue = queue_of(message, sent.index)
        message.known[sent.index] = Known.FLYING
        sent.number, sent.sent_ps, sent.flying = stream.number, self.now_ps, True
        stream.number += 1
        stream.out[sent.queue][sent] = None
        stream.spare = 0
        self.put_off(stream, everything=not stream.flying)
        self.arm(stream)
        stream.flying += 1
        if stream.transport.kind == NDP:
            stream.credit -= 1
        message.flying += 1
        message.sent += 1
        message.refs += 1
        self.tally[c.SENT] += 1
        self.tally[c.RESENT] += again
        return data_packet(stream, sent, sent.queue, again)

    def enlist(self, message: Message) -> None:
        """Put a message among those of its stream, by order, behind one that has begun."""
        message.listed = True
        waiting = message.flow.messages
        place = len(waiting)
        while place and waiting[place - 1].order > message.order and (place > 1 or not waiting[0].next):
            place -= 1
        waiting.insert(place, message)

    def lose(self, sent: Sent) -> None:
        """Declare a packet lost that was on the way."""
        message = sent.message
        stream = message.flow
        del stream.out[sent.queue][sent]
        sent.flying = False
        stream.flying -= 1
        message.flying -= 1
        self.tally[c.DECLARED_LOST] += 1
        if message.stopped or (message.bounded and message.drop_class[sent.index]):
            stream.repairing -= sent.again
            message.known[sent.index] = Known.HOLE
            message.holes += 1
        else:
            self._queue_again(sent)

    def send_again(self, sent: Sent) -> None:
        """Send a packet again that is on the way, and no longer counted as that."""
        stream = sent.message.flow
        del stream.out[sent.queue][sent]
        sent.flying = False
        stream.flying -= 1
        sent.message.flying -= 1
        self._queue_again(sent)

    def _queue_again(self, sent: Sent) -> None:
        message = sent.message
        message.known[sent.index] = Known.LOST
        message.waiting += 1
        message.flow.repairing += not sent.again
        message.flow.again.append(Sent(message, sent.index, again=True))


def _is_hole(message: Message, index: int) -> bool:
    return message.known[index] is Known.HOLE and not message.arrived[index]
