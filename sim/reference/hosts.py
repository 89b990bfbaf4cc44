# SPDX-License-Identifier: Apache-2.0
"""Hosts: their network interfaces, and what they do as senders and receivers.

Names are those of `dlcp.sim.kernel.sender` and `dlcp.sim.kernel.receiver`. What both decide stands in `dlcp.sim.rules`;
what each does about it, with lists and timers of its own, has to come out the same.
"""

from collections import deque
from typing import TYPE_CHECKING

from dlcp.sim.arithmetic import RATE_SHIFT
from dlcp.sim.packet_engine import EngineCounter
from dlcp.sim.plan import PORT_QUEUES, TIMEOUT_BACKOFF_MAX, Discipline, Number, PacketKind, TransportKind
from dlcp.sim.reference.parts import (
    Message,
    MessageStream,
    PacketState,
    SimulatedPacket,
    Transmission,
    control_packet,
    data_packet,
)
from dlcp.sim.reference.switch import SimulatedLink
from dlcp.sim.rules import (
    has_enough,
    is_complete,
    is_limited,
    leave_probe_mode,
    may_probe,
    measure_rtt,
    needs_reply,
    on_ack,
    on_loss,
    on_timeout,
    queue_of,
    restart_tail_timer,
    restart_timers,
    timeout_ps,
    window_is_open,
)

if TYPE_CHECKING:
    from dlcp.sim.reference.reference_engine import ReferenceEngine


class HostInterface:
    """A host's end of a link: control packets first, then streams in turn, the most urgent queue first."""

    def __init__(self, hosts: "Hosts", link: SimulatedLink) -> None:
        self.hosts, self.engine, self.link = hosts, hosts.engine, link
        self.control: deque[SimulatedPacket] = deque()
        self.ready: list[deque[MessageStream]] = [deque() for _ in range(PORT_QUEUES)]
        self.pulls: deque[SimulatedPacket] = deque()
        self.pulling = False
        self.pull_next_ps = 0
        self.pending = False

    def offer(self, stream: MessageStream) -> None:
        """List a stream as ready, if it is and is not listed yet."""
        if not stream.ready and may_send(stream):
            stream.ready = True
            self.ready[next_queue(stream)].append(stream)

    def kick(self) -> None:
        """Send something, or arrange for it when the link is free."""
        if self.pending or not (self.control or any(self.ready)):
            return
        if self.link.busy_ps > self.engine.now_ps:
            self._wait()
            return
        packet = self.control.popleft() if self.control else self._next_packet()
        if packet is None:
            return
        self.link.send(packet)
        if self.control or any(self.ready):
            self._wait()

    def _wait(self) -> None:
        self.pending = True
        self.engine.at(self.link.busy_ps, self._free)

    def _free(self) -> None:
        self.pending = False
        self.kick()

    def _next_packet(self) -> SimulatedPacket | None:
        while not self.control and any(self.ready):
            waiting = next(streams for streams in reversed(self.ready) if streams)
            if self.engine.plan.switches.discipline == Discipline.PFABRIC:
                move_smallest_first(waiting)
            stream = waiting.popleft()
            stream.ready = False
            packet = self.hosts.next_packet(stream, self)
            self.offer(stream)
            if packet is not None:
                return packet
        return self.control.popleft() if self.control else None

    def request_packet(self, pull: SimulatedPacket) -> None:
        """Queue a PULL of NDP."""
        self.pulls.append(pull)
        if not self.pulling:
            self.pulling = True
            self.engine.at(max(self.engine.now_ps, self.pull_next_ps), self._send_pull)

    def _send_pull(self) -> None:
        """Send the first PULL. The next follows when the packet that it asks for could have arrived."""
        pull = self.pulls.popleft()
        transport = pull.message.transport
        size = transport.header + transport.payload
        self.pull_next_ps = self.engine.now_ps + (size * self.link.rules.kibibyte_ps >> RATE_SHIFT)
        self.control.append(pull)
        if self.pulls:
            self.engine.at(self.pull_next_ps, self._send_pull)
        else:
            self.pulling = False
        self.kick()


