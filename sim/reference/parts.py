# SPDX-License-Identifier: Apache-2.0
"""What moves and what is remembered of it: packets, transmissions, messages, streams, graphs."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from dlcp.sim.arithmetic import ENTROPY_TABLE
from dlcp.sim.packet_engine import FOREVER_PS
from dlcp.sim.plan import PORT_QUEUES, PacketKind, TransportRules


class PacketState(Enum):
    """What a sender knows of a packet of a message."""

    UNSENT = "not sent yet"
    IN_FLIGHT = "in flight"
    ACKED = "acknowledged"
    LOST = "to be retransmitted"
    HOLE = "lost, and stays lost unless the receiver needs it"


@dataclass(slots=True, eq=False)
class GraphState:
    """A graph: how many of its nodes are not done, and how many are not closed."""

    number: int
    nodes: list["Message"]
    remaining: int
    open: int


@dataclass(slots=True, eq=False)
class Message:
    """A node of a graph; fields are those of `dlcp.sim.kernel.state.MESSAGE_ROW`."""

    graph: GraphState
    node: int
    packets: int
    last_bytes: int
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
    number: int
    sender: int
    profile: list[int]
    transport: TransportRules
    stream: "MessageStream | None"
    followers: list["Message"] = field(default_factory=list)
    drop_class: list[int] = field(default_factory=list)
    state: list[PacketState] = field(default_factory=list)
    arrived: list[bool] = field(default_factory=list)
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
    probed: bool = False
    probing: bool = False
    filling_holes: bool = False
    probe_timer: bool = False
    probe_at_ps: int = 0
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
    """A packet as its sender remembers it; ``repeated`` if it was lost before."""

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
        Those with something unsent.
    retransmissions
        Packets to be retransmitted, first come first served.
    in_flight_by_queue
        Packets in flight. A dict keeps the order of sending, and finds a packet at once.
    repairing
        Packets that were lost and are not known to have arrived.
    spare
        How many packets may go beyond the window.
    timer_at_ps
        When the one event comes that counts.
    deadline, tail_due
        When all in flight is given up, and when the tail is probed.
    tail_probing, tail_number, tail_of
        Whether a probe has not been acknowledged, its number, and the packet that it repeats.
    window, threshold and all after ``tail_of``
        As in `dlcp.sim.kernel.state.STREAM_ROW`, for the functions of `dlcp.sim.rules`.
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

    @property
    def has_work(self) -> bool:
        """Return whether the stream seems to have something to send."""
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
    back: bool = False
    frame: bytearray = field(default_factory=bytearray)
    carry: tuple[int, ...] = ()
    enqueued_us: int = 0
    enqueued_depth: int = 0


def data_packet(transmission: Transmission, retransmission: bool) -> SimulatedPacket:
    """Return the packet of a transmission."""
    message, index = transmission.message, transmission.index
    stream, transport = message.flow, message.transport
    path_hash = stream.path_hash
    if transport.sprayed:
        entropy = (index + message.step + retransmission) & 0xFFFFFFFF
        for position in range(4):
            path_hash ^= int(ENTROPY_TABLE[position, entropy >> (24 - 8 * position) & 255])
    return SimulatedPacket(
        PacketKind.DATA,
        message,
        stream.target,
        transport.header + (message.last_bytes if index == message.packets - 1 else transport.payload),
        transmission.queue,
        path_hash,
        index=index,
        transmission=transmission,
        rank=message.left,
        drop_class=message.drop_class[index] if message.bounded and not retransmission else 0,
        ecn=transport.ecn,
        sprayed=transport.sprayed,
        retransmission=retransmission,
    )


def control_packet(
    message: Message, kind: PacketKind, *, back: bool, acknowledges: SimulatedPacket | None = None
) -> SimulatedPacket:
    """Return a control packet of a message's stream, to its target or ``back`` to its source."""
    stream, transport = message.flow, message.transport
    return SimulatedPacket(
        kind,
        message,
        stream.source if back else stream.target,
        transport.ack,
        transport.control_queue,
        stream.reverse_path_hash if back else stream.path_hash,
        index=acknowledges.index if acknowledges else 0,
        transmission=acknowledges.transmission if acknowledges else None,
        ecn=transport.ecn,
        back=back,
    )
