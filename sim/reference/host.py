# SPDX-License-Identifier: Apache-2.0
"""Hosts: network interfaces that pull packets from streams, senders, and receivers."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim import counters as c
from sim.arithmetic import ENTROPY_TABLE, RATE_SHIFT
from sim.plan import CONTROL_QUEUE, NDP, PFABRIC, PIAS, QUEUES, SMALLEST_FIRST
from sim.reference.link import Link
from sim.reference.parts import Kind, Known, Message, Packet, Sent, Stream

if TYPE_CHECKING:
    from sim.reference.engine import ReferenceEngine

PROBE_BACKOFF_MAX = 6


class Interface:
    """A host's end of a link: control packets first, then streams in turn, the most urgent queue first."""

    def __init__(self, engine: "ReferenceEngine", link: Link) -> None:
        self.engine, self.link = engine, link
        self.control: deque[Packet] = deque()
        self.ready: list[deque[Stream]] = [deque() for _ in range(QUEUES)]
        self.pulls: deque[Packet] = deque()
        self.pulling = False
        self.pull_next_ps = 0
        self.pending = False

    # ------------------------------------------------------------------------------------------------------ sending

    def offer(self, stream: Stream) -> None:
        """Put a stream among those that are ready, if it is and is not yet."""
        if not stream.ready and may_send(stream):
            stream.ready = True
            self.ready[level_of(stream)].append(stream)

    def kick(self) -> None:
        """Send something, or see to it that it is sent when the link is free."""
        if self.pending or not (self.control or any(self.ready)):
            return
        if self.link.busy_ps > self.engine.now_ps:
            self._wait()
            return
        packet = self.control.popleft() if self.control else self._pull_packet()
        if packet is None:
            return
        self.link.send(packet)
        if self.control or any(self.ready):
            self._wait()

    def _wait(self) -> None:
        self.pending = True
        self.engine.at(self.link.busy_ps, self.free)

    def free(self) -> None:
        """Go on: the link is free."""
        self.pending = False
        self.kick()

    def _pull_packet(self) -> Packet | None:
        while not self.control and any(self.ready):
            level = max(number for number, streams in enumerate(self.ready) if streams)
            waiting = self.ready[level]
            if self.engine.plan.rules.discipline == SMALLEST_FIRST:
                bring_smallest_forward(waiting)
            stream = waiting.popleft()
            stream.ready = False
            packet = self.engine.next_packet(stream, self)
            self.offer(stream)
            if packet is not None:
                return packet
        return self.control.popleft() if self.control else None

    # ------------------------------------------------------------------------------------------------ pulls of NDP

    def pull(self, packet: Packet) -> None:
        """Send a PULL when its turn has come."""
        self.pulls.append(packet)
        if not self.pulling:
            self.pulling = True
            self.engine.at(max(self.engine.now_ps, self.pull_next_ps), self.send_pull)

    def send_pull(self) -> None:
        """Send the first PULL; the next one follows when the packet that it asks for could have come."""
        packet = self.pulls.popleft()
        transport = packet.message.transport
        size = transport.header + transport.payload
        self.pull_next_ps = self.engine.now_ps + (size * self.link.numbers.kibibyte_ps >> RATE_SHIFT)
        self.control.append(packet)
        if self.pulls:
            self.engine.at(self.pull_next_ps, self.send_pull)
        else:
            self.pulling = False
        self.kick()


def bring_smallest_forward(streams: deque[Stream]) -> None:
    """Put the pFabric stream whose message has the least left in front of the others."""
    if streams[0].transport.kind != PFABRIC:
        return
    best = min(streams, key=lambda stream: left(stream.messages[0]) if stream.messages else 0)
    streams.remove(best)
    streams.appendleft(best)


def left(message: Message) -> int:
    """Return how many packets of a message have not been acknowledged."""
    return message.packets - message.acked


def may_send(stream: Stream) -> bool:
    """Return whether a stream's window is open, and something seems to wait behind it."""
    if not stream.again and not stream.messages:
        return False
    if stream.transport.kind == NDP:
        return stream.credit > 0
    return stream.flying < int(stream.window.packets)


def lacks_credit(stream: Stream) -> bool:
    """Return whether a stream waits for a PULL, which may have been lost."""
    return stream.transport.kind == NDP and stream.credit <= 0 and bool(stream.again or stream.messages)


