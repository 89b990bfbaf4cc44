# SPDX-License-Identifier: Apache-2.0
"""The reference engine: the network as SimPy events and plain objects. Slow and simple, to check the kernel against.

Decisions of hosts that both engines share are in `dlcp.sim.transports.rules`. Everything else is written a second time
here, with lists and objects in place of the kernel's rows, and must give the same results. Switches with the discipline
``dlcp`` run the compiled P4 program itself, packet by packet. Names are those of `dlcp.sim.engines.kernel`.
"""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from dlcp.sim.engines.arithmetic import DRAW_LIMIT, HOST_ADDRESS, MASK64, PS_PER_US, RATE_SHIFT, draw, mix
from dlcp.sim.engines.packet_engine import (
    COUNTER_CELLS,
    ORDINARY_PORT,
    PACKET_OUTCOME,
    PORT_BYTES,
    Completion,
    CompletionKind,
    EngineCounter,
    Submission,
    source_port,
)
from dlcp.sim.engines.plan import (
    EVENT_BUDGET_SPENT,
    EVENT_MARKED,
    EVENT_SLOT_TAKEN,
    OWN_KIND,
    PORT_INDEX_WIDTH,
    PORT_QUEUES,
    PROFILE_CELLS,
    PROTECTED_BLOCK_PACKETS,
    ROUTE_MEMBERS_SIZE,
    TRIMMED_BYTES,
    Discipline,
    EnginePlan,
    LinkRules,
    Number,
    PacketKind,
    PathChoice,
    TransportKind,
    TransportRules,
)
from dlcp.sim.jobs.graph import NODE_RECORD
from dlcp.sim.limits import FOREVER_PS
from dlcp.sim.network.disciplines import Admission
from dlcp.sim.network.routing import Routes
from dlcp.sim.transports import rules
from dlcp.switch import DROP_PORT, PROGRAM_PATH, Action, GroupRef, Program, ProgramDef, load_definition, udp_headers
from dlcp.wire import HEADER_BYTES, UDP_PORT_BASE, Flag, Header, PacketType, Queue

# ---------------------------------------------------------------------------------------- packets, messages and streams


class PacketState(Enum):
    """The sender's view of a packet of a message."""

    UNSENT = "not sent yet"
    IN_FLIGHT = "in flight"
    ACKED = "acknowledged"
    LOST = "to be retransmitted"
    HOLE = "lost, and stays lost unless the receiver needs it"


@dataclass(slots=True, eq=False)
class GraphState:
    """A graph; ``remaining`` of its nodes are not done, and ``open`` are not closed."""

    number: int
    nodes: list["Message"]
    remaining: int
    open: int


@dataclass(slots=True, eq=False)
class Message:
    """A node of a graph; fields are those of `dlcp.sim.engines.kernel.state.MESSAGE_ROW`."""

    graph: GraphState
    node: int
    packets: int
    last_bytes: int
    upper: int
    delay_ps: int
    order: int
    waits: int
    watched: bool
    bounded: bool
    required: int
    budget: int
    queue: int
    salt: int
    job: int
    step: int
    message: int
    sender: int
    profile: list[int]
    transport: TransportRules
    stream: "MessageStream | None"
    followers: list["Message"] = field(default_factory=list)
    drop_class: list[int] = field(default_factory=list)
    state: list[PacketState] = field(default_factory=list)
    arrived: list[bool] = field(default_factory=list)
    delivered: list[bool] = field(default_factory=list)
    begin_ps: int = -1
    end_ps: int = -1
    next_index: int = 0
    acked: int = 0
    received: int = 0
    protected: int = 0
    in_flight: int = 0
    retransmits: int = 0
    holes: int = 0
    refs: int = 0
    sent: int = 0
    missing: int = 0
    pulls: int = 0
    trims: int = 0
    listed: bool = False
    done: bool = False
    closed: bool = False
    satisfied: bool = False
    congested: bool = False
    probed: bool = False
    probing: bool = False
    filling_holes: bool = False
    probe_timer: bool = False
    probe_at: int = 0
    probe_backoff: int = 0

    @property
    def flow(self) -> "MessageStream":
        """Return the stream of a message that sends something."""
        assert self.stream is not None
        return self.stream

    @property
    def left(self) -> int:
        """Return how many packets have not been acknowledged."""
        return self.packets - self.acked


@dataclass(slots=True, eq=False)
class Transmission:
    """The sender's record of a packet; ``repeated``: the packet was lost before."""

    message: Message
    index: int
    queue: int = 0
    number: int = 0
    sent_ps: int = 0
    in_flight: bool = False
    repeated: bool = False


