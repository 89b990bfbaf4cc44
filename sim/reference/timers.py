# SPDX-License-Identifier: Apache-2.0
"""What happens when nothing is heard: a probe of a stream's tail, a timeout, a question for what is missing.

Of all that a stream waits for, only the earliest has an event that counts (``timer_at_ps``).
"""

from dlcp.sim import counters as c
from dlcp.sim.plan import NDP
from dlcp.sim.reference.interface import Interface, left
from dlcp.sim.reference.packets import control_packet
from dlcp.sim.reference.parts import Kind, Message, Stream
from dlcp.sim.reference.sending import Senders

PROBE_BACKOFF_MAX = 6


def lacks_answer(stream: Stream) -> bool:
    """Return whether a stream with nothing on its way waits for what may have been lost: a PULL, or leave to go on."""
    if not stream.again and not stream.messages:
        return False
    return stream.window.asking or (stream.transport.kind == NDP and stream.credit <= 0)


class Timers(Senders):
    """What hosts do when nothing is heard."""

    def put_off(self, stream: Stream, *, everything: bool) -> None:
        """Let the tail probe of a stream begin anew (RFC 8985, section 7.2), and with ``everything`` its timeout."""
        if everything:
            stream.deadline_ps = self.now_ps + stream.window.timeout_ps()
        probes = stream.transport.tail_probe and stream.window.rtt_ps and not stream.repairing
        may_probe = probes and stream.tail_number is None
        stream.tail_at_ps = self.now_ps + 2 * stream.window.rtt_ps if may_probe else None

    def arm(self, stream: Stream) -> None:
        """See to it that there is an event when something is due."""
        due = stream.deadline_ps if stream.tail_at_ps is None else min(stream.deadline_ps, stream.tail_at_ps)
        if stream.timer_at_ps is None or due < stream.timer_at_ps:
            stream.timer_at_ps = due
            self.at(due, lambda: self.stream_timer(stream))

    def stream_timer(self, stream: Stream) -> None:
        """Act if something is due; an event that another has replaced does nothing."""
        interface = self.interface_at(stream, stream.source)
        if self.now_ps == stream.timer_at_ps:
            stream.timer_at_ps = None
            if stream.flying or lacks_answer(stream):
                if self.now_ps >= stream.deadline_ps:
                    self._give_up(stream, interface)
                else:
                    if stream.tail_at_ps is not None and self.now_ps >= stream.tail_at_ps:
                        self._probe_tail(stream)
                    self.arm(stream)
                interface.offer(stream)
        interface.kick()

    def _give_up(self, stream: Stream, interface: Interface) -> None:
        """Declare everything lost that is on its way."""
        self.tally[c.TIMEOUTS] += 1
        stream.window.on_timeout(stream.number)
        stream.tail_number, stream.spare = None, 0
        if stream.transport.kind == NDP:
            stream.credit += max(1, stream.flying)
        for out in stream.out:
            for sent in list(out):
                self.lose(sent)
                self.probe(sent.message, interface)
                self.settle(sent.message)
        if stream.window.asking and lacks_answer(stream):
            self._ask_to_go_on(stream, interface)
            self.put_off(stream, everything=True)
            self.arm(stream)

    def _ask_to_go_on(self, stream: Stream, interface: Interface) -> None:
        """Send a pFabric flow's packet without data, of the priority that its data has."""
        message = stream.again[0].message if stream.again else stream.messages[0]
        message.refs += 1
        self.tally[c.PROBES] += 1
        question = control_packet(message, Kind.PROBE, back=False)
        question.rank = left(message)
        interface.control.append(question)

    def _probe_tail(self, stream: Stream) -> None:
        """Let one more packet go, if none waits for its turn at the interface anyway."""
        if stream.ready:
            self.put_off(stream, everything=False)
            return
        self.tally[c.TAIL_PROBES] += 1
        stream.tail_number, stream.tail_of, stream.spare = stream.number, None, 1
        self.put_off(stream, everything=True)
        if not stream.again and not stream.messages:
            latest = max((sent for out in stream.out for sent in out), key=lambda sent: sent.number)
            stream.tail_of = (latest.message, latest.index)
            self.send_again(latest)

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
