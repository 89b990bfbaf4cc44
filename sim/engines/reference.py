# SPDX-License-Identifier: Apache-2.0
"""The reference engine: the network as SimPy events and plain objects. Slow and simple, to check the kernel against.

Its objects have the fields of the kernel's rows, and decisions of hosts that both engines share are in
`dlcp.sim.engines.rules`. Everything else is written a second time here, with lists and references in place of
indices, and must give the same results. Switches with the discipline ``dlcp`` run the compiled P4 program itself,
packet by packet.
"""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from dlcp.sim.arithmetic import DRAW_LIMIT, HOST_ADDRESS, MASK64, PS_PER_US, RATE_SHIFT, draw, mix
from dlcp.sim.engines import rules
from dlcp.sim.engines.network_tables import (
    EVENT_BUDGET_SPENT,
    EVENT_MARKED,
    EVENT_SLOT_TAKEN,
    OWN_KIND,
    PORT_INDEX_WIDTH,
    PROFILE_CELLS,
    PROTECTED_BLOCK_PACKETS,
    ROUTE_MEMBERS_SIZE,
    TRIMMED_BYTES,
    Discipline,
    NetworkTables,
    PacketKind,
    PathChoice,
    TransportRules,
)
from dlcp.sim.engines.packet_engine import (
    COUNTER_CELLS,
    MESSAGE_SIZE,
    ORDINARY_PORT,
    PACKET_OUTCOME,
    PORT_BYTES,
    STREAM_START,
    Completion,
    CompletionKind,
    EngineCounter,
    Submission,
    source_port,
)
from dlcp.sim.graphs.graph import NODE_RECORD, NODE_ROW
from dlcp.sim.network.disciplines import Admission
from dlcp.sim.network.nodes import Routes
from dlcp.sim.rows import GRAPH_ROW, MESSAGE_ROW, PACKET_ROW, PORT_QUEUES, STREAM_ROW, TRANSMISSION_ROW, Row
from dlcp.sim.transports.specs import PULL_QUEUED
from dlcp.switch import DROP_PORT, PROGRAM_PATH, Action, GroupRef, Program, ProgramDef, load_definition, udp_headers
from dlcp.wire import HEADER_BYTES, UDP_PORT_BASE, Flag, Header, PacketType, Queue

# ------------------------------------------------------------------------------------------------ messages and packets


class PacketState(Enum):
    """The sender's view of a packet of a message."""

    UNSENT = "not sent yet"
    IN_FLIGHT = "in flight"
    ACKED = "acknowledged"
    LOST = "to be retransmitted"
    HOLE = "lost, and stays lost unless the receiver needs it"


class GraphState(Row, fields=GRAPH_ROW):
    """A graph: its ``number`` and its ``nodes``."""


class Message(Row, fields=MESSAGE_ROW):
    """A node of a graph.

    Attributes
    ----------
    graph, stream, transport, followers
        The objects themselves; ``stream`` is None for a node that sends nothing.
    drop_class, state, arrived, delivered, trimmed
        Of each packet: its drop class, its state at the sender, whether it has arrived, whether it had when the message
        was done, and whether only its headers have arrived.
    """

    stream: "MessageStream"
    transport: TransportRules

    def __init__(self, **values: Any) -> None:
        super().__init__(begin=-1, end=-1, **values)
        self.followers: list[Message] = []
        self.drop_class: list[int] = []
        self.state: list[PacketState] = []
        self.arrived: list[bool] = []
        self.delivered: list[bool] = []
        self.trimmed: set[int] = set()

    @property
    def given_up(self) -> int:
        """Return of how many packets only the headers have arrived."""
        return len(self.trimmed)

    @property
    def left(self) -> int:
        """Return how many packets have not been acknowledged."""
        return int(self.packets - self.acked)

    def prepare(self) -> None:
        """Assign drop classes to the packets; the upper plane, and in each block those of class 0, come first."""
        self.state, self.arrived = [PacketState.UNSENT] * self.packets, [False] * self.packets
        if not self.bounded:
            return
        droppable = [drop_class for drop_class in self.profile if drop_class]
        for start in range(0, self.packets, PROTECTED_BLOCK_PACKETS):
            count = min(PROTECTED_BLOCK_PACKETS, self.packets - start)
            keep = rules.protected_packets(PROFILE_CELLS - len(droppable), count)
            indices = range(start + keep, start + count)
            self.drop_class += [0] * keep
            self.drop_class += [droppable[mix(index, self.salt & MASK64) % len(droppable)] for index in indices]
        self.drop_class[: self.upper] = [0] * self.upper
        self.protected = self.drop_class.count(0)

    def next_hole(self) -> int:
        """Return the next hole that the receiver lacks, or the number of packets."""
        rest = range(self.next_index, self.packets)
        return next((at for at in rest if self.state[at] is PacketState.HOLE and not self.arrived[at]), self.packets)


class Transmission(Row, fields=TRANSMISSION_ROW):
    """The sender's record of a packet of a message, which may be ``in_flight``."""

    message: Message
    in_flight = False


class SimulatedPacket(Row, fields=PACKET_ROW):
    """A packet in the network.

    Attributes
    ----------
    message, transmission
        The objects themselves; a control packet answers a transmission, or has none.
    back
        Whether it goes to the stream's source.
    frame, carry, enqueued_us, enqueued_depth
        The P4 program's.
    """

    message: Message
    transmission: Transmission
    back = False
    enqueued_us = enqueued_depth = 0


def data_packet(sent: Transmission, retransmission: bool) -> SimulatedPacket:
    """Return the packet of a transmission."""
    message, index = sent.message, sent.index
    stream, transport = message.stream, message.transport
    return SimulatedPacket(
        kind=PacketKind.DATA,
        message=message,
        target=stream.target,
        size=rules.packet_bytes(transport, message, index),
        queue=sent.queue,
        path_hash=int(rules.packet_hash(stream, transport, message, index, sent.number, retransmission)),
        index=index,
        transmission=sent,
        rank=message.left,
        drop_class=message.drop_class[index] if message.bounded and not retransmission else 0,
        ecn=transport.ecn,
        sprayed=transport.sprayed,
        retransmission=retransmission,
        credit=rules.wanted_credit(stream, transport),
    )