@dataclass(slots=True, eq=False)
class MessageStream:
    """A stream of messages.

    Attributes
    ----------
    messages
        Messages with unsent packets.
    retransmissions
        Packets to retransmit, first come first served.
    in_flight_by_queue
        Packets in flight. A dict keeps the order of sending, and finds a packet in constant time.
    repairing
        Number of packets that were lost and have not been acknowledged since.
    spare
        Number of packets allowed beyond the window.
    timer_at_ps
        Time of the only valid timer event.
    deadline, tail_due
        When all packets in flight are declared lost, and when the tail is probed.
    tail_probing, tail_number, tail_of
        Whether a tail probe is unanswered, its number, and the packet that it repeats.
    window, threshold and all after ``tail_of``
        As in `dlcp.sim.engines.kernel.state.STREAM_ROW`, for the functions of `dlcp.sim.transports.rules`.
    """

    serial: int
    source: int
    target: int
    transport: TransportRules
    path_hash: int
    reverse_path_hash: int
    window: float
    threshold: float
    messages: deque[Message] = field(default_factory=deque)
    retransmissions: deque[Transmission] = field(default_factory=deque)
    in_flight_by_queue: list[dict[Transmission, None]] = field(default_factory=lambda: [{} for _ in range(PORT_QUEUES)])
    number: int = 0
    in_flight: int = 0
    credit: int = 0
    ready: bool = False
    repairing: int = 0
    spare: int = 0
    timer_at_ps: int | None = None
    deadline: int = 0
    tail_due: int = FOREVER_PS
    tail_probing: bool = False
    tail_number: int = 0
    tail_of: tuple[Message, int] | None = None
    backoff: int = 0
    probe_mode: int = 0
    recover: int = 0
    rtt: int = 0
    rtt_var: int = 0
    rtt_min: int = 0
    alpha: float = 1.0
    acked: int = 0
    marked: int = 0
    round_end: int = 0
    reduced: int = 0
    cut_at: int = 0
    epoch: int = -1
    peak: float = 0.0
    reno: float = 0.0
    acked_at: int = 0
    step_acked: int = 0
    step_packets: int = 0
    mean_delay: float = 0.0
    growth: float = 0.0
    base_rtt: int = 0
    adapt_at: int = 0
    grown_at: int = 0
    arrived: int = 0
    arrived_since: int = 0
    ignoring: int = 0
    undelayed: int = 0
    fast: int = 0
    trimmed: int = 0
    backlog: int = 0
    speculating: int = 0
    pulled: int = 0
    asked: int = 0
    granted: int = 0
    pulling: int = 0

    @property
    def has_work(self) -> bool:
        """Return whether the stream's lists are not empty. Their packets may turn out not to need sending."""
        return bool(self.retransmissions or self.messages)


@dataclass(slots=True, eq=False)
class SimulatedPacket:
    """A packet in the network; the last four fields are the P4 program's."""

    kind: PacketKind
    message: Message
    target: int
    size: int
    queue: int
    path_hash: int
    index: int = 0
    transmission: Transmission | None = None
    rank: int = -1
    drop_class: int = 0
    ecn: int = 0
    sprayed: bool = False
    retransmission: bool = False
    trimmed: bool = False
    satisfied: bool = False
    ecn_echo: bool = False
    credit: int = 0
    back: bool = False
    frame: bytearray = field(default_factory=bytearray)
    carry: tuple[int, ...] = ()
    enqueued_us: int = 0
    enqueued_depth: int = 0


def data_packet(transmission: Transmission, retransmission: bool) -> SimulatedPacket:
    """Return the packet of a transmission."""
    message, index = transmission.message, transmission.index
    stream, transport = message.flow, message.transport
    path_hash = int(rules.packet_hash(stream, transport, message, index, transmission.number, retransmission))
    return SimulatedPacket(
        PacketKind.DATA,
        message,
        stream.target,
        rules.packet_bytes(transport, message, index),
        transmission.queue,
        path_hash,
        index=index,
        transmission=transmission,
        rank=message.left,
        drop_class=message.drop_class[index] if message.bounded and not retransmission else 0,
        ecn=transport.ecn,
        sprayed=transport.sprayed,
        retransmission=retransmission,
        credit=rules.wanted_credit(stream, transport),
    )


def control_packet(message: Message, kind: PacketKind, *, back: bool) -> SimulatedPacket:
    """Return a control packet of a message's stream, to its target or ``back`` to its source."""
    stream, transport = message.flow, message.transport
    return SimulatedPacket(
        kind,
        message,
        stream.source if back else stream.target,
        transport.ack_bytes,
        transport.control_queue,
        stream.reverse_path_hash if back else stream.path_hash,
        ecn=transport.ecn,
        back=back,
    )


# --------------------------------------------------------------------------------------------------- links and switches


class RandomBits:
    """A random generator."""

    def __init__(self, state: int) -> None:
        self._state = state & MASK64

    def draw(self) -> int:
        """Return 31 random bits."""
        self._state, value = draw(self._state)
        return value


