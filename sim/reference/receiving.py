# SPDX-License-Identifier: Apache-2.0
"""Hosts as receivers, of data and of answers."""

from dlcp.sim import counters as c
from dlcp.sim.plan import NDP, PFABRIC
from dlcp.sim.reference.interface import Interface
from dlcp.sim.reference.packets import control_packet
from dlcp.sim.reference.parts import Kind, Known, Message, Packet, Sent, Stream
from dlcp.sim.reference.timers import Timers


class Receivers(Timers):
    """What receivers do, and senders with what they are answered."""

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
        """Stop, or send again what may have been lost; a pFabric flow goes on."""
        message = packet.message
        message.probing, message.probe_backoff = False, 0
        if packet.enough:
            message.stopped = True
        if message.transport.kind == PFABRIC:
            message.flow.window.go_on()
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
            self.put_off(stream, everything=True)
            self.arm(stream)
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
        stream.window.go_on()
        if sent.flying:
            limited = stream.window.is_limit(stream.flying)
            out = stream.out[sent.queue]
            del out[sent]
            sent.flying = False
            stream.repairing -= sent.again
            stream.flying -= 1
            message.flying -= 1
            message.known[packet.index] = Known.ACKED
            message.acked += 1
            rtt_ps = self.now_ps - sent.sent_ps
            stream.window.measure(rtt_ps)
            stream.window.backoff = 0
            stream.window.on_ack(sent.number, packet.echo, rtt_ps, self.now_ps, limited, stream.number)
            before = self._take_tail(stream, sent.number)
            while out and is_overtaken(first := next(iter(out)), sent.number, before):
                stream.window.on_loss(first.number, self.now_ps, stream.number)
                self.lose(first)
                self.probe(first.message, interface)
                self.settle(first.message)
            self.put_off(stream, everything=True)
            self.arm(stream)
        else:
            self.tally[c.LATE_ANSWERS] += 1
            if known in (Known.LOST, Known.HOLE):
                message.known[packet.index] = Known.ACKED
                message.acked += 1
                message.holes -= known is Known.HOLE
            if stream.tail_number is not None and stream.tail_of == (message, packet.index):
                stream.tail_of = None  # it had not been lost
        if message.bounded:
            self.probe(message, interface)

    def _take_tail(self, stream: Stream, number: int) -> int:
        """Return the number before which everything is lost, if the probe of a tail is answered; -1 if it is not."""
        before = stream.tail_number
        if before is None or number < before:
            return -1
        stream.tail_number = None
        if number == before and stream.tail_of is not None:
            stream.window.on_loss(number, self.now_ps, stream.number)  # the probe has repaired what it repeated
        return before


def is_overtaken(sent: Sent, number: int, before: int) -> bool:
    """Return whether a packet is lost, now that packet ``number`` of its queue has arrived."""
    return sent.number + sent.message.transport.reorder <= number or sent.number < before


def _is_enough(message: Message) -> bool:
    return not message.protected and message.received >= message.required
