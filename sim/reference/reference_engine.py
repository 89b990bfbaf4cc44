# SPDX-License-Identifier: Apache-2.0
"""The network as SimPy events and plain objects: slow, simple, and what the kernel has to agree with."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from dlcp.sim.arithmetic import MASK64, mix
from dlcp.sim.graph import NODE_RECORD
from dlcp.sim.packet_engine import COUNTER_CELLS, Completion, CompletionKind, EngineCounter, Submission
from dlcp.sim.plan import PROFILE_CELLS, PROTECTED_BLOCK_PACKETS, Discipline, EnginePlan
from dlcp.sim.reference.hosts import HostInterface, Hosts
from dlcp.sim.reference.parts import GraphState, Message, MessageStream, SimulatedPacket
from dlcp.sim.reference.program import P4Pipeline
from dlcp.sim.reference.switch import ReferenceSwitch, SimulatedLink, SwitchPort
from dlcp.sim.rules import first_threshold, may_close
from dlcp.sim.topology import Routes


def drop_classes(message: Message) -> list[int]:
    """Return the drop class of each packet; in each block the packets of class 0 come first."""
    classes = []
    droppable = [drop_class for drop_class in message.profile if drop_class]
    zeros = PROFILE_CELLS - len(droppable)
    for start in range(0, message.packets, PROTECTED_BLOCK_PACKETS):
        count = min(PROTECTED_BLOCK_PACKETS, message.packets - start)
        keep = (zeros * count + PROFILE_CELLS // 2) // PROFILE_CELLS if droppable else count
        classes += [0] * keep
        indices = range(start + keep, start + count)
        classes += [droppable[mix(index, message.salt) % len(droppable)] for index in indices]
    return classes


class ReferenceEngine:
    """Moves the packets of a plan; see `dlcp.sim.packet_engine.PacketEngine`.

    Switches with the discipline ``dlcp`` run the compiled P4 program itself, packet by packet.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.env = simpy.Environment(0)
        self.tally = np.zeros(COUNTER_CELLS, np.int64)
        self.routes = plan.routes
        self._profiles = [row.tolist() for row in plan.profiles]
        self._streams: dict[int, MessageStream] = {}
        self._graphs: dict[int, GraphState] = {}
        self._completions: list[Completion] = []
        self._hosts = Hosts(self)
        self._links = [SimulatedLink(self, number, link) for number, link in enumerate(plan.links)]
        self._interfaces: dict[int, HostInterface] = {}
        self._switches = {node: ReferenceSwitch(self, node) for node in range(plan.hosts, len(plan.topology.names))}
        for link in self._links:
            source = link.rules.source
            if source < plan.hosts:
                self._interfaces[link.number] = HostInterface(self._hosts, link)
            else:
                self._switches[source].ports[link.number] = SwitchPort(self._switches[source], link)
        if plan.switches.discipline == Discipline.DLCP:
            for switch in self._switches.values():
                switch.program = P4Pipeline(self, switch)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the counts, in the cells of `EngineCounter`."""
        events = [switch.program.events() for switch in self._switches.values() if switch.program is not None]
        if events:
            cells = [EngineCounter.BUDGET_SPENT, EngineCounter.SLOT_TAKEN, EngineCounter.MARKS]
            self.tally[cells] = np.sum(events, axis=0)
        return self.tally

    # ---------------------------------------------------------------------------------------------------------- running

    @property
    def now_ps(self) -> int:
        """Return the time of the latest event."""
        return int(self.env.now)

    def run(self, limit_ps: int) -> list[Completion]:
        """Go on to the end of the first instant at which something completes, at most to ``limit_ps``."""
        env, tally = self.env, self.tally
        while (coming := env.peek()) <= limit_ps and not (self._completions and coming > env.now):
            tally[EngineCounter.EVENTS] += 1
            env.step()
        completions, self._completions = self._completions, []
        return completions

    def has_events(self) -> bool:
        """Return whether anything is left to happen."""
        return self.env.peek() != float("inf")

    def at(self, time_ps: int, action: Callable[[], None]) -> None:
        """Let something happen at a time that is not past."""
        event = simpy.Event(self.env)
        event._ok, event._value = True, None
        event.callbacks = [lambda _: action()]
        self.env.schedule(event, delay=time_ps - self.now_ps)

    # ----------------------------------------------------------------------------------------------------------- graphs

    def submit(self, submission: Submission) -> None:
        """Take in a graph. A node that waits for nothing begins after its delay."""
        for serial, source, target, transport, path_hash, reverse_path_hash, _ in submission.new_streams.tolist():
            rules = self.plan.transports[transport]
            threshold = first_threshold(rules)
            self._streams[serial] = MessageStream(
                serial, source, target, rules, path_hash, reverse_path_hash, rules.window, threshold
            )
        count = len(submission.graph)
        graph = GraphState(submission.number, [], count, count)
        self._graphs[submission.number] = graph
        graph.nodes = [self._message(submission, graph, node) for node in range(count)]
        starts, followers = submission.graph.starts.tolist(), submission.graph.followers.tolist()
        for node, message in enumerate(graph.nodes):
            message.followers = [graph.nodes[other] for other in followers[starts[node] : starts[node + 1]]]
        for message in graph.nodes:
            if not message.waits:
                # The clock here is at the latest packet; the graph begins where SimPy's processes are.
                self._begin_after(message, submission.now_ps)

    def _message(self, submission: Submission, graph: GraphState, node: int) -> Message:
        row = submission.graph.nodes[node]
        packets = int(submission.packets[node])
        return Message(
            graph=graph,
            node=node,
            packets=packets,
            last_bytes=int(submission.last_bytes[node]),
            delay_ps=int(row["delay_ps"]),
            order=int(row["order"]),
            waits=int(submission.graph.waits[node]),
            watched=bool(row["watched"]),
            bounded=bool(submission.bounded[node]),
            required=packets - int(submission.allowed[node]),
            budget=int(submission.budget[node]),
            queue=int(submission.queue[node]),
            salt=int(submission.salt[node]) & MASK64,
            job=int(row["job"]),
            step=int(row["step"]),
            number=int(row["message"]),
            sender=int(row["sender"]),
            profile=self._profiles[int(submission.profile[node])],
            transport=self.plan.transports[int(row["transport"])],
            stream=self._streams.get(int(submission.streams[node])),
        )

    def _begin_after(self, message: Message, now_ps: int) -> None:
        self.at(now_ps + message.delay_ps, lambda: self._begin(message))

    def _begin(self, message: Message) -> None:
        message.begin_ps = self.now_ps
        if message.packets:
            self._hosts.begin(message, drop_classes(message) if message.bounded else [])
        else:
            self.complete_node(message)
            self.close_message(message)

    def complete_node(self, message: Message) -> None:
        """Report that a node is done, and let the nodes begin that waited for it."""
        message.done, message.end_ps = True, self.now_ps
        message.missing = message.packets - message.received
        self.tally[EngineCounter.MESSAGES_DONE] += 1
        graph = message.graph
        if message.watched:
            self._completions.append(Completion(CompletionKind.NODE_DONE, graph.number, message.node))
        for other in message.followers:
            other.waits -= 1
            if not other.waits:
                self._begin_after(other, self.now_ps)
        graph.remaining -= 1
        if not graph.remaining:
            self._completions.append(Completion(CompletionKind.GRAPH_DONE, graph.number))

    def close_message(self, message: Message) -> None:
        """Close a message that is done once nothing refers to it any more."""
        if not may_close(message):
            return
        message.closed = True
        message.graph.open -= 1
        if not message.graph.open:
            self._completions.append(Completion(CompletionKind.GRAPH_CLOSED, message.graph.number))

    def records(self, number: int) -> NDArray[Any]:
        """Return the records of a graph that has not been forgotten, `dlcp.sim.graph.NODE_RECORD` (n,)."""
        nodes = self._graphs[number].nodes
        return np.array([(m.begin_ps, m.end_ps, m.packets, m.missing, m.sent) for m in nodes], NODE_RECORD)

    def resize(self, number: int, nodes: NDArray[np.int64], packets: NDArray[np.int32]) -> None:
        """Let messages of a graph that have not begun have so many packets: 1 to as many as they had at first."""
        for node, count in zip(nodes.tolist(), packets.tolist(), strict=True):
            message = self._graphs[number].nodes[node]
            if message.begin_ps < 0:
                message.required += count - message.packets
                message.packets = count

    def forget(self, number: int) -> None:
        """Free the memory of a closed graph."""
        del self._graphs[number]

    # ---------------------------------------------------------------------------------------------------------- packets

    def interface_at(self, stream: MessageStream, host: int) -> HostInterface:
        """Return the interface by which a host at one end of a stream reaches the other end."""
        forth = host == stream.source
        links = self.routes.links(host, stream.target if forth else stream.source)
        if len(links) == 1:
            return self._interfaces[links[0]]
        path_hash = stream.path_hash if forth else stream.reverse_path_hash
        if self.plan.switches.discipline == Discipline.DLCP:
            pick = path_hash // self.plan.topology.divisors[host]
        else:
            pick = mix(path_hash, int(self.plan.node_salt[host]) & MASK64)
        return self._interfaces[links[pick % len(links)]]

    def arrive(self, node: int, packet: SimulatedPacket) -> None:
        """Deliver a packet at the end of a link."""
        if node >= self.plan.hosts:
            self._switches[node].arrive(packet)
        else:
            self._hosts.receive(packet, self.interface_at(packet.message.flow, node))
            self._release(packet)

    def drop(self, packet: SimulatedPacket) -> None:
        """Lose a packet."""
        self.tally[EngineCounter.DROPS_BY_CLASS + packet.drop_class] += 1
        self._release(packet)

    def _release(self, packet: SimulatedPacket) -> None:
        message = packet.message
        message.refs -= 1
        if not message.refs and message.done:
            self.close_message(message)

    # ------------------------------------------------------------------------------------------------------------ links

    def set_loss(self, links: Sequence[int], loss: int) -> None:
        """Let links lose packets from now on, ``loss`` of `dlcp.sim.arithmetic.DRAW_LIMIT`."""
        for number in links:
            self._links[number].loss = loss

    def set_routes(self, routes: Routes) -> None:
        """Route packets differently from now on."""
        self.routes = routes
        for switch in self._switches.values():
            if switch.program is not None:
                switch.program.populate()

    def link_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that each link has carried, int64 (links,)."""
        return np.array([link.sent_bytes for link in self._links])

    def queue_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that wait for each link at a switch now, int64 (links,)."""
        return self._at_ports(lambda port: port.bytes)

    def queue_bytes_max(self) -> NDArray[np.int64]:
        """Return the most bytes that ever waited for each link at a switch, int64 (links,)."""
        return self._at_ports(lambda port: port.bytes_max)

    def _at_ports(self, value: Callable[[SwitchPort], int]) -> NDArray[np.int64]:
        values = np.zeros(len(self._links), np.int64)
        for switch in self._switches.values():
            for number, port in switch.ports.items():
                values[number] = value(port)
        return values