def control_packet(message: Message, kind: PacketKind, *, back: bool, **more: Any) -> SimulatedPacket:
    """Return a new control packet of a message's stream, to its target or ``back`` to its source."""
    message.refs += 1
    stream, transport = message.stream, message.transport
    fields = {"rank": -1, **more, "size": transport.ack_bytes, "queue": transport.control_queue, "ecn": transport.ecn}
    target, path_hash = (stream.source, stream.reverse_path_hash) if back else (stream.target, stream.path_hash)
    return SimulatedPacket(kind=kind, message=message, back=back, target=target, path_hash=path_hash, **fields)


# --------------------------------------------------------------------------------------------------- links and switches


def drawn(owner: "LinkEnd | ReferenceSwitch") -> int:
    """Return 31 random bits, and advance the owner's generator."""
    owner.random, value = draw(owner.random)
    return value


def trim(engine: "ReferenceEngine", packet: SimulatedPacket) -> None:
    """Remove a packet's payload."""
    packet.trimmed, packet.size = True, TRIMMED_BYTES
    engine.count(EngineCounter.TRIMS)


class LinkEnd:
    """The end of a link that sends: one packet at a time, which the link delivers after a delay or loses."""

    def __init__(self, engine: "ReferenceEngine", number: int) -> None:
        self.engine, self.number, self.link = engine, number, engine.plan.links[number]
        self.loss, self.random = self.link.loss, self.link.random & MASK64
        self.busy_ps = self.sent_bytes = self.bytes = self.bytes_max = 0
        self.pending = False

    def send(self, packet: SimulatedPacket) -> None:
        """Send a packet; the link has to be free."""
        engine, link = self.engine, self.link
        self.busy_ps = engine.now_ps + (packet.size * link.kibibyte_ps >> RATE_SHIFT)
        self.sent_bytes += packet.size
        data = packet.kind is PacketKind.DATA
        engine.count(EngineCounter.HOPS_DATA if data else EngineCounter.HOPS_CONTROL)
        if self.loss and drawn(self) < self.loss:
            engine.drop(packet, EngineCounter.DROPS_LINK)
        else:
            engine.at(self.busy_ps + link.delay_ps, engine.arrive, link.target, packet)

    def await_link(self) -> None:
        """Schedule `free` for when the link is free, unless that is scheduled."""
        if not self.pending:
            self.pending = True
            self.engine.at(self.busy_ps, self.free)

    def free(self) -> None:
        """Send the next packet, now that the link is free."""
        raise NotImplementedError


class ReferenceSwitch:
    """A switch: the state that its ports share. With the discipline ``dlcp`` it runs the P4 program."""

    def __init__(self, engine: "ReferenceEngine", node: int) -> None:
        self.engine, self.node, self.rules = engine, node, engine.plan.switches
        self.random = int(engine.plan.node_random[node]) & MASK64
        self.used_bytes = self.turn = 0
        self.ports: dict[int, SwitchPort] = {}
        self.program: P4Pipeline | None = None

    def arrive(self, packet: SimulatedPacket) -> None:
        """Choose a port for a packet, and queue it there."""
        links = self.engine.routes.links(self.node, packet.target)
        if not links:
            self.engine.drop(packet, EngineCounter.DROPS_ROUTE)
            return
        link = links[self._choose(links, packet)]
        if self.program is not None:
            link = self.program.ingress(packet, link)
        self.ports[link].enqueue(packet)

    def _choose(self, links: list[int], packet: SimulatedPacket) -> int:
        count, choice = len(links), self.rules.path_choice
        if count == 1:
            return 0
        if not packet.sprayed or choice == PathChoice.HASH:
            # Consecutive numbers would take the ports in turn, which is so only in the P4 program.
            twice = packet.sprayed and self.rules.discipline != Discipline.DLCP
            return self.engine.hashed(self.node, packet.path_hash, twice=twice) % count
        if choice == PathChoice.ROUND_ROBIN:
            self.turn += 1
            return (self.turn - 1) % count
        first = drawn(self) % count
        if choice == PathChoice.RANDOM:
            return first
        positions = [(first + step) % count for step in range(count)]
        return min(positions, key=lambda position: self.ports[links[position]].bytes)