class SimulatedLink:
    """One direction of a link: sends one packet at a time, and delivers it after a delay or loses it."""

    def __init__(self, engine: "ReferenceEngine", number: int, rules: LinkRules) -> None:
        self.engine, self.number, self.rules = engine, number, rules
        self.busy_ps = 0
        self.loss = rules.loss
        self.sent_bytes = 0
        self.random = RandomBits(rules.random)

    def send(self, packet: SimulatedPacket) -> None:
        """Send a packet; the link has to be free."""
        engine, rules = self.engine, self.rules
        self.busy_ps = engine.now_ps + (packet.size * rules.kibibyte_ps >> RATE_SHIFT)
        self.sent_bytes += packet.size
        data = packet.kind is PacketKind.DATA
        engine.count(EngineCounter.HOPS_DATA if data else EngineCounter.HOPS_CONTROL)
        if self.loss and self.random.draw() < self.loss:
            engine.drop(packet, EngineCounter.DROPS_LINK)
        else:
            engine.at(self.busy_ps + rules.delay_ps, lambda: engine.arrive(rules.target, packet))


class ReferenceSwitch:
    """A switch: the state that its ports share. With the discipline ``dlcp`` it runs the P4 program."""

    def __init__(self, engine: "ReferenceEngine", node: int) -> None:
        plan = engine.plan
        self.engine, self.node = engine, node
        self.rules = plan.switches
        self.random = RandomBits(int(plan.node_random[node]))
        self.salt = int(plan.node_salt[node]) & MASK64
        self.divisor = plan.topology.divisors[node]
        self.used_bytes = 0
        self.turn = 0
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
        count = len(links)
        if count == 1:
            return 0
        if not packet.sprayed or self.rules.path_choice == PathChoice.HASH:
            if self.rules.discipline == Discipline.DLCP:
                return packet.path_hash // self.divisor % count
            # Numbers in a row would take the ports in turn, which only the P4 program's do.
            value = mix(packet.path_hash, self.salt) if packet.sprayed else packet.path_hash
            return mix(value, self.salt) % count
        if self.rules.path_choice == PathChoice.RANDOM:
            return self.random.draw() % count
        if self.rules.path_choice == PathChoice.ROUND_ROBIN:
            self.turn += 1
            return (self.turn - 1) % count
        first = self.random.draw() % count
        positions = [(first + step) % count for step in range(count)]
        return min(positions, key=lambda position: self.ports[links[position]].bytes)


class SwitchPort:
    """A switch's end of a link."""

    def __init__(self, switch: ReferenceSwitch, link: SimulatedLink) -> None:
        self.switch, self.link, self.engine = switch, link, switch.engine
        self.rules = switch.rules
        self.queues: list[deque[SimulatedPacket]] = [deque() for _ in range(PORT_QUEUES)]
        self.queue_bytes = [0] * PORT_QUEUES
        self.bytes = self.bytes_max = 0
        self.pending = False

    def enqueue(self, packet: SimulatedPacket) -> None:
        """Send, queue or drop a packet. A full pFabric queue may drop another packet instead."""
        now, program = self.engine.now_ps, self.switch.program
        if program is not None and program.refused:
            self.engine.drop(packet, EngineCounter.DROPS_POLICY)
            return
        if not self.pending and self.link.busy_ps <= now:
            if program is not None:
                program.egress(packet, self.link.number, 0)
            self.link.send(packet)
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
        if not self.pending:
            self.pending = True
            self.engine.at(self.link.busy_ps, self.free)
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
            if self.rules.trims_either and self.link.random.draw() & 1 and self.queues[0][-1].size >= packet.size:
                last = self.queues[0][-1]
                self._take(0, last)
                self._trim(last)
                # The header takes less room than the packet had.
                self._put(Queue.CONTROL, last)
                return 0
            self._trim(packet)
        return Queue.CONTROL

    def _trim(self, packet: SimulatedPacket) -> None:
        packet.trimmed, packet.size = True, TRIMMED_BYTES
        self.engine.count(EngineCounter.TRIMS)

    def _drops_early(self, packet: SimulatedPacket, queue: int) -> bool:
        limits, waiting = self.rules, len(self.queues[queue])
        if limits.discipline >= OWN_KIND:
            chance = self.link.random.draw() / DRAW_LIMIT
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
        return self.link.random.draw() * (rules.ecn_max - rules.ecn_min) < share

    def _mark(self, packet: SimulatedPacket) -> None:
        packet.ecn = 3
        self.engine.count(EngineCounter.MARKS)

    def _least_urgent(self, arriving: SimulatedPacket) -> SimulatedPacket:
        # Ties go to the last packet in the queue, and to the arriving packet before any of these.
        worst = arriving
        for packet in self.queues[0]:
            if packet.rank > worst.rank or (packet.rank == worst.rank and worst is not arriving):
                worst = packet
        return worst

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
            self.switch.program.egress(packet, self.link.number, len(self.queues[queue]))
        trims = self.rules.discipline == Discipline.TRIM
        if trims and packet.ecn and queue == 0 and self._is_congested(len(self.queues[0])):
            self._mark(packet)
        self.link.send(packet)
        if any(self.queues):
            self.pending = True
            self.engine.at(self.link.busy_ps, self.free)