def move_smallest_first(streams: deque[MessageStream]) -> None:
    """Put the pFabric stream whose message has the least left in front of the others."""
    if streams[0].transport.kind == TransportKind.PFABRIC:
        best = min(streams, key=lambda stream: stream.messages[0].left if stream.messages else 0)
        streams.remove(best)
        streams.appendleft(best)


def may_send(stream: MessageStream) -> bool:
    """Return whether a stream's window is open and it seems to have something to send."""
    return stream.has_work and window_is_open(stream, stream.transport)


def next_queue(stream: MessageStream) -> Number:
    """Return the queue of what a stream seems to send next."""
    if stream.retransmissions:
        return queue_of(stream.transport, stream.retransmissions[0].message, stream.retransmissions[0].index)
    return queue_of(stream.transport, stream.messages[0], stream.messages[0].next_index)


def awaits_reply(stream: MessageStream) -> bool:
    """Return whether a stream with nothing in flight waits for a PULL, or for a reply to a probe."""
    return stream.has_work and needs_reply(stream, stream.transport)


class Hosts:
    """All hosts, as senders and receivers."""

    def __init__(self, engine: "ReferenceEngine") -> None:
        self.engine = engine

    @property
    def now_ps(self) -> int:
        """Return the time."""
        return self.engine.now_ps

    def count(self, cell: EngineCounter, by: int = 1) -> None:
        """Count something."""
        self.engine.tally[cell] += by

    # ---------------------------------------------------------------------------------------------------------- sending

    def begin(self, message: Message, drop_classes: list[int]) -> None:
        """Give the packets of a message their drop classes, and put it into its stream."""
        message.state = [PacketState.UNSENT] * message.packets
        message.arrived = [False] * message.packets
        if message.bounded:
            message.drop_class = drop_classes
            message.protected = drop_classes.count(0)
        stream = message.flow
        if message.transport.kind == TransportKind.NDP:
            message.pulls = min(int(message.transport.window), message.packets)
            stream.credit += message.pulls
        self._enqueue_message(message)
        interface = self.engine.interface_at(stream, stream.source)
        interface.offer(stream)
        interface.kick()

    def _enqueue_message(self, message: Message) -> None:
        """Put a message into its stream's list, by order, but never in front of one that has begun to be sent."""
        message.listed = True
        waiting = message.flow.messages
        position = len(waiting)
        while position and waiting[position - 1].order > message.order and (position > 1 or not waiting[0].next_index):
            position -= 1
        waiting.insert(position, message)

    def next_packet(self, stream: MessageStream, interface: HostInterface) -> SimulatedPacket | None:
        """Return the next packet of a stream, which is in flight then.

        None as well if ``interface``, which has no control packet waiting, has to probe a receiver first.
        """
        if not may_send(stream):
            return None
        found, retransmission = None, False
        while stream.retransmissions and found is None:
            found = stream.retransmissions.popleft()
            message = found.message
            message.retransmits -= 1
            lost = message.state[found.index] is PacketState.LOST
            if lost and not message.satisfied:
                retransmission = True
                continue
            stream.repairing -= 1
            if lost:
                message.state[found.index] = PacketState.HOLE
                message.holes += 1
            found = None
            # Its acknowledgement came late, while it waited here. It may have been all that kept the sender from
            # probing.
            self.probe_receiver(message, interface)
            self.engine.close_message(message)
            if interface.control:
                return None
        while stream.messages and found is None:
            message = stream.messages[0]
            if not message.satisfied:
                while message.filling_holes and message.next_index < message.packets and not _is_missing_hole(message):
                    message.next_index += 1
                if message.next_index < message.packets:
                    found = Transmission(message, message.next_index)
                    message.next_index += 1
                    if message.filling_holes:
                        message.holes -= 1
                        retransmission = True
            if found is None or (not message.filling_holes and message.next_index == message.packets):
                stream.messages.popleft()
                message.listed = False
                if found is None:
                    self.engine.close_message(message)
        return None if found is None else self._transmit(stream, found, retransmission)

    def _transmit(self, stream: MessageStream, sent: Transmission, retransmission: bool) -> SimulatedPacket:
        message = sent.message
        sent.queue = queue_of(message.transport, message, sent.index)
        message.state[sent.index] = PacketState.IN_FLIGHT
        sent.number, sent.sent_ps, sent.in_flight = stream.number, self.now_ps, True
        stream.number += 1
        stream.in_flight_by_queue[sent.queue][sent] = None
        stream.spare = 0
        if stream.in_flight:
            restart_tail_timer(stream, stream.transport, self.now_ps)
        else:
            restart_timers(stream, stream.transport, self.now_ps)
        self._arm_timer(stream)
        stream.in_flight += 1
        if stream.transport.kind == TransportKind.NDP:
            stream.credit -= 1
        message.in_flight += 1
        message.sent += 1
        message.refs += 1
        self.count(EngineCounter.SENT)
        self.count(EngineCounter.RETRANSMITTED, retransmission)
        return data_packet(sent, retransmission)

    def _declare_lost(self, sent: Transmission) -> None:
        """Declare a packet in flight lost: it is retransmitted, or becomes a hole if the message may do without it."""
        message = sent.message
        self._take_from_flight(sent)
        self.count(EngineCounter.DECLARED_LOST)
        if message.satisfied or (message.bounded and message.drop_class[sent.index]):
            message.flow.repairing -= sent.repeated
            message.state[sent.index] = PacketState.HOLE
            message.holes += 1
        else:
            self._queue_retransmission(sent)

    def _take_from_flight(self, sent: Transmission) -> None:
        stream = sent.message.flow
        del stream.in_flight_by_queue[sent.queue][sent]
        sent.in_flight = False
        stream.in_flight -= 1
        sent.message.in_flight -= 1

    def _queue_retransmission(self, sent: Transmission) -> None:
        message = sent.message
        message.state[sent.index] = PacketState.LOST
        message.retransmits += 1
        message.flow.repairing += not sent.repeated
        message.flow.retransmissions.append(Transmission(message, sent.index, repeated=True))

    # ----------------------------------------------------------------------------------------------------------- timers

    def _arm_timer(self, stream: MessageStream) -> None:
        """Make sure of an event at the earliest time that the stream waits for."""
        due = min(stream.deadline, stream.tail_due)
        if stream.timer_at_ps is None or due < stream.timer_at_ps:
            stream.timer_at_ps = due
            self.engine.at(due, lambda: self._stream_timer(stream))

    def _stream_timer(self, stream: MessageStream) -> None:
        """Act on what is due. An event that another one has replaced does nothing."""
        interface = self.engine.interface_at(stream, stream.source)
        if self.now_ps == stream.timer_at_ps:
            stream.timer_at_ps = None
            if stream.in_flight or awaits_reply(stream):
                if self.now_ps >= stream.deadline:
                    self._time_out(stream, interface)
                else:
                    if self.now_ps >= stream.tail_due:
                        self._probe_tail(stream)
                    self._arm_timer(stream)
                interface.offer(stream)
        interface.kick()

    def _time_out(self, stream: MessageStream, interface: HostInterface) -> None:
        """Declare everything lost that is in flight."""
        self.count(EngineCounter.TIMEOUTS)
        on_timeout(stream, stream.transport)
        stream.tail_probing, stream.spare = False, 0
        if stream.transport.kind == TransportKind.NDP:
            stream.credit += max(1, stream.in_flight)
        for in_flight in stream.in_flight_by_queue:
            for sent in list(in_flight):
                self._lose(sent, interface)
        if stream.probe_mode and awaits_reply(stream):
            # A pFabric flow's probe has the priority of its data.
            message = (stream.retransmissions[0].message if stream.retransmissions else None) or stream.messages[0]
            message.refs += 1
            self.count(EngineCounter.PROBES)
            probe = control_packet(message, PacketKind.PROBE, back=False)
            probe.rank = message.left
            interface.control.append(probe)
            restart_timers(stream, stream.transport, self.now_ps)
            self._arm_timer(stream)

    def _lose(self, sent: Transmission, interface: HostInterface) -> None:
        self._declare_lost(sent)
        self.probe_receiver(sent.message, interface)
        self.engine.close_message(sent.message)

    def _probe_tail(self, stream: MessageStream) -> None:
        """Let one more packet go, unless the stream has one ready at its interface anyway."""
        if stream.ready:
            restart_tail_timer(stream, stream.transport, self.now_ps)
            return
        self.count(EngineCounter.TAIL_PROBES)
        stream.tail_probing, stream.tail_number, stream.tail_of, stream.spare = True, stream.number, None, 1
        restart_timers(stream, stream.transport, self.now_ps)
        if not stream.has_work:
            in_flight = (sent for by_queue in stream.in_flight_by_queue for sent in by_queue)
            latest = max(in_flight, key=lambda sent: sent.number)
            stream.tail_of = (latest.message, latest.index)
            self._take_from_flight(latest)
            self._queue_retransmission(latest)

    def probe_receiver(self, message: Message, interface: HostInterface) -> None:
        """Ask a receiver what it still needs, once everything is sent and answered and only holes are left."""
        if not may_probe(message):
            return
        message.refs += 1
        message.probing = True
        self.count(EngineCounter.PROBES)
        interface.control.append(control_packet(message, PacketKind.PROBE, back=False))
        message.probe_at_ps = self.now_ps + (timeout_ps(message.flow, message.transport) << message.probe_backoff)
        if not message.probe_timer:
            message.probe_timer = True
            message.refs += 1
            self.engine.at(message.probe_at_ps, lambda: self._probe_timer(message))

    def _probe_timer(self, message: Message) -> None:
        """Probe again, unless the message is through."""
        interface = self.engine.interface_at(message.flow, message.flow.source)
        if message.satisfied or message.acked == message.packets:
            message.probe_timer = False
            message.refs -= 1
            self.engine.close_message(message)
        else:
            if self.now_ps >= message.probe_at_ps:
                if message.probing and message.probe_backoff < TIMEOUT_BACKOFF_MAX:
                    message.probe_backoff += 1
                message.probing = False
                message.probe_at_ps = self.now_ps + timeout_ps(message.flow, message.transport)
                self.probe_receiver(message, interface)
            self.engine.at(message.probe_at_ps, lambda: self._probe_timer(message))
        interface.kick()

    # -------------------------------------------------------------------------------------------------------- receiving

    def receive(self, packet: SimulatedPacket, interface: HostInterface) -> None:
        """Take in a packet, at the end of the stream to which it was sent."""
        message = packet.message
        if packet.kind is PacketKind.DATA:
            self._receive_data(packet, interface)
            message.refs += 1  # for the acknowledgement, which is another packet
        elif packet.kind is PacketKind.PROBE:
            self._receive_probe(packet, interface)
            message.refs += 1
        else:
            if packet.kind is PacketKind.ACK:
                self._receive_ack(packet, interface)
            elif packet.kind is PacketKind.NACK:
                self._receive_nack(packet, interface)
            elif packet.kind is PacketKind.PULL:
                message.flow.credit += 1
            else:
                self._receive_probe_reply(packet)
            interface.offer(message.flow)
        interface.kick()

    def _receive_data(self, packet: SimulatedPacket, interface: HostInterface) -> None:
        """Take in a packet at its target, and acknowledge it."""
        message = packet.message
        if packet.trimmed:
            message.trims += 1
        elif message.arrived[packet.index]:
            self.count(EngineCounter.DUPLICATES)
        else:
            message.arrived[packet.index] = True
            message.received += 1
            self.count(EngineCounter.ARRIVED)
            if message.bounded and not message.drop_class[packet.index]:
                message.protected -= 1
            if not message.done and is_complete(message.transport, message):
                self.engine.complete_node(message)
        kind = PacketKind.NACK if packet.trimmed else PacketKind.ACK
        ack = control_packet(message, kind, back=True, acknowledges=packet)
        ack.ecn_echo = packet.ecn == 3
        ack.satisfied = message.done and message.missing > 0
        interface.control.append(ack)
        if message.transport.kind == TransportKind.NDP and message.pulls < message.packets + message.trims:
            message.pulls += 1
            message.refs += 1
            interface.request_packet(control_packet(message, PacketKind.PULL, back=True))

    def _receive_probe(self, packet: SimulatedPacket, interface: HostInterface) -> None:
        """Reply to a sender that has sent everything whether the message is complete within its bound."""
        message = packet.message
        message.probed = True
        if not message.done and has_enough(message):
            self.engine.complete_node(message)
        reply = control_packet(message, PacketKind.PROBE_REPLY, back=True)
        reply.satisfied = message.done
        interface.control.append(reply)

    def _receive_probe_reply(self, packet: SimulatedPacket) -> None:
        """Stop if the receiver needs no more, else send the holes again. A pFabric flow leaves probe mode."""
        message = packet.message
        message.probing, message.probe_backoff = False, 0
        if packet.satisfied:
            message.satisfied = True
        if message.transport.kind == TransportKind.PFABRIC:
            leave_probe_mode(message.flow)
        elif not message.satisfied:
            message.filling_holes, message.next_index = True, 0
            if not message.listed:
                self._enqueue_message(message)

    def _receive_nack(self, packet: SimulatedPacket, interface: HostInterface) -> None:
        """Take in at the sender, who has ``interface``, that a packet arrived without its payload."""
        assert packet.transmission is not None
        if packet.transmission.in_flight:
            stream = packet.message.flow
            stream.backoff = 0
            restart_timers(stream, stream.transport, self.now_ps)
            self._arm_timer(stream)
            self._declare_lost(packet.transmission)
            self.probe_receiver(packet.message, interface)

    def _receive_ack(self, packet: SimulatedPacket, interface: HostInterface) -> None:
        """Take in at the sender, who has ``interface``, that a packet arrived; others may be lost by that."""
        message, sent = packet.message, packet.transmission
        assert sent is not None
        stream = message.flow
        if packet.satisfied:
            message.satisfied = True
        state = message.state[packet.index]
        leave_probe_mode(stream)
        if sent.in_flight:
            limited = is_limited(stream)
            self._take_from_flight(sent)
            stream.repairing -= sent.repeated
            message.state[packet.index] = PacketState.ACKED
            message.acked += 1
            rtt_ps = self.now_ps - sent.sent_ps
            measure_rtt(stream, stream.transport, rtt_ps)
            stream.backoff = 0
            on_ack(stream, stream.transport, packet.ecn_echo, rtt_ps, sent.number, self.now_ps, limited)
            before = self._end_tail_probe(stream, sent.number)
            in_flight = stream.in_flight_by_queue[sent.queue]
            while in_flight:
                first = next(iter(in_flight))
                if first.number + stream.transport.reorder > sent.number and first.number >= before:
                    break
                on_loss(stream, stream.transport, first.number, self.now_ps)
                self._lose(first, interface)
            restart_timers(stream, stream.transport, self.now_ps)
            self._arm_timer(stream)
        else:
            self.count(EngineCounter.LATE_ACKS)
            if state in (PacketState.LOST, PacketState.HOLE):
                message.state[packet.index] = PacketState.ACKED
                message.acked += 1
                message.holes -= state is PacketState.HOLE
            if stream.tail_probing and stream.tail_of == (message, packet.index):
                stream.tail_of = None  # what the probe repeats had not been lost
        if message.bounded:
            self.probe_receiver(message, interface)

    def _end_tail_probe(self, stream: MessageStream, number: int) -> int:
        """Return the number before which everything is lost, if the probe of a tail is answered; -1 if it is not."""
        before = stream.tail_number
        if not stream.tail_probing or number < before:
            return -1
        stream.tail_probing = False
        if number == before and stream.tail_of is not None:
            # The probe has repaired the loss of what it repeats.
            on_loss(stream, stream.transport, number, self.now_ps)
        return before


def _is_missing_hole(message: Message) -> bool:
    index = message.next_index
    return message.state[index] is PacketState.HOLE and not message.arrived[index]