def level_of(stream: Stream) -> int:
    """Return the queue of what a stream seems to have next."""
    if stream.again:
        return queue_of(stream.again[0].message, stream.again[0].index)
    return queue_of(stream.messages[0], stream.messages[0].next)


def queue_of(message: Message, index: int) -> int:
    """Return the queue of a packet: its message's, or by how much of the message was sent before it (PIAS)."""
    transport = message.transport
    if transport.kind != PIAS or not transport.demotion:
        return message.queue
    return CONTROL_QUEUE - sum(index * transport.payload >= size for size in transport.demotion)


def data_packet(stream: Stream, sent: Sent, queue: int, again: bool) -> Packet:
    """Return the packet of a transmission."""
    message, transport = sent.message, stream.transport
    final = sent.index == message.packets - 1
    path_hash, entropy = stream.hash, 0
    if transport.sprayed:
        entropy = (sent.index + message.step + again) & 0xFFFFFFFF
        for place in range(4):
            path_hash ^= int(ENTROPY_TABLE[place, entropy >> (24 - 8 * place) & 255])
    drop_class = message.drop_class[sent.index] if message.bounded and not again else 0
    return Packet(
        Kind.DATA,
        message,
        stream.target,
        transport.header + (message.last_bytes if final else transport.payload),
        queue,
        path_hash,
        index=sent.index,
        sent=sent,
        rank=left(message),
        drop_class=drop_class,
        ecn=transport.ecn,
        sprayed=transport.sprayed,
        again=again,
        entropy=entropy,
    )


def control_packet(message: Message, kind: Kind, *, back: bool, answered: Packet | None = None) -> Packet:
    """Return a control packet of a message's stream, which answers ``answered``."""
    stream, transport = message.flow, message.transport
    return Packet(
        kind,
        message,
        stream.source if back else stream.target,
        transport.ack,
        transport.control_queue,
        stream.hash_back if back else stream.hash,
        index=answered.index if answered else 0,
        sent=answered.sent if answered else None,
        ecn=transport.ecn,
        back=back,
    )