class SwitchPort(LinkEnd):
    """A port of a switch."""

    def __init__(self, engine: "ReferenceEngine", number: int) -> None:
        super().__init__(engine, number)
        self.switch = engine.switches[self.link.source]
        self.switch.ports[number], self.rules = self, self.switch.rules
        self.queues: list[deque[SimulatedPacket]] = [deque() for _ in range(PORT_QUEUES)]
        self.queue_bytes = [0] * PORT_QUEUES

    def enqueue(self, packet: SimulatedPacket) -> None:
        """Send, queue or drop a packet. A full pFabric queue may drop another packet instead."""
        now, program = self.engine.now_ps, self.switch.program
        if program is not None and program.refused:
            self.engine.drop(packet, EngineCounter.DROPS_POLICY)
            return
        if not self.pending and self.busy_ps <= now:
            if program is not None:
                program.egress(packet, self.number, 0)
            self.send(packet)
            return
        queue = self._queue_of(packet)
        victim = None
        waiting, used = len(self.queues[queue]), self.switch.used_bytes
        if rules.is_full(self.rules, waiting, self.queue_bytes[queue], self.bytes, used, packet.size):
            victim = self._least_urgent(packet) if self.rules.discipline == Discipline.PFABRIC else packet
            if victim is packet:
                self.engine.drop(packet, EngineCounter.DROPS_TAIL)
                return
            self._take(0, victim)
        if self._drops_early(packet, queue):
            self.engine.drop(packet, EngineCounter.DROPS_EARLY)
            return
        packet.enqueued_us, packet.enqueued_depth = now // PS_PER_US, len(self.queues[queue])
        self._put(queue, packet)
        self.await_link()
        if victim is not None:
            self.engine.drop(victim, EngineCounter.DROPS_TAIL)

    def _queue_of(self, packet: SimulatedPacket) -> int:
        discipline = self.rules.discipline
        if discipline in (Discipline.PRIORITY, Discipline.DLCP) or discipline >= OWN_KIND:
            return packet.queue
        if discipline != Discipline.TRIM:
            return 0
        if packet.kind is PacketKind.DATA and not packet.trimmed:
            if len(self.queues[0]) < self.rules.trim_packets:
                return 0
            if self.rules.trims_either and drawn(self) & 1 and self.queues[0][-1].size >= packet.size:
                last = self.queues[0][-1]
                self._take(0, last)
                trim(self.engine, last)
                # The header takes less room than the packet had.
                self._put(Queue.CONTROL, last)
                return 0
            trim(self.engine, packet)
        return Queue.CONTROL

    def _drops_early(self, packet: SimulatedPacket, queue: int) -> bool:
        limits, waiting = self.rules, len(self.queues[queue])
        if limits.discipline >= OWN_KIND:
            chance = drawn(self) / DRAW_LIMIT
            levels = waiting, self.queue_bytes[queue], self.bytes
            verdict = rules.own_admission(limits.discipline, packet, limits.own, *levels, chance)
            if verdict == Admission.MARK and packet.ecn:
                self._mark(packet)
            return bool(verdict == Admission.DROP)
        if limits.discipline == Discipline.TRIM or not self._is_congested(waiting):
            return False
        if packet.ecn:
            self._mark(packet)
            return False
        return bool(limits.drop_incapable) and packet.kind is PacketKind.DATA

    def _is_congested(self, waiting: int) -> bool:
        rules = self.rules
        if waiting < rules.ecn_min or waiting >= rules.ecn_max:
            return waiting >= rules.ecn_max
        share = (waiting - rules.ecn_min) * rules.ecn_probability
        return drawn(self) * (rules.ecn_max - rules.ecn_min) < share

    def _mark(self, packet: SimulatedPacket) -> None:
        packet.ecn = 3
        self.engine.count(EngineCounter.MARKS)

    def _least_urgent(self, arriving: SimulatedPacket) -> SimulatedPacket:
        # Ties go to the arriving packet, then to the last one in the queue.
        return max([arriving, *reversed(self.queues[0])], key=lambda packet: int(packet.rank))

    def _put(self, queue: int, packet: SimulatedPacket) -> None:
        self.queues[queue].append(packet)
        self.queue_bytes[queue] += packet.size
        self.bytes += packet.size
        self.bytes_max = max(self.bytes_max, self.bytes)
        self.switch.used_bytes += packet.size

    def _take(self, queue: int, packet: SimulatedPacket) -> None:
        self.queues[queue].remove(packet)
        self.queue_bytes[queue] -= packet.size
        self.bytes -= packet.size
        self.switch.used_bytes -= packet.size

    def free(self) -> None:
        """Send the next packet, now that the link is free."""
        self.pending = False
        if self.rules.discipline == Discipline.PFABRIC:
            queue = 0
            best = min(self.queues[0], key=lambda packet: packet.rank)
            packet = best
            if best.kind is PacketKind.DATA:
                same = (other for other in self.queues[0] if other.kind is PacketKind.DATA)
                packet = next(other for other in same if other.message is best.message)
        else:
            queue = max(number for number, waiting in enumerate(self.queues) if waiting)
            packet = self.queues[queue][0]
        self._take(queue, packet)
        if self.switch.program is not None:
            self.switch.program.egress(packet, self.number, len(self.queues[queue]))
        trims = self.rules.discipline == Discipline.TRIM
        if trims and packet.ecn and queue == 0 and self._is_congested(len(self.queues[0])):
            self._mark(packet)
        self.send(packet)
        if any(self.queues):
            self.await_link()


# ------------------------------------------------------------------------------------------------------- the P4 program


_PORTS_MAX = (1 << PORT_INDEX_WIDTH) - 1
_PORT_ADDRESS = 0x0B000000
"""``_PORT_ADDRESS + n`` is a destination with port n as its only next hop."""
_EVENTS = 8
"""Number of event types in each counter array; the event is the low bits of the index."""
_MAC = "00:00:00:00:00:00"


def chooses_paths(plan: NetworkTables) -> bool:
    """Return whether switches choose paths as the program does: by hash, and DLCP's packets one by one."""
    dlcp = [transport for transport in plan.transports if transport.is_dlcp]
    return plan.switches.path_choice == PathChoice.HASH and all(transport.sprayed for transport in dlcp)


@cache
def _definition() -> ProgramDef:
    return load_definition(PROGRAM_PATH)


