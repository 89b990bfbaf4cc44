# SPDX-License-Identifier: Apache-2.0
"""The network as SimPy events. Slow, plain, and what the kernel has to agree with."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import simpy
from dlcp.sim import counters as c
from dlcp.sim.arithmetic import MASK64, mix
from dlcp.sim.engine import GRAPH_CLOSED, GRAPH_DONE, NODE_DONE, Note
from dlcp.sim.graph import RECORD
from dlcp.sim.plan import BLOCK_PACKETS, NDP, PROFILE_CELLS, SELECTIVE, Plan
from dlcp.sim.reference.congestion import WINDOWS
from dlcp.sim.reference.interface import Interface
from dlcp.sim.reference.link import Link
from dlcp.sim.reference.parts import Graph, Kind, Known, Message, Packet, Stream, Transport
from dlcp.sim.reference.program import fits, load_switches
from dlcp.sim.reference.receiving import Receivers
from dlcp.sim.reference.switch import Port, Switch
from dlcp.sim.submission import Submission
from dlcp.sim.topology.network import Routes
from numpy.typing import NDArray


def drop_classes(message: Message) -> list[int]:
    """Return the drop class of each packet; in each block those go first that may not be dropped."""
    classes = []
    free = [drop_class for drop_class in message.profile if drop_class]
    zeros = PROFILE_CELLS - len(free)
    for start in range(0, message.packets, BLOCK_PACKETS):
        count = min(BLOCK_PACKETS, message.packets - start)
        keep = (zeros * count + PROFILE_CELLS // 2) // PROFILE_CELLS if free else count
        classes += [0] * keep
        classes += [free[mix(index, message.salt) % len(free)] for index in range(start + keep, start + count)]
    return classes


class ReferenceEngine(Receivers):
    """Moves the packets of a plan; see `dlcp.sim.engine.Engine`.

    Switches with the discipline ``dlcp`` run the compiled P4 program itself, packet by packet, wherever its tables can
    express the plan (`dlcp.sim.reference.program.fits`).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.env = simpy.Environment(0)
        self.tally = np.zeros(c.CELLS, np.int64)
        self.routes = plan.routes
        self._transports = [Transport.of(row) for row in plan.transports]
        self._profiles = [row.tolist() for row in plan.profiles]
        self._streams: dict[int, Stream] = {}
        self._graphs: dict[int, Graph] = {}
        self._notes: list[Note] = []
        self.links = [Link(self, number, link) for number, link in enumerate(plan.links)]
        self._interfaces: dict[int, Interface] = {}
        self.switches: dict[int, Switch] = {
            node: Switch(self, node) for node in range(plan.hosts, len(plan.network.names))
        }
        for link in self.links:
            source = link.numbers.source
            if source < plan.hosts:
                self._interfaces[link.number] = Interface(self, link)
            else:
                self.switches[source].ports[link.number] = Port(self.switches[source], link)
        self._programs = plan.rules.discipline == SELECTIVE and fits(plan)
        if self._programs:
            load_switches(self)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return what was counted, in the cells of `dlcp.sim.counters`."""
        if self._programs:
            events = [switch.program.events() for switch in self.switches.values() if switch.program is not None]
            self.tally[[c.BUDGET_SPENT, c.SLOT_TAKEN, c.MARKS]] = np.sum(events, axis=0)
        return self.tally

    # ------------------------------------------------------------------------------------------------------ running

    @property
    def now_ps(self) -> int:
        """Return the time of the latest event."""
        return int(self.env.now)

    def run(self, limit_ps: int) -> list[Note]:
        """Go on until something is to be told, at most to ``limit_ps``."""
        env, tally = self.env, self.tally
        while (coming := env.peek()) <= limit_ps and not (self._notes and coming > env.now):
            tally[c.EVENTS] += 1
            env.step()
        notes, self._notes = self._notes, []
        return notes

    def has_events(self) -> bool:
        """Return whether anything is left to happen."""
        return self.env.peek() != float("inf")

    def at(self, time_ps: int, action: Callable[[], None]) -> None:
        """Let something happen at a time that is not past."""
        event = simpy.Event(self.env)
        event._ok, event._value = True, None
        event.callbacks = [lambda _: action()]
        self.env.schedule(event, delay=time_ps - self.now_ps)

    # ------------------------------------------------------------------------------------------------------- graphs

    def submit(self, submission: Submission) -> None:
        """Take in a graph; what waits for nothing begins after its delay."""
        for serial, source, target, transport, there, back, _ in submission.new_streams.tolist():
            kind = self._transports[transport]
            window = WINDOWS[kind.kind](kind)
            self._streams[serial] = Stream(serial, source, target, kind, there, back, window)
        graph = Graph(submission.number, [], len(submission.graph), len(submission.graph))
        self._graphs[submission.number] = graph
        graph.nodes = [self._message(submission, graph, place) for place in range(len(submission.graph))]
        starts, followers = submission.graph.starts.tolist(), submission.graph.followers.tolist()
        for place, message in enumerate(graph.nodes):
            message.followers = [graph.nodes[other] for other in followers[starts[place] : starts[place + 1]]]
        for message in graph.nodes:
            if not message.waits:
                # The clock here stands at the latest packet; the graph begins where SimPy's processes are.
                self._begin_after(message, submission.now_ps)

    def _message(self, submission: Submission, graph: Graph, place: int) -> Message:
        node = submission.graph.nodes[place]
        stream = int(submission.streams[place])
        packets = int(submission.packets[place])
        return Message(
            graph=graph,
            place=place,
            packets=packets,
            last_bytes=int(submission.last_bytes[place]),
            delay_ps=int(node["delay_ps"]),
            order=int(node["order"]),
            waits=int(submission.graph.waits[place]),
            watched=bool(node["watched"]),
            bounded=bool(submission.bounded[place]),
            required=packets - int(submission.allowed[place]),
            budget=int(submission.budget[place]),
            owner=int(submission.owner[place]),
            queue=int(submission.queue[place]),
            salt=int(submission.salt[place]) & MASK64,
            job=int(node["job"]),
            step=int(node["step"]),
            number=int(node["message"]),
            sender=int(node["sender"]),
            profile=self._profiles[int(submission.profile[place])],
            transport=self._transports[int(node["transport"])],
            stream=self._streams[stream] if stream >= 0 else None,
        )

    def _begin_after(self, message: Message, now_ps: int) -> None:
        self.at(now_ps + message.delay_ps, lambda: self._begin(message))

    def _begin(self, message: Message) -> None:
        message.begin_ps = self.now_ps
        if not message.packets:
            self.finish(message)
            self.settle(message)
            return
        message.known = [Known.UNSENT] * message.packets
        message.arrived = [False] * message.packets
        if message.bounded:
            message.drop_class = drop_classes(message)
            message.protected = message.drop_class.count(0)
        stream = message.flow
        if message.transport.kind == NDP:
            message.pulls = min(int(message.transport.window), message.packets)
            stream.credit += message.pulls
        self.enlist(message)
        interface = self.interface_at(stream, stream.source)
        interface.offer(stream)
        interface.kick()

    def finish(self, message: Message) -> None:
        """Note that a node is done, and let those begin that waited for it."""
        message.done, message.end_ps = True, self.now_ps
        message.missing = message.packets - message.received
        self.tally[c.MESSAGES_DONE] += 1
        graph = message.graph
        if message.watched:
            self._notes.append(Note(NODE_DONE, graph.number, message.place))
        for other in message.followers:
            other.waits -= 1
            if not other.waits:
                self._begin_after(other, self.now_ps)
        graph.remaining -= 1
        if not graph.remaining:
            self._notes.append(Note(GRAPH_DONE, graph.number, -1))

    def settle(self, message: Message) -> None:
        """Close a message that is done once nothing refers to it any more."""
        busy = message.refs or message.flying or message.waiting or message.listed
        if message.closed or not message.done or busy:
            return
        if message.acked < message.packets and not message.stopped:
            return
        message.closed = True
        message.graph.open -= 1
        if not message.graph.open:
            self._notes.append(Note(GRAPH_CLOSED, message.graph.number, -1))

    def records(self, number: int) -> NDArray[Any]:
        """Return what became of the nodes of a graph that has not been forgotten: `dlcp.sim.graph.RECORD` (n,)."""
        nodes = self._graphs[number].nodes
        return np.array([(m.begin_ps, m.end_ps, m.packets, m.missing, m.sent) for m in nodes], RECORD)

    def forget(self, number: int) -> None:
        """Give the room of a closed graph back."""
        del self._graphs[number]

    # ------------------------------------------------------------------------------------------------------ packets

    def interface_at(self, stream: Stream, host: int) -> Interface:
        """Return the interface by which a host at one end of a stream reaches the other end."""
        forth = host == stream.source
        links = self.routes.links(host, stream.target if forth else stream.source)
        if len(links) == 1:
            return self._interfaces[links[0]]
        path_hash = stream.hash if forth else stream.hash_back
        if self.plan.rules.discipline == SELECTIVE:
            place = path_hash // int(self.plan.divisors[host])
        else:
            place = mix(path_hash, int(self.plan.node_salt[host]) & MASK64)
        return self._interfaces[links[place % len(links)]]

    def arrive(self, node: int, packet: Packet) -> None:
        """Deliver a packet at the end of a link."""
        if node >= self.plan.hosts:
            self.switches[node].arrive(packet)
            return
        stream = packet.message.flow
        interface = self.interface_at(stream, node)
        if packet.kind is Kind.DATA:
            self.take_data(packet, interface)
            packet.message.refs += 1  # the answer is another packet
        elif packet.kind is Kind.PROBE:
            self.take_probe(packet, interface)
            packet.message.refs += 1
        else:
            if packet.kind is Kind.ACK:
                self.take_ack(packet, interface)
            elif packet.kind is Kind.NACK:
                self.take_nack(packet, interface)
            elif packet.kind is Kind.PULL:
                stream.credit += 1
            else:
                self.take_answer(packet)
            interface.offer(stream)
        interface.kick()
        self.release(packet)

    def drop(self, packet: Packet) -> None:
        """Lose a packet."""
        self.tally[c.DROPS_BY_CLASS + packet.drop_class] += 1
        self.release(packet)

    def release(self, packet: Packet) -> None:
        """Remove a packet from the network."""
        message = packet.message
        message.refs -= 1
        if not message.refs and message.done:
            self.settle(message)

    # -------------------------------------------------------------------------------------------------------- links

    def set_loss(self, links: Sequence[int], loss: int) -> None:
        """Let links lose packets from now on, ``loss`` of `dlcp.sim.arithmetic.DRAW_LIMIT`."""
        for number in links:
            self.links[number].loss = loss

    def set_routes(self, routes: Routes) -> None:
        """Let packets go other ways from now on."""
        self.routes = routes
        if self._programs:
            load_switches(self)

    def link_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that each link has carried, int64 (links,)."""
        return np.array([link.sent_bytes for link in self.links])

    def queue_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that wait for each link at a switch now, int64 (links,)."""
        return self._at_ports(lambda port: port.bytes)

    def queue_bytes_max(self) -> NDArray[np.int64]:
        """Return the most bytes that ever waited for each link at a switch, int64 (links,)."""
        return self._at_ports(lambda port: port.bytes_max)

    def _at_ports(self, value: Callable[[Port], int]) -> NDArray[np.int64]:
        values = np.zeros(len(self.links), np.int64)
        for switch in self.switches.values():
            for number, port in switch.ports.items():
                values[number] = value(port)
        return values