# ------------------------------------------------------------------------------------------------------- the P4 program


_PORTS_MAX = (1 << PORT_INDEX_WIDTH) - 1
_PORT_ADDRESS = 0x0B000000
"""``_PORT_ADDRESS + n`` is a destination with port n as its only next hop."""
_EVENTS = 8
"""Number of event types in each counter array; the event is the low bits of the index."""
_MAC = "00:00:00:00:00:00"


def chooses_paths(plan: EnginePlan) -> bool:
    """Return whether switches choose paths as the program does: by hash, and DLCP's packets one by one."""
    dlcp = [transport for transport in plan.transports if transport.kind == TransportKind.DLCP]
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
        self.populate()

    def populate(self) -> None:
        """Write all entries."""
        program, rules = self._program, self._switch.rules
        program.clear_entries()
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
                repeat = self._switch.divisor if len(links) > 1 else 1
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
        now_us = self._engine.now_ps // PS_PER_US
        port, priority, packet.carry = self._program.ingress(packet.frame, 0, now_us)
        self.refused = port == DROP_PORT
        if self.refused:
            return link
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
    stream = message.flow
    dlcp = message.transport.kind == TransportKind.DLCP
    source, target = (stream.target, stream.source) if packet.back else (stream.source, stream.target)
    destination = HOST_ADDRESS + target if destination is None else destination
    header = Header(
        type=PacketType.DATA if packet.kind is PacketKind.DATA else PacketType.ACK,
        flags=Flag.RETRANSMISSION if packet.retransmission else 0,
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


# ---------------------------------------------------------------------------------------------------------------- hosts


class HostInterface:
    """A host's end of a link: control packets first, then streams in turn, the most urgent queue first."""

    def __init__(self, engine: "ReferenceEngine", link: SimulatedLink) -> None:
        self.engine, self.link = engine, link
        self.control: deque[SimulatedPacket] = deque()
        self.ready: list[deque[MessageStream]] = [deque() for _ in range(PORT_QUEUES)]
        self.pulls: tuple[deque[SimulatedPacket], deque[SimulatedPacket]] = deque(), deque()
        self.pulling = False
        self.pull_next_ps = 0
        self.pending = False

    def offer(self, stream: MessageStream) -> None:
        """List a stream as ready, if it may send and is not listed yet."""
        if not stream.ready and may_send(stream):
            stream.ready = True
            self.ready[next_queue(stream)].append(stream)

    def kick(self) -> None:
        """Send the next packet, or schedule that for when the link is free."""
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
            packet = self._packet_of(stream)
            self.offer(stream)
            if packet is not None:
                return packet
        return self.control.popleft() if self.control else None

    def _request_packet(self, message: Message) -> None:
        """Queue a PULL for a message's stream."""
        self._queue_pull(0, message)
        if not self.pulling:
            self.pulling = True
            self.engine.at(max(self.engine.now_ps, self.pull_next_ps), self._send_pull)

    def _queue_pull(self, queue: int, message: Message) -> None:
        message.refs += 1
        self.pulls[queue].append(control_packet(message, PacketKind.PULL, back=True))

    def _send_pull(self) -> None:
        """Send the first PULL. The next one follows after the serialization time of the requested packets.

        Spare ones wait for all others, and are not sent for messages that are done.
        """
        wanted, spare = self.pulls
        while spare and spare[0].message.done and not wanted:
            message = spare.popleft().message
            message.flow.pulling &= rules.PULL_QUEUED
            self.engine.release(message)
        self.pulling = bool(wanted or spare)
        if self.pulling:
            is_spare = int(not wanted)
            pull = self.pulls[is_spare].popleft()
            stream, transport = pull.message.flow, pull.message.transport
            credit = rules.give_credit(stream, transport, is_spare)
            pull.credit = stream.granted
            packet_ps = (transport.header_bytes + transport.payload) * self.link.rules.kibibyte_ps >> RATE_SHIFT
            self.pull_next_ps = self.engine.now_ps + rules.credit_ps(transport, credit, packet_ps)
            self.control.append(pull)
            queue = rules.queue_after_pull(stream, transport, is_spare)
            if queue >= 0:
                self._queue_pull(queue, pull.message)
            self.pulling = bool(wanted or spare)
            if self.pulling:
                self.engine.at(self.pull_next_ps, self._send_pull)
        self.kick()

    # ---------------------------------------------------------------------------------------------------------- sending

    def begin(self, message: Message) -> None:
        """Assign drop classes to a message's packets, and put the message into its stream."""
        message.state = [PacketState.UNSENT] * message.packets
        message.arrived = [False] * message.packets
        if message.bounded:
            message.drop_class = drop_classes(message)
            message.protected = message.drop_class.count(0)
        stream = message.flow
        rules.grant_first_window(stream, message.transport, message)
        self._enqueue_message(message)
        self.offer(stream)
        self.kick()

    def _enqueue_message(self, message: Message) -> None:
        """Insert a message into its stream's list by order, but never before one that is being sent."""
        message.listed = True
        waiting = message.flow.messages
        position = len(waiting)
        while position and waiting[position - 1].order > message.order and (position > 1 or not waiting[0].next_index):
            position -= 1
        waiting.insert(position, message)

    def _packet_of(self, stream: MessageStream) -> SimulatedPacket | None:
        """Return a stream's next packet and put it in flight; None also if a probe of a receiver has to go first.

        No control packet may be waiting.
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
            rules.add_backlog(stream, stream.transport, -1)
            if lost:
                message.state[found.index] = PacketState.HOLE
                message.holes += 1
            found = None
            # It was acknowledged late, or the receiver needs no more. It may have been the last to delay a probe.
            self.probe_receiver(message)
            self.engine.close_message(message)
            if self.control:
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
        sent.queue = rules.queue_of(message.transport, message, sent.index)
        message.state[sent.index] = PacketState.IN_FLIGHT
        sent.number, sent.sent_ps, sent.in_flight = stream.number, self.engine.now_ps, True
        stream.in_flight_by_queue[sent.queue][sent] = None
        rules.on_send(stream, stream.transport, message, self.engine.now_ps)
        self._arm_timer(stream)
        self.engine.count(EngineCounter.SENT)
        self.engine.count(EngineCounter.RETRANSMITTED, retransmission)
        return data_packet(sent, retransmission)

    def _declare_lost(self, sent: Transmission) -> None:
        """Declare a packet in flight lost: retransmit it, or make it a hole if the message may do without it."""
        message = sent.message
        self._take_from_flight(sent)
        message.congested = True
        self.engine.count(EngineCounter.DECLARED_LOST)
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
        rules.add_backlog(message.flow, message.transport, 1)
        message.flow.repairing += not sent.repeated
        message.flow.retransmissions.append(Transmission(message, sent.index, repeated=True))

    # ----------------------------------------------------------------------------------------------------------- timers

    def _arm_timer(self, stream: MessageStream) -> None:
        """Ensure that an event is scheduled at the stream's earliest timer."""
        due = min(stream.deadline, stream.tail_due)
        if stream.timer_at_ps is None or due < stream.timer_at_ps:
            stream.timer_at_ps = due
            self.engine.at(due, lambda: self.engine.source_of(stream)._stream_timer(stream))

    def _stream_timer(self, stream: MessageStream) -> None:
        """Handle the timers that are due. A replaced event does nothing."""
        if self.engine.now_ps == stream.timer_at_ps:
            stream.timer_at_ps = None
            if stream.in_flight or awaits_reply(stream):
                if self.engine.now_ps >= stream.deadline:
                    self._time_out(stream)
                else:
                    if self.engine.now_ps >= stream.tail_due:
                        self._probe_tail(stream)
                    self._arm_timer(stream)
                self.offer(stream)
        self.kick()

    def _time_out(self, stream: MessageStream) -> None:
        """Declare all packets in flight lost."""
        self.engine.count(EngineCounter.TIMEOUTS)
        rules.on_timeout(stream, stream.transport)
        for in_flight in stream.in_flight_by_queue:
            for sent in list(in_flight):
                self._lose(sent)
        if stream.probe_mode and awaits_reply(stream):
            # A pFabric flow's probe has the priority of its data.
            message = (stream.retransmissions[0].message if stream.retransmissions else None) or stream.messages[0]
            message.refs += 1
            self.engine.count(EngineCounter.PROBES)
            probe = control_packet(message, PacketKind.PROBE, back=False)
            probe.rank = message.left
            self.control.append(probe)
            rules.restart_timers(stream, stream.transport, self.engine.now_ps)
            self._arm_timer(stream)

    def _lose(self, sent: Transmission) -> None:
        self._declare_lost(sent)
        self.probe_receiver(sent.message)
        self.engine.close_message(sent.message)

    def _probe_tail(self, stream: MessageStream) -> None:
        """Send a tail probe: allow one more packet, unless the stream has one ready at its interface anyway."""
        if stream.ready:
            rules.restart_tail_timer(stream, stream.transport, self.engine.now_ps)
            return
        self.engine.count(EngineCounter.TAIL_PROBES)
        stream.tail_of = None
        rules.begin_tail_probe(stream, stream.transport, self.engine.now_ps)
        if not stream.has_work:
            in_flight = (sent for by_queue in stream.in_flight_by_queue for sent in by_queue)
            latest = max(in_flight, key=lambda sent: sent.number)
            stream.tail_of = (latest.message, latest.index)
            self._take_from_flight(latest)
            self._queue_retransmission(latest)

    def probe_receiver(self, message: Message) -> None:
        """Ask a receiver whether it needs the holes, once every packet is sent and answered."""
        if not rules.may_probe(message):
            return
        message.refs += 1
        rules.on_probe(message.flow, message.transport, message, self.engine.now_ps)
        self.engine.count(EngineCounter.PROBES)
        self.control.append(control_packet(message, PacketKind.PROBE, back=False))
        if not message.probe_timer:
            message.probe_timer = True
            message.refs += 1
            self.engine.at(message.probe_at, lambda: self.engine.source_of(message.flow)._probe_timer(message))

    def _probe_timer(self, message: Message) -> None:
        """Probe again, unless the message is complete."""
        if message.satisfied or message.acked == message.packets:
            message.probe_timer = False
            message.refs -= 1
            self.engine.close_message(message)
        else:
            if self.engine.now_ps >= message.probe_at:
                rules.on_probe_timeout(message.flow, message.transport, message, self.engine.now_ps)
                self.probe_receiver(message)
            self.engine.at(message.probe_at, lambda: self.engine.source_of(message.flow)._probe_timer(message))
        self.kick()

    # -------------------------------------------------------------------------------------------------------- receiving

    def receive(self, packet: SimulatedPacket) -> None:
        """Handle a packet that has arrived at the end of its stream."""
        message = packet.message
        if packet.kind is PacketKind.DATA:
            self._receive_data(packet)
            message.refs += 1  # of the acknowledgement
        elif packet.kind is PacketKind.PROBE:
            self._receive_probe(packet)
            message.refs += 1
        else:
            if packet.kind is PacketKind.ACK:
                self._receive_ack(packet)
            elif packet.kind is PacketKind.NACK:
                self._receive_nack(packet)
            elif packet.kind is PacketKind.PULL:
                rules.on_pull(message.flow, message.transport, packet.credit)
            else:
                self._receive_probe_reply(packet)
            self.offer(message.flow)
        self.kick()

    def _receive_data(self, packet: SimulatedPacket) -> None:
        """Receive a packet at its target, and acknowledge it."""
        message = packet.message
        if packet.trimmed:
            message.trims += 1
        elif message.arrived[packet.index]:
            self.engine.count(EngineCounter.DUPLICATES)
        else:
            message.arrived[packet.index] = True
            message.received += 1
            self.engine.count(EngineCounter.ARRIVED)
            if message.bounded and not message.drop_class[packet.index]:
                message.protected -= 1
            if not message.done and rules.is_complete(message.transport, message):
                self.engine.complete_node(message)
        ack = control_packet(message, PacketKind.NACK if packet.trimmed else PacketKind.ACK, back=True)
        ack.index, ack.transmission = packet.index, packet.transmission
        ack.ecn_echo = packet.ecn == 3
        ack.satisfied = message.done and message.missing > 0
        self.control.append(ack)
        if rules.may_pull(message.flow, message.transport, message, packet.credit, packet.trimmed):
            self._request_packet(message)

    def _receive_probe(self, packet: SimulatedPacket) -> None:
        """Answer a sender's probe: whether the message is complete within its loss bound."""
        message = packet.message
        message.probed = True
        if not message.done and rules.has_enough(message):
            self.engine.complete_node(message)
        reply = control_packet(message, PacketKind.PROBE_REPLY, back=True)
        reply.satisfied = message.done
        self.control.append(reply)

    def _receive_probe_reply(self, packet: SimulatedPacket) -> None:
        """Stop if the receiver needs no more, otherwise retransmit the holes. A pFabric flow leaves probe mode."""
        message = packet.message
        if rules.on_probe_reply(message.flow, message.transport, message, packet.satisfied):
            self._enqueue_message(message)

    def _receive_nack(self, packet: SimulatedPacket) -> None:
        """Handle a NACK at the sender: a packet arrived without its payload."""
        assert packet.transmission is not None
        if packet.transmission.in_flight:
            stream = packet.message.flow
            now = self.engine.now_ps
            stream.backoff = 0
            rules.on_nack(stream, stream.transport, now - packet.transmission.sent_ps, now)
            rules.restart_timers(stream, stream.transport, now)
            self._arm_timer(stream)
            self._declare_lost(packet.transmission)
            self.probe_receiver(packet.message)

    def _receive_ack(self, packet: SimulatedPacket) -> None:
        """Handle an ACK at the sender; it may show that earlier packets are lost."""
        message, sent = packet.message, packet.transmission
        assert sent is not None
        stream = message.flow
        if packet.satisfied:
            message.satisfied = True
        state = message.state[packet.index]
        rules.leave_probe_mode(stream)
        if sent.in_flight:
            limited = rules.is_limited(stream)
            self._take_from_flight(sent)
            stream.repairing -= sent.repeated
            message.state[packet.index] = PacketState.ACKED
            message.acked += 1
            rtt_ps = self.engine.now_ps - sent.sent_ps
            rules.measure_rtt(stream, stream.transport, rtt_ps)
            stream.backoff = 0
            message.congested |= packet.ecn_echo
            rules.on_ack(stream, stream.transport, packet.ecn_echo, rtt_ps, sent.number, self.engine.now_ps, limited)
            before = self._end_tail_probe(stream, sent.number)
            in_flight = stream.in_flight_by_queue[sent.queue]
            while in_flight:
                first = next(iter(in_flight))
                if first.number + stream.transport.reorder_packets > sent.number and first.number >= before:
                    break
                rules.on_loss(stream, stream.transport, first.number, self.engine.now_ps)
                self._lose(first)
            rules.restart_timers(stream, stream.transport, self.engine.now_ps)
            self._arm_timer(stream)
        else:
            self.engine.count(EngineCounter.LATE_ACKS)
            if state in (PacketState.LOST, PacketState.HOLE):
                message.state[packet.index] = PacketState.ACKED
                message.acked += 1
                message.holes -= state is PacketState.HOLE
            if stream.tail_probing and stream.tail_of == (message, packet.index):
                stream.tail_of = None  # the repeated packet was not lost
        if message.bounded:
            self.probe_receiver(message)

    def _end_tail_probe(self, stream: MessageStream, number: int) -> int:
        """End an answered tail probe: return the number before which every unacknowledged packet is lost, or -1."""
        before = stream.tail_number
        if not stream.tail_probing or number < before:
            return -1
        stream.tail_probing = False
        if number == before and stream.tail_of is not None:
            # The repeated packet was lost, and the probe has replaced it.
            rules.on_loss(stream, stream.transport, number, self.engine.now_ps)
        return before


def move_smallest_first(streams: deque[MessageStream]) -> None:
    """Move the pFabric stream whose message has the fewest packets left to the front."""
    if streams[0].transport.kind == TransportKind.PFABRIC:
        best = min(streams, key=lambda stream: stream.messages[0].left if stream.messages else 0)
        streams.remove(best)
        streams.appendleft(best)


def may_send(stream: MessageStream) -> bool:
    """Return whether a stream's window is open and its lists are not empty."""
    return stream.has_work and rules.window_is_open(stream, stream.transport)


def next_queue(stream: MessageStream) -> Number:
    """Return the queue of the packet at the head of a stream's lists."""
    if stream.retransmissions:
        return rules.queue_of(stream.transport, stream.retransmissions[0].message, stream.retransmissions[0].index)
    return rules.queue_of(stream.transport, stream.messages[0], stream.messages[0].next_index)


def awaits_reply(stream: MessageStream) -> bool:
    """Return whether a stream with nothing in flight waits for a PULL, or for a reply to a probe."""
    return stream.has_work and rules.needs_reply(stream, stream.transport)


def _is_missing_hole(message: Message) -> bool:
    index = message.next_index
    return message.state[index] is PacketState.HOLE and not message.arrived[index]


# ----------------------------------------------------------------------------------------------------------- the engine


def drop_classes(message: Message) -> list[int]:
    """Return the drop class of each packet; the upper plane, and in each block the packets of class 0, come first."""
    classes = []
    droppable = [drop_class for drop_class in message.profile if drop_class]
    zeros = PROFILE_CELLS - len(droppable)
    for start in range(0, message.packets, PROTECTED_BLOCK_PACKETS):
        count = min(PROTECTED_BLOCK_PACKETS, message.packets - start)
        keep = rules.protected_packets(zeros, count)
        classes += [0] * keep
        indices = range(start + keep, start + count)
        classes += [droppable[mix(index, message.salt & MASK64) % len(droppable)] for index in indices]
    return [0] * message.upper + classes[message.upper :]


class ReferenceEngine:
    """Runs a plan; see `dlcp.sim.engines.packet_engine.PacketEngine`."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.env = simpy.Environment(0)
        self.tally = np.zeros(COUNTER_CELLS, np.int64)
        self.routes = plan.routes
        self._profiles = [row.tolist() for row in plan.profiles]
        self._streams: dict[int, MessageStream] = {}
        self._graphs: dict[int, GraphState] = {}
        self._completions: list[Completion] = []
        self._links = [SimulatedLink(self, number, link) for number, link in enumerate(plan.links)]
        self._interfaces: dict[int, HostInterface] = {}
        self._switches = {node: ReferenceSwitch(self, node) for node in range(plan.hosts, len(plan.topology.names))}
        for link in self._links:
            source = link.rules.source
            if source < plan.hosts:
                self._interfaces[link.number] = HostInterface(self, link)
            else:
                self._switches[source].ports[link.number] = SwitchPort(self._switches[source], link)
        if plan.switches.discipline == Discipline.DLCP:
            for switch in self._switches.values():
                switch.program = P4Pipeline(self, switch)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the counts, indexed by `EngineCounter`."""
        events = [switch.program.events() for switch in self._switches.values() if switch.program is not None]
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

    def at(self, time_ps: int, action: Callable[[], None]) -> None:
        """Schedule an action, now or later."""
        event = simpy.Event(self.env)
        event._ok, event._value = True, None
        event.callbacks = [lambda _: action()]
        self.env.schedule(event, delay=time_ps - self.now_ps)

    # ----------------------------------------------------------------------------------------------------------- graphs

    def submit(self, submission: Submission) -> None:
        """Start a graph. A node without predecessors begins after its delay."""
        for serial, source, target, transport, path_hash, reverse_path_hash, _ in submission.new_streams.tolist():
            own = self.plan.transports[transport]
            threshold = rules.first_threshold(own)
            self._streams[serial] = MessageStream(
                serial, source, target, own, path_hash, reverse_path_hash, own.initial_window_packets, threshold
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
                # This engine's clock is at the latest packet; the graph begins at the time of the SimPy processes.
                self._begin_after(message, submission.now_ps)

    def _message(self, submission: Submission, graph: GraphState, node: int) -> Message:
        row = submission.graph.nodes[node]
        given = {
            name: row[name].item() for name in ("delay_ps", "order", "watched", "job", "step", "message", "sender")
        }
        derived = {name: getattr(submission, name)[node].item() for name in ("bounded", "queue", "salt")}
        return Message(
            graph=graph,
            node=node,
            waits=int(submission.graph.waits[node]),
            transport=self.plan.transports[int(row["transport"])],
            stream=self._streams.get(int(submission.streams[node])),
            **given,
            **derived,
            **self._size_fields(submission.sizes[node]),
        )

    def _size_fields(self, size: np.void) -> dict[str, Any]:
        """Return a message's fields for a `MESSAGE_SIZE` row."""
        fields = {name: size[name].item() for name in ("packets", "last_bytes", "upper", "budget")}
        required = fields["packets"] - size["allowed"].item()
        return {**fields, "required": required, "profile": self._profiles[int(size["profile"])]}

    def _begin_after(self, message: Message, now_ps: int) -> None:
        self.at(now_ps + message.delay_ps, lambda: self._begin(message))

    def _begin(self, message: Message) -> None:
        message.begin_ps = self.now_ps
        if message.packets:
            self.source_of(message.flow).begin(message)
        else:
            self.complete_node(message)
            self.close_message(message)

    def complete_node(self, message: Message) -> None:
        """Mark a node as done, report it if watched, and start the nodes that have waited for it."""
        message.done, message.end_ps = True, self.now_ps
        message.missing = message.packets - message.received
        message.delivered = message.arrived.copy()
        self.count(EngineCounter.MESSAGES_DONE)
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
        """Close a message if it is done and nothing refers to it any more."""
        if not rules.may_close(message):
            return
        message.closed = True
        message.graph.open -= 1
        if not message.graph.open:
            self._completions.append(Completion(CompletionKind.GRAPH_CLOSED, message.graph.number))

    def records(self, number: int) -> NDArray[Any]:
        """Return the records of a graph that has not been forgotten, `dlcp.sim.jobs.graph.NODE_RECORD` (n,)."""
        nodes = self._graphs[number].nodes
        return np.array([(m.begin_ps, m.end_ps, m.packets, m.missing, m.sent, m.congested) for m in nodes], NODE_RECORD)

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
            if message.begin_ps < 0:
                for name, value in self._size_fields(size).items():
                    setattr(message, name, value)

    def forget(self, number: int) -> None:
        """Free the memory of a closed graph."""
        del self._graphs[number]

    # ---------------------------------------------------------------------------------------------------------- packets

    def source_of(self, stream: MessageStream) -> HostInterface:
        """Return the interface by which a stream sends, which depends on the routes."""
        return self.interface_at(stream, stream.source)

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
            self.interface_at(packet.message.flow, node).receive(packet)
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
        """Set the loss probability of links, in units of 1 / `dlcp.sim.engines.arithmetic.DRAW_LIMIT`."""
        for number in links:
            self._links[number].loss = loss

    def set_routes(self, routes: Routes) -> None:
        """Replace the routes."""
        self.routes = routes
        for switch in self._switches.values():
            if switch.program is not None:
                switch.program.populate()

    def port_bytes(self) -> NDArray[Any]:
        """Return the bytes at each link, `dlcp.sim.engines.packet_engine.PORT_BYTES` (links,)."""
        found = np.zeros(len(self._links), PORT_BYTES)
        found["sent_bytes"] = [link.sent_bytes for link in self._links]
        for switch in self._switches.values():
            for number, port in switch.ports.items():
                found["bytes"][number], found["bytes_max"][number] = port.bytes, port.bytes_max
        return found