class Hosts(ABC):
    """What senders and receivers do; the engine is made of it."""

    tally: NDArray[np.int64]
    """What is counted, in the cells of `sim.counters`."""

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

    # ------------------------------------------------------------------------------------------------------ sending

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
        if not stream.flying:
            stream.deadline_ps = self.now_ps + stream.window.timeout_ps()
            if not stream.timer:
                stream.timer = True
                self.at(stream.deadline_ps, lambda: self.stream_timer(stream))
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
            message.known[sent.index] = Known.HOLE
            message.holes += 1
        else:
            message.known[sent.index] = Known.LOST
            message.waiting += 1
            stream.again.append(Sent(message, sent.index))

    def probe(self, message: Message, interface: Interface) -> None:
        """Ask by its sender's interface what has arrived, if all of a message is sent and some of it may stay lost."""
        busy = message.flying or message.waiting or message.next < message.packets
        if not message.holes or busy or message.stopped or message.probing:
            return
        message.refs += 1
        message.probing = True
        self.tally[c.PROBES] += 1
        interface.control.append(control_packet(message, Kind.PROBE, back=False))
        message.probe_at_ps = self.now_ps + (message.flow.window.timeout_ps() << message.probe_backoff)
        if not message.probe_timer:
            message.probe_timer = True
            message.refs += 1
            self.at(message.probe_at_ps, lambda: self.probe_timer(message))

    def stream_timer(self, stream: Stream) -> None:
        """Give up on what is on its way, if nothing was heard for long."""
        if not stream.flying and not lacks_credit(stream):
            stream.timer = False
            self.interface_at(stream, stream.source).kick()
            return
        interface = self.interface_at(stream, stream.source)
        if self.now_ps < stream.deadline_ps:
            self.at(stream.deadline_ps, lambda: self.stream_timer(stream))
        else:
            stream.timer = False
            self.tally[c.TIMEOUTS] += 1
            stream.window.on_timeout(stream.number)
            if stream.transport.kind == NDP:
                stream.credit += max(1, stream.flying)
            for out in stream.out:
                for sent in list(out):
                    self.lose(sent)
                    self.probe(sent.message, interface)
                    self.settle(sent.message)
        interface.offer(stream)
        interface.kick()

    def probe_timer(self, message: Message) -> None:
        """Ask again, unless all is well."""
        interface = self.interface_at(message.flow, message.flow.source)
        if message.stopped or message.acked == message.packets:
            message.probe_timer = False
            message.refs -= 1
            self.settle(message)
        else:
            if self.now_ps >= message.probe_at_ps:
                if message.probing and message.probe_backoff < PROBE_BACKOFF_MAX:
                    message.probe_backoff += 1
                message.probing = False
                message.probe_at_ps = self.now_ps + message.flow.window.timeout_ps()
                self.probe(message, interface)
            self.at(message.probe_at_ps, lambda: self.probe_timer(message))
        interface.kick()

    # ---------------------------------------------------------------------------------------------------- receiving

    def take_data(self, packet: Packet, interface: Interface) -> None:
        """Note a packet at its target, and answer it."""
        message = packet.message
        kind = Kind.NACK if packet.trimmed else Kind.ACK
        if packet.trimmed:
            message.trims += 1
        elif message.arrived[packet.index]:
            self.tally[c.DUPLICATES] += 1
        else:
            message.arrived[packet.index] = True
            message.received += 1
            self.tally[c.ARRIVED] += 1
            if message.bounded and not message.drop_class[packet.index]:
                message.protected -= 1
            whole = message.received == message.packets
            early = message.bounded and (message.transport.immediate or message.asked)
            if not message.done and (whole or (early and _is_enough(message))):
                self.finish(message)
        answer = control_packet(message, kind, back=True, answered=packet)
        answer.echo = packet.ecn == 3
        answer.enough = message.done and message.missing > 0
        interface.control.append(answer)
        if message.transport.kind == NDP and message.pulls < message.packets + message.trims:
            message.pulls += 1
            message.refs += 1
            interface.pull(control_packet(message, Kind.PULL, back=True))

    def take_probe(self, packet: Packet, interface: Interface) -> None:
        """Tell a sender whether more is needed."""
        message = packet.message
        message.asked = True
        if not message.done and _is_enough(message):
            self.finish(message)
        answer = control_packet(message, Kind.ANSWER, back=True)
        answer.enough = message.done
        interface.control.append(answer)

    def take_answer(self, packet: Packet) -> None:
        """Stop, or send again what may have been lost."""
        message = packet.message
        message.probing, message.probe_backoff = False, 0
        if packet.enough:
            message.stopped = True
        elif not message.stopped:
            message.resending, message.next = True, 0
            if not message.listed:
                self.enlist(message)

    def take_nack(self, packet: Packet, interface: Interface) -> None:
        """Note at the sender, who has ``interface``, that the header of a packet has come to its target alone."""
        assert packet.sent is not None
        if packet.sent.flying:
            stream = packet.message.flow
            stream.window.backoff = 0
            stream.deadline_ps = self.now_ps + stream.window.timeout_ps()
            self.lose(packet.sent)
            self.probe(packet.message, interface)

    def take_ack(self, packet: Packet, interface: Interface) -> None:
        """Note at the sender, who has ``interface``, that a packet has arrived, and which ones then have not."""
        message, sent = packet.message, packet.sent
        assert sent is not None
        stream = message.flow
        if packet.enough:
            message.stopped = True
        known = message.known[packet.index]
        if sent.flying:
            limited = stream.window.is_limit(stream.flying)
            out = stream.out[sent.queue]
            del out[sent]
            sent.flying = False
            stream.flying -= 1
            message.flying -= 1
            message.known[packet.index] = Known.ACKED
            message.acked += 1
            rtt_ps = self.now_ps - sent.sent_ps
            stream.window.measure(rtt_ps)
            stream.window.backoff = 0
            stream.window.on_ack(sent.number, packet.echo, rtt_ps, self.now_ps, limited, stream.number)
            while out and (first := next(iter(out))).number + stream.transport.reorder <= sent.number:
                stream.window.on_loss(first.number, self.now_ps, stream.number)
                self.lose(first)
                self.probe(first.message, interface)
                self.settle(first.message)
            stream.deadline_ps = self.now_ps + stream.window.timeout_ps()
        else:
            self.tally[c.LATE_ANSWERS] += 1
            if known in (Known.LOST, Known.HOLE):
                message.known[packet.index] = Known.ACKED
                message.acked += 1
                message.holes -= known is Known.HOLE
        if message.bounded:
            self.probe(message, interface)


def _is_hole(message: Message, index: int) -> bool:
    return message.known[index] is Known.HOLE and not message.arrived[index]


def _is_enough(message: Message) -> bool:
    return not message.protected and message.received >= message.required
