# SPDX-License-Identifier: Apache-2.0
"""Network interfaces: which packet of which stream leaves a host next."""

from collections import deque
from typing import TYPE_CHECKING

from dlcp.sim.arithmetic import RATE_SHIFT
from dlcp.sim.plan import CONTROL_QUEUE, NDP, PFABRIC, PIAS, QUEUES, SMALLEST_FIRST
from dlcp.sim.reference.link import Link
from dlcp.sim.reference.parts import Message, Packet, Stream

if TYPE_CHECKING:
    from dlcp.sim.reference.engine import ReferenceEngine


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
    return stream.flying < int(stream.window.packets) + stream.spare and not stream.window.asking


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