class P4Pipeline:
    """A switch's program, with the entries that a controller would write.

    If the simulator chooses paths in a way that the program does not support, it puts the address of the chosen port
    into each packet. Only the program's routes depend on the address.
    """

    def __init__(self, engine: "ReferenceEngine", switch: "ReferenceSwitch") -> None:
        if len(switch.ports) > _PORTS_MAX:
            raise ValueError(
                f"{engine.plan.topology.names[switch.node]} has {len(switch.ports)} ports; the P4 program, which the "
                f"reference runs, supports {_PORTS_MAX}: use the kernel"
            )
        self._engine, self._switch = engine, switch
        self._program = Program(_definition())
        self._port_of = {link: port for port, link in enumerate(switch.ports, start=1)}
        self._link_of = {port: link for link, port in self._port_of.items()}
        self._chooses = chooses_paths(engine.plan)
        self.refused = False
        self._trimming: set[int] = set()
        """Jobs whose packets the program trims; a job has one transport."""
        self.populate()

    def populate(self) -> None:
        """Write all entries."""
        program, rules = self._program, self._switch.rules
        program.clear_entries()
        self._trimming.clear()
        tables = program.tables
        tables["port_trust"].insert({"ig_port": 0}, Action("trust"))
        for queue in range(PORT_QUEUES):
            for drop_class in range(1, 8):
                limit = Action("drop_above", {"depth": rules.drop_above[drop_class]})
                tables["drop_threshold"].insert({"queue": queue, "drop_class": drop_class}, limit)
            if queue != Queue.CONTROL:
                tables["ecn_threshold"].insert({"queue": queue}, Action("mark_above", {"depth": rules.mark_above}))
        destinations: dict[int, tuple[int, ...]]
        destinations = {_PORT_ADDRESS + port: (link,) for port, link in self._link_of.items()}
        if self._chooses:
            routes, hosts = self._engine.routes, range(self._engine.plan.hosts)
            destinations = {HOST_ADDRESS + host: tuple(routes.links(self._switch.node, host)) for host in hosts}
        profile = program.profiles["route_selector"]
        groups: dict[tuple[int, ...], int] = {}
        members = 0
        for destination, links in destinations.items():
            if not links:
                continue
            if links not in groups:
                # The program chooses a member by the remainder of the hash. To choose by the quotient, each next hop is
                # repeated: as often as the switch before, which chose by the remainder, has choices.
                repeat = self._engine.plan.topology.divisors[self._switch.node] if len(links) > 1 else 1
                numbers = range(members + 1, members + 1 + len(links) * repeat)
                members += len(numbers)
                if members > ROUTE_MEMBERS_SIZE:
                    raise ValueError(f"{self._switch.node}: more than {ROUTE_MEMBERS_SIZE} next hops; use the kernel")
                for position, number in enumerate(numbers):
                    port = self._port_of[links[position // repeat]]
                    profile.add_member(number, Action("to_next_hop", {"port": port, "mac": 1}))
                groups[links] = len(groups) + 1
                profile.add_group(groups[links], list(numbers))
            tables["ipv4_route"].insert({"ipv4_dst": (destination, 32)}, GroupRef(groups[links]))

    def ingress(self, packet: SimulatedPacket, link: int) -> int:
        """Return the link that the program sends a packet to, and set ``refused`` if it drops the packet.

        ``link`` is the simulator's choice. It holds if the program does not choose paths.
        """
        packet.frame = frame_of(packet, None if self._chooses else _PORT_ADDRESS + self._port_of[link])
        job, trims = packet.message.job & 0xFFFF, packet.message.transport.trimming
        if trims and job not in self._trimming:
            self._trimming.add(job)
            self._program.tables["trimming"].insert({"job": job}, Action("trim"))
        now_us = self._engine.now_ps // PS_PER_US
        port, priority, packet.carry = self._program.ingress(packet.frame, 0, now_us)
        self.refused = port == DROP_PORT
        if self.refused:
            return link
        if trims and priority == Queue.CONTROL != packet.queue:
            trim(self._engine, packet)
            # What is left is a control packet.
            packet.queue, packet.drop_class = priority, 0
            packet.sprayed, packet.path_hash = False, packet.message.stream.path_hash
        if priority != packet.queue:
            raise AssertionError(f"the P4 program puts {packet} into queue {priority}")
        return self._link_of[port]

    def egress(self, packet: SimulatedPacket, link: int, depth: int) -> None:
        """Run the program's egress on a packet that leaves; it may set the ECN mark."""
        now_us = self._engine.now_ps // PS_PER_US
        waited_us = now_us - packet.enqueued_us
        port, depth_then = self._port_of[link], packet.enqueued_depth
        self._program.egress(packet.frame, packet.carry, port, packet.enqueued_us, waited_us, depth_then, depth, now_us)
        packet.ecn = packet.frame[15] & 3

    def events(self) -> tuple[int, int, int]:
        """Return how often a budget was spent, a slot was taken, and a packet was marked."""
        snapshot = self._program.snapshot().counters
        ingress = next(cells for name, cells in snapshot.items() if name.endswith("ingress_events"))[:, 0]
        egress = next(cells for name, cells in snapshot.items() if name.endswith("egress_events"))[:, 0]
        return (
            int(ingress[EVENT_BUDGET_SPENT::_EVENTS].sum()),
            int(ingress[EVENT_SLOT_TAKEN::_EVENTS].sum()),
            int(egress[EVENT_MARKED::_EVENTS].sum()),
        )


def frame_of(packet: SimulatedPacket, destination: int | None = None) -> bytearray:
    """Return a packet's headers as bytes, to another address if one is given. The program reads no payload."""
    message = packet.message
    stream = message.stream
    dlcp = message.transport.is_dlcp
    source, target = (stream.target, stream.source) if packet.back else (stream.source, stream.target)
    destination = HOST_ADDRESS + target if destination is None else destination
    header = Header(
        type=PacketType.DATA if packet.kind is PacketKind.DATA else PacketType.ACK,
        flags=Flag.RETRANSMISSION * packet.retransmission | Flag.TRIMMED * packet.trimmed,
        queue=packet.queue,
        drop_class=packet.drop_class,
        layer=0,
        job=message.job & 0xFFFF,
        budget=message.budget,
        step=message.step & 0xFFFFFFFF,
        message=message.message & 0xFFFF,
        sender=message.sender & 0xFFFF,
        index=packet.index,
        count=message.packets,
        token=0,
    )
    ends = [socket.inet_ntoa(address.to_bytes(4, "big")) for address in (HOST_ADDRESS + source, destination)]
    port, to_port = int(source_port(np.int64(stream.serial))), UDP_PORT_BASE if dlcp else ORDINARY_PORT
    headers = udp_headers(_MAC, _MAC, ends[0], ends[1], port, to_port, packet.ecn, HEADER_BYTES)
    return bytearray(headers + header.encode())


# -------------------------------------------------------------------------------------------------------------- senders


class MessageStream(Row, fields=STREAM_ROW):
    """A stream of messages, as its sender sees it.

    Attributes
    ----------
    messages
        Messages with unsent packets.
    lost
        Packets to retransmit, first come first served.
    sent
        Packets in flight, by queue. A dict keeps the order of sending, and finds a packet in constant time.
    tail_of
        The packet that a tail probe repeats: its message and index.
    """

    tail_probing: int

    def __init__(self, engine: "ReferenceEngine", transport: TransportRules, **start: Any) -> None:
        super().__init__(window=transport.initial_window_packets, **start)
        self.threshold = float(transport.max_window_packets) if transport.slow_start else 0.0
        self.alpha, self.epoch, self.timer_at = 1.0, -1, -1
        self.engine, self.transport = engine, transport
        self.messages: deque[Message] = deque()
        self.lost: deque[Transmission] = deque()
        self.sent: list[dict[Transmission, None]] = [{} for _ in range(PORT_QUEUES)]
        self.tail_of: tuple[Message, int] | None = None

    @property
    def interface(self) -> "HostInterface":
        """Return the interface by which it sends, which depends on the routes."""
        return self.engine.interface_at(self, self.source)

    @property
    def has_work(self) -> bool:
        """Return whether its lists are not empty. Their packets may turn out not to need sending."""
        return bool(self.lost or self.messages)

    def may_send(self) -> bool:
        """Return whether its window is open and its lists are not empty."""
        return self.has_work and bool(rules.window_is_open(self, self.transport))

    def awaits_reply(self) -> bool:
        """Return whether it waits for a PULL, or for a reply to a probe, if nothing is in flight."""
        return self.has_work and bool(rules.needs_reply(self, self.transport))

    def next_queue(self) -> int:
        """Return the queue of the packet at the head of its lists."""
        message = self.lost[0].message if self.lost else self.messages[0]
        return rules.queue_of(self, self.transport, message, self.lost[0].index if self.lost else message.next_index)

    def begin(self, message: Message) -> None:
        """Begin a message."""
        message.prepare()
        rules.on_begin(self, self.transport, message)
        self.enqueue(message)
        self.interface.offer(self)
        self.interface.kick()

    def enqueue(self, message: Message) -> None:
        """Insert a message into the list by order, but never before one that is being sent."""
        message.listed = True
        waiting = self.messages
        position = len(waiting)
        while position and waiting[position - 1].order > message.order and (position > 1 or not waiting[0].next_index):
            position -= 1
        waiting.insert(position, message)

    def next_packet(self, interface: "HostInterface") -> SimulatedPacket | None:
        """Return the next packet and put it in flight; None also if a probe of a receiver has to go first.

        Parameters
        ----------
        interface
            Where the stream is listed; no control packet may be waiting there.
        """
        if not self.may_send():
            return None
        while self.lost:
            found = self.lost.popleft()
            message = found.message
            message.retransmits -= 1
            lost = message.state[found.index] is PacketState.LOST
            if lost and not message.satisfied:
                return self._transmit(found, retransmission=True)
            self.repairing -= 1
            rules.add_backlog(self, self.transport, -1)
            if lost:
                message.state[found.index] = PacketState.HOLE
                message.holes += 1
            # It was acknowledged late, or the receiver needs no more. It may have been the last to delay a probe.
            self._probe_receiver(message, interface)
            self.engine.close_message(message)
            if interface.control:
                return None
        while self.messages:
            message = self.messages[0]
            index = message.packets
            if not message.satisfied:
                index = message.next_index
                if message.filling_holes:
                    index = message.next_index = message.next_hole()
            sends = index < message.packets
            message.next_index += sends
            message.holes -= sends and message.filling_holes
            if not sends or (not message.filling_holes and message.next_index == message.packets):
                self.messages.popleft()
                message.listed = False
            if sends:
                return self._transmit(Transmission(message=message, index=index), bool(message.filling_holes))
            self.engine.close_message(message)
        return None

    def _transmit(self, sent: Transmission, retransmission: bool) -> SimulatedPacket:
        message, now = sent.message, self.engine.now_ps
        sent.queue = rules.queue_of(self, message.transport, message, sent.index)
        message.state[sent.index] = PacketState.IN_FLIGHT
        sent.number, sent.sent_at, sent.in_flight = self.number, now, True
        self.sent[sent.queue][sent] = None
        rules.on_send(self, self.transport, message, now)
        self._arm_timer()
        self.engine.count(EngineCounter.SENT)
        self.engine.count(EngineCounter.RETRANSMITTED, retransmission)
        return data_packet(sent, retransmission)

    def _take_from_flight(self, sent: Transmission) -> None:
        del self.sent[sent.queue][sent]
        sent.in_flight = False
        self.in_flight -= 1
        sent.message.in_flight -= 1

    def _declare_lost(self, sent: Transmission, *, trimmed: bool = False) -> None:
        """Declare a packet in flight lost: retransmit it, or make it a hole if the message may do without it."""
        message = sent.message
        self._take_from_flight(sent)
        message.congested = True
        self.engine.count(EngineCounter.DECLARED_LOST)
        if rules.may_stay_lost(message, message.drop_class[sent.index] if message.bounded else 0, trimmed):
            self.repairing -= sent.repeated
            message.state[sent.index] = PacketState.HOLE
            message.holes += 1
        else:
            self._queue_retransmission(sent)

    def _queue_retransmission(self, sent: Transmission) -> None:
        message = sent.message
        message.state[sent.index] = PacketState.LOST
        message.retransmits += 1
        rules.add_backlog(self, self.transport, 1)
        self.repairing += not sent.repeated
        self.lost.append(Transmission(message=message, index=sent.index, repeated=True))

    def _lose(self, sent: Transmission) -> None:
        self._declare_lost(sent)
        self._probe_receiver(sent.message, self.interface)
        self.engine.close_message(sent.message)

    # ----------------------------------------------------------------------------------------------------------- timers

    def _arm_timer(self) -> None:
        """Ensure that an event is scheduled at the earliest timer."""
        due = min(self.deadline, self.tail_due)
        if self.timer_at < 0 or due < self.timer_at:
            self.timer_at = due
            self.engine.at(due, self._on_timer)

    def _restart_timers(self) -> None:
        rules.restart_timers(self, self.transport, self.engine.now_ps)
        self._arm_timer()

    def _on_timer(self) -> None:
        """Handle the timers that are due. A replaced event does nothing."""
        now = self.engine.now_ps
        if now == self.timer_at:
            self.timer_at = -1
            if self.in_flight or self.awaits_reply():
                if now >= self.deadline:
                    self._time_out()
                else:
                    if now >= self.tail_due:
                        self._probe_tail()
                    self._arm_timer()
                self.interface.offer(self)
        self.interface.kick()

    def _time_out(self) -> None:
        """Declare all packets in flight lost."""
        self.engine.count(EngineCounter.TIMEOUTS)
        rules.on_timeout(self, self.transport)
        for in_flight in self.sent:
            for sent in list(in_flight):
                self._lose(sent)
        if self.probe_mode and self.awaits_reply():
            # A pFabric flow's probe has the priority of its data.
            message = self.lost[0].message if self.lost else self.messages[0]
            self._probe(message, self.interface, rank=message.left)
            self._restart_timers()

    def _probe_tail(self) -> None:
        """Send a tail probe: allow one more packet, unless the stream has one ready at its interface anyway."""
        if self.ready:
            rules.restart_tail_timer(self, self.transport, self.engine.now_ps)
            return
        self.engine.count(EngineCounter.TAIL_PROBES)
        self.tail_of = None
        rules.begin_tail_probe(self, self.transport, self.engine.now_ps)
        if not self.has_work:
            latest = max((sent for by_queue in self.sent for sent in by_queue), key=lambda sent: int(sent.number))
            self.tail_of = (latest.message, latest.index)
            self._take_from_flight(latest)
            self._queue_retransmission(latest)

    # ---------------------------------------------------------------------------------------------------------- answers

    def _probe(self, message: Message, interface: "HostInterface", **fields: Any) -> None:
        self.engine.count(EngineCounter.PROBES)
        interface.control.append(control_packet(message, PacketKind.PROBE, back=False, **fields))

    def _probe_receiver(self, message: Message, interface: "HostInterface") -> None:
        """Ask a receiver whether it needs the holes, once every packet is sent and answered."""
        if not rules.may_probe(message):
            return
        rules.on_probe(self, self.transport, message, self.engine.now_ps)
        self._probe(message, interface)
        if not message.probe_timer:
            message.probe_timer = True
            message.refs += 1
            self.engine.at(message.probe_at, self._on_probe_timer, message)

    def _on_probe_timer(self, message: Message) -> None:
        """Probe again, unless the message is complete."""
        if message.satisfied or not message.left:
            message.probe_timer = False
            message.refs -= 1
            self.engine.close_message(message)
        else:
            if self.engine.now_ps >= message.probe_at:
                rules.on_probe_timeout(self, self.transport, message, self.engine.now_ps)
                self._probe_receiver(message, self.interface)
            self.engine.at(message.probe_at, self._on_probe_timer, message)
        self.interface.kick()

    def receive(self, packet: SimulatedPacket) -> None:
        """Handle an answer from the receiver."""
        message = packet.message
        if packet.kind is PacketKind.ACK:
            self._receive_ack(packet)
        elif packet.kind is PacketKind.NACK:
            self._receive_nack(packet)
        elif packet.kind is PacketKind.PULL:
            rules.on_pull(self, self.transport, packet.credit)
        elif rules.on_probe_reply(self, self.transport, message, packet.satisfied):
            self.enqueue(message)
        self.interface.offer(self)

    def _receive_nack(self, packet: SimulatedPacket) -> None:
        """Handle a NACK: a packet arrived without its payload."""
        now, sent = self.engine.now_ps, packet.transmission
        if packet.satisfied:
            packet.message.satisfied = True
        if sent.in_flight:
            self.backoff = 0
            rules.on_nack(self, self.transport, sent.number, now - sent.sent_at, now)
            self._restart_timers()
            self._declare_lost(sent, trimmed=True)
            self._probe_receiver(packet.message, self.interface)

    def _receive_ack(self, packet: SimulatedPacket) -> None:
        """Handle an ACK; it may show that earlier packets are lost."""
        message, sent, t, now = packet.message, packet.transmission, self.transport, self.engine.now_ps
        if packet.satisfied:
            message.satisfied = True
        state = message.state[packet.index]
        rules.leave_probe_mode(self)
        if sent.in_flight:
            limited = rules.is_limited(self)
            self._take_from_flight(sent)
            self.repairing -= sent.repeated
            message.state[packet.index] = PacketState.ACKED
            message.acked += 1
            rtt_ps = now - sent.sent_at
            rules.measure_rtt(self, t, rtt_ps)
            self.backoff = 0
            message.congested |= packet.ecn_echo
            rules.on_ack(self, t, packet.ecn_echo, rtt_ps, sent.number, now, limited)
            before = -1
            if self.tail_probing and sent.number >= self.tail_number:
                # The tail probe has been answered: every unacknowledged packet sent before it is lost.
                before = self.tail_number
                self.tail_probing = False
                if sent.number == before and self.tail_of is not None:
                    rules.on_loss(self, t, sent.number, now)  # the repeated packet was lost: the probe replaced it
            in_flight = self.sent[sent.queue]
            while in_flight:
                first = next(iter(in_flight))
                if first.number + t.reorder_packets > sent.number and first.number >= before:
                    break
                rules.on_loss(self, t, first.number, now)
                self._lose(first)
            self._restart_timers()
        else:
            self.engine.count(EngineCounter.LATE_ACKS)
            if state in (PacketState.LOST, PacketState.HOLE):
                message.state[packet.index] = PacketState.ACKED
                message.acked += 1
                message.holes -= state is PacketState.HOLE
            if self.tail_probing and self.tail_of == (message, packet.index):
                self.tail_of = None  # the repeated packet was not lost
        if message.bounded:
            self._probe_receiver(message, self.interface)


# --------------------------------------------------------------------------------------------- interfaces and receivers


class HostInterface(LinkEnd):
    """A host's end of a link: control packets first, then streams in turn, the most urgent queue first."""

    def __init__(self, engine: "ReferenceEngine", number: int) -> None:
        super().__init__(engine, number)
        self.discipline = engine.plan.switches.discipline
        self.control: deque[SimulatedPacket] = deque()
        self.ready: list[deque[MessageStream]] = [deque() for _ in range(PORT_QUEUES)]
        self.pulls: tuple[deque[SimulatedPacket], deque[SimulatedPacket]] = deque(), deque()
        self.pulling = False
        self.pull_next_ps = 0

    def offer(self, stream: MessageStream) -> None:
        """List a stream as ready, if it may send and is not listed yet."""
        if not stream.ready and stream.may_send():
            stream.ready = True
            self.ready[stream.next_queue()].append(stream)

    def kick(self) -> None:
        """Send the next packet, or schedule that for when the link is free."""
        if self.pending or not (self.control or any(self.ready)):
            return
        if self.busy_ps <= self.engine.now_ps:
            packet = self._next_packet()
            if packet is None:
                return
            self.send(packet)
        if self.control or any(self.ready):
            self.await_link()

    def free(self) -> None:
        """Send the next packet, now that the link is free."""
        self.pending = False
        self.kick()

    def _next_packet(self) -> SimulatedPacket | None:
        while not self.control and any(self.ready):
            waiting = next(streams for streams in reversed(self.ready) if streams)
            stream = waiting[0]
            if self.discipline == Discipline.PFABRIC and stream.transport.smallest_first:
                # The message with the fewest packets left goes first.
                stream = min(waiting, key=lambda stream: stream.messages[0].left if stream.messages else 0)
            waiting.remove(stream)
            stream.ready = False
            packet = stream.next_packet(self)
            self.offer(stream)
            if packet is not None:
                return packet
        return self.control.popleft() if self.control else None

    # -------------------------------------------------------------------------------------------------------- receiving

    def receive(self, packet: SimulatedPacket) -> None:
        """Handle a packet that has arrived at the end of its stream."""
        if packet.kind is PacketKind.DATA:
            self._receive_data(packet)
        elif packet.kind is PacketKind.PROBE:
            self._receive_probe(packet)
        else:
            packet.message.stream.receive(packet)
        self.kick()

    def _receive_data(self, packet: SimulatedPacket) -> None:
        """Receive a packet at its target, and acknowledge it."""
        message = packet.message
        if packet.trimmed:
            message.trims += 1
            if not message.arrived[packet.index]:
                message.trimmed.add(packet.index)
        elif message.arrived[packet.index]:
            self.engine.count(EngineCounter.DUPLICATES)
        else:
            message.arrived[packet.index] = True
            message.trimmed.discard(packet.index)
            message.received += 1
            self.engine.count(EngineCounter.ARRIVED)
            if message.bounded and not message.drop_class[packet.index]:
                message.protected -= 1
        if not message.done and rules.is_complete(message.transport, message):
            self.engine.complete_node(message)
        kind = PacketKind.NACK if packet.trimmed else PacketKind.ACK
        answered = {"index": packet.index, "transmission": packet.transmission, "ecn_echo": packet.ecn == 3}
        satisfied = message.done and message.missing > 0
        self.control.append(control_packet(message, kind, back=True, satisfied=satisfied, **answered))
        if rules.may_pull(message.stream, message.transport, message, packet.credit, packet.trimmed):
            self.pulls[0].append(control_packet(message, PacketKind.PULL, back=True))
            if not self.pulling:
                self.pulling = True
                self.engine.at(max(self.engine.now_ps, self.pull_next_ps), self._send_pull)

    def _receive_probe(self, packet: SimulatedPacket) -> None:
        """Answer a sender's probe: whether the message is complete within its loss bound."""
        message = packet.message
        message.probed = True
        if not message.done and rules.has_enough(message):
            self.engine.complete_node(message)
        self.control.append(control_packet(message, PacketKind.PROBE_REPLY, back=True, satisfied=message.done))

    def _send_pull(self) -> None:
        """Send the first PULL. The next one follows after the serialization time of the requested packets.

        Spare ones wait for all others, and are not sent for messages that are done.
        """
        wanted, spare = self.pulls
        while spare and spare[0].message.done and not wanted:
            message = spare.popleft().message
            message.stream.pulling &= PULL_QUEUED
            self.engine.release(message)
        if wanted or spare:
            is_spare = int(not wanted)
            pull = self.pulls[is_spare].popleft()
            stream, transport = pull.message.stream, pull.message.transport
            credit = rules.give_credit(stream, transport, is_spare)
            pull.credit = stream.granted
            packet_ps = (transport.header_bytes + transport.payload) * self.link.kibibyte_ps >> RATE_SHIFT
            self.pull_next_ps = self.engine.now_ps + rules.credit_ps(stream, transport, credit, packet_ps)
            self.control.append(pull)
            queue = rules.queue_after_pull(stream, transport, is_spare)
            if queue >= 0:
                self.pulls[queue].append(control_packet(pull.message, PacketKind.PULL, back=True))
        self.pulling = bool(wanted or spare)
        if self.pulling:
            self.engine.at(self.pull_next_ps, self._send_pull)
        self.kick()


# ----------------------------------------------------------------------------------------------------------- the engine


class ReferenceEngine:
    """Runs a plan; see `dlcp.sim.engines.packet_engine.PacketEngine`."""

    def __init__(self, plan: NetworkTables) -> None:
        self.plan = plan
        self.env = simpy.Environment(0)
        self.tally = np.zeros(COUNTER_CELLS, np.int64)
        self.routes = plan.routes
        self._profiles = [row.tolist() for row in plan.profiles]
        self._streams: dict[int, MessageStream] = {}
        self._graphs: dict[int, GraphState] = {}
        self._completions: list[Completion] = []
        self.switches = {node: ReferenceSwitch(self, node) for node in range(plan.hosts, len(plan.topology.names))}
        self._ends: list[LinkEnd] = [
            (HostInterface if link.source < plan.hosts else SwitchPort)(self, number)
            for number, link in enumerate(plan.links)
        ]
        self._interfaces = {end.number: end for end in self._ends if isinstance(end, HostInterface)}
        if plan.switches.discipline == Discipline.DLCP:
            for switch in self.switches.values():
                switch.program = P4Pipeline(self, switch)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the counts, indexed by `EngineCounter`."""
        events = [switch.program.events() for switch in self.switches.values() if switch.program is not None]
        if events:
            cells = [EngineCounter.BUDGET_SPENT, EngineCounter.SLOT_TAKEN, EngineCounter.MARKS]
            self.tally[cells] = np.sum(events, axis=0)
        return self.tally

    def count(self, cell: EngineCounter, by: int = 1) -> None:
        """Increase a counter."""
        self.tally[cell] += by

    # ---------------------------------------------------------------------------------------------------------- running

    @property
    def now_ps(self) -> int:
        """Return the time of the latest event."""
        return int(self.env.now)

    def run(self, limit_ps: int) -> list[Completion]:
        """Run to the end of the first instant with a completion, at most to ``limit_ps``."""
        env, tally = self.env, self.tally
        while (coming := env.peek()) <= limit_ps and not (self._completions and coming > env.now):
            tally[EngineCounter.EVENTS] += 1
            env.step()
        completions, self._completions = self._completions, []
        return completions

    def has_events(self) -> bool:
        """Return whether any events are pending."""
        return self.env.peek() != float("inf")

    def at(self, time_ps: int, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action, now or later."""
        event = simpy.Event(self.env)
        event._ok, event._value = True, None
        event.callbacks = [lambda _: action(*arguments)]
        self.env.schedule(event, delay=time_ps - self.now_ps)

    # ----------------------------------------------------------------------------------------------------------- graphs

    def submit(self, submission: Submission) -> None:
        """Start a graph. A node without predecessors begins after its delay."""
        for start in submission.new_streams:
            values = _fields(STREAM_START, start)
            transport = self.plan.transports[values.pop("transport")]
            self._streams[values["serial"]] = MessageStream(self, transport, **values)
        count = len(submission.graph)
        graph = GraphState(number=submission.number, remaining=count, open=count)
        self._graphs[submission.number] = graph
        graph.nodes = [self._message(submission, graph, node) for node in range(count)]
        starts, followers = submission.graph.starts.tolist(), submission.graph.followers.tolist()
        for node, message in enumerate(graph.nodes):
            message.followers = [graph.nodes[other] for other in followers[starts[node] : starts[node + 1]]]
        for message in graph.nodes:
            if not message.waits:
                # This engine's clock is at the latest packet; the graph begins at the time of the SimPy processes.
                self.at(submission.now_ps + message.delay_ps, self._begin, message)

    def _message(self, submission: Submission, graph: GraphState, node: int) -> Message:
        row = submission.graph.nodes[node]
        derived = {name: getattr(submission, name)[node].item() for name in ("bounded", "queue", "salt")}
        return Message(
            **{
                **_fields(NODE_ROW, row),
                **derived,
                **self._size_fields(submission.sizes[node]),
                "graph": graph,
                "node": node,
                "waits": int(submission.graph.waits[node]),
                "transport": self.plan.transports[int(row["transport"])],
                "stream": self._streams.get(int(submission.streams[node])),
            }
        )

    def _size_fields(self, size: np.void) -> dict[str, Any]:
        """Return a message's fields for a `MESSAGE_SIZE` row."""
        fields = _fields(MESSAGE_SIZE, size)
        required = fields["packets"] - fields["allowed"]
        return {**fields, "required": required, "profile": self._profiles[fields["profile"]]}

    def _begin(self, message: Message) -> None:
        message.begin = self.now_ps
        if message.packets:
            message.stream.begin(message)
        else:
            self.complete_node(message)
            self.close_message(message)

    def complete_node(self, message: Message) -> None:
        """Mark a node as done, report it if watched, and start the nodes that have waited for it."""
        message.done, message.end = True, self.now_ps
        message.missing = message.packets - message.received
        message.delivered = message.arrived.copy()
        self.count(EngineCounter.MESSAGES_DONE)
        graph = message.graph
        if message.watched:
            self._completions.append(Completion(CompletionKind.NODE_DONE, graph.number, message.node))
        for other in message.followers:
            other.waits -= 1
            if not other.waits:
                self.at(self.now_ps + other.delay_ps, self._begin, other)
        graph.remaining -= 1
        if not graph.remaining:
            self._completions.append(Completion(CompletionKind.GRAPH_DONE, graph.number))

    def close_message(self, message: Message) -> None:
        """Close a message if it is done and nothing refers to it any more."""
        if not rules.may_close(message):
            return
        message.closed = True
        message.graph.open -= 1
        if not message.graph.open:
            self._completions.append(Completion(CompletionKind.GRAPH_CLOSED, message.graph.number))

    def records(self, number: int) -> NDArray[Any]:
        """Return the records of a graph that has not been forgotten, `dlcp.sim.graphs.graph.NODE_RECORD` (n,)."""
        nodes = self._graphs[number].nodes
        return np.array([(m.begin, m.end, m.packets, m.missing, m.sent, m.congested) for m in nodes], NODE_RECORD)

    def outcomes(self, number: int, nodes: NDArray[np.int64]) -> NDArray[Any]:
        """Return what became of packets; see `dlcp.sim.engines.packet_engine.PacketEngine.outcomes`."""
        messages = [self._graphs[number].nodes[node] for node in nodes.tolist()]
        rows = [
            row
            for message in messages
            for row in zip(message.drop_class or [0] * message.packets, message.delivered, strict=True)
        ]
        return np.array(rows, PACKET_OUTCOME)

    def resize(self, number: int, nodes: NDArray[np.int64], sizes: NDArray[Any]) -> None:
        """Set the sizes of messages that have not begun; see `dlcp.sim.engines.packet_engine.PacketEngine.resize`."""
        for node, size in zip(nodes.tolist(), sizes, strict=True):
            message = self._graphs[number].nodes[node]
            if message.begin < 0:
                vars(message).update(self._size_fields(size))

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
        pick = self.hashed(host, stream.path_hash if forth else stream.reverse_path_hash)
        return self._interfaces[links[pick % len(links)]]

    def hashed(self, node: int, path_hash: int, *, twice: bool = False) -> int:
        """Return the number by which a node chooses among equal paths; the P4 program divides, others hash again."""
        if self.plan.switches.discipline == Discipline.DLCP:
            return path_hash // self.plan.topology.divisors[node]
        salt = int(self.plan.node_salt[node]) & MASK64
        return mix(mix(path_hash, salt) if twice else path_hash, salt)

    def arrive(self, node: int, packet: SimulatedPacket) -> None:
        """Deliver a packet at the end of a link."""
        if node >= self.plan.hosts:
            self.switches[node].arrive(packet)
        else:
            self.interface_at(packet.message.stream, node).receive(packet)
            self.release(packet.message)

    def drop(self, packet: SimulatedPacket, reason: EngineCounter) -> None:
        """Lose a packet."""
        self.count(reason)
        self.tally[EngineCounter.DROPS_BY_CLASS + packet.drop_class] += 1
        self.release(packet.message)

    def release(self, message: Message) -> None:
        """Count a packet of a message less, and close the message if this was the last."""
        message.refs -= 1
        if not message.refs and message.done:
            self.close_message(message)

    # ------------------------------------------------------------------------------------------------------------ links

    def set_loss(self, links: Sequence[int], loss: int) -> None:
        """Set the loss probability of links, in units of 1 / `dlcp.sim.arithmetic.DRAW_LIMIT`."""
        for number in links:
            self._ends[number].loss = loss

    def set_routes(self, routes: Routes) -> None:
        """Replace the routes."""
        self.routes = routes
        for switch in self.switches.values():
            if switch.program is not None:
                switch.program.populate()

    def port_bytes(self) -> NDArray[Any]:
        """Return the bytes at each link, `dlcp.sim.engines.packet_engine.PORT_BYTES` (links,)."""
        names = PORT_BYTES.names or ()
        return np.array([tuple(getattr(end, name) for name in names) for end in self._ends], PORT_BYTES)


def _fields(kind: np.dtype[Any], row: np.void) -> dict[str, Any]:
    """Return the values of a row by column."""
    return dict(zip(kind.names or (), row.item(), strict=True))
