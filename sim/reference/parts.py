# SPDX-License-Identifier: Apache-2.0
"""What moves and what is remembered of it: packets, transmissions, messages, streams, graphs."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from dlcp.sim.plan import QUEUES

if TYPE_CHECKING:
    from dlcp.sim.reference.congestion import Window
    from dlcp.sim.reference.interface import Interface


class Kind(IntEnum):
    """Of packets."""

    DATA = 0
    ACK = 1
    NACK = 2
    PULL = 3
    PROBE = 4
    ANSWER = 5


class Known(Enum):
    """What a sender knows of a packet."""

    UNSENT = "not sent yet"
    FLYING = "on its way"
    ACKED = "arrived"
    LOST = "to be sent again"
    HOLE = "lost, which may be borne"


@dataclass(slots=True, eq=False)
class Transport:
    """A row of `dlcp.sim.plan.TRANSPORT` as Python numbers."""

    kind: int
    payload: int
    header: int
    ack: int
    reorder: int
    queue: int
    control_queue: int
    sprayed: bool
    ecn: int
    immediate: bool
    tail_probe: bool
    silences: int
    window: float
    window_max: float
    gain: float
    beta: float
    additive: float
    decrease_max: float
    timeout_ps: int
    target_ps: int
    demotion: tuple[int, ...]

    @classmethod
    def of(cls, row: Any) -> "Transport":
        """Return the transport of a row."""
        values = {name: row[name].item() for name in cls.__slots__ if name != "demotion"}
        return cls(**values, demotion=tuple(row["demotion"][: row["levels"]].tolist()))


@dataclass(slots=True, eq=False)
class Graph:
    """A graph: how many of its nodes are not done, and how many something still refers to."""

    number: int
    nodes: list["Message"]
    remaining: int
    open: int


@dataclass(slots=True, eq=False)
class Message:
    """A node of a graph."""

    graph: Graph
    place: int
    packets: int
    last_bytes: int
    delay_ps: int
    order: int
    waits: int
    watched: bool
    bounded: bool
    required: int
    budget: int
    owner: int
    queue: int
    salt: int
    job: int
    step: int
    number: int
    sender: int
    profile: list[int]
    transport: Transport
    stream: "Stream | None"
    followers: list["Message"] = field(default_factory=list)
    drop_class: list[int] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)
    arrived: list[bool] = field(default_factory=list)
    begin_ps: int = -1
    end_ps: int = -1
    next: int = 0
    acked: int = 0
    received: int = 0
    protected: int = 0
    flying: int = 0
    waiting: int = 0
    holes: int = 0
    refs: int = 0
    sent: int = 0
    missing: int = 0
    pulls: int = 0
    trims: int = 0
    listed: bool = False
    done: bool = False
    closed: bool = False
    stopped: bool = False
    asked: bool = False
    probing: bool = False
    resending: bool = False
    probe_timer: bool = False
    probe_at_ps: int = 0
    probe_backoff: int = 0

    @property
    def flow(self) -> "Stream":
        """Return the stream of a message that sends something."""
        assert self.stream is not None
        return self.stream


@dataclass(slots=True, eq=False)
class Sent:
    """A packet as its sender remembers it; ``again`` if it was lost before."""

    message: Message
    index: int
    queue: int = 0
    number: int = 0
    sent_ps: int = 0
    flying: bool = False
    again: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """A flow of messages.

    Attributes
    ----------
    again
        To be sent again, first come first served.
    repairing
        Packets that were lost and are not known to have arrived.
    spare
        How many packets may go beyond the window.
    timer_at_ps
        When the event comes that counts.
    deadline_ps, tail_at_ps
        When all on the way is given up, and when the tail is probed.
    tail_number, tail_of
        Number of the probe that has not been answered, and what it repeats.
    """

    serial: int
    source: int
    target: int
    transport: Transport
    hash: int
    hash_back: int
    window: "Window"
    interface: "Interface | None" = None
    messages: deque[Message] = field(default_factory=deque)
    again: deque[Sent] = field(default_factory=deque)
    # Insertion order is sending order, and a packet is found at once.
    out: list[dict[Sent, None]] = field(default_factory=lambda: [{} for _ in range(QUEUES)])
    number: int = 0
    flying: int = 0
    credit: int = 0
    ready: bool = False
    repairing: int = 0
    spare: int = 0
    timer_at_ps: int | None = None
    deadline_ps: int = 0
    tail_at_ps: int | None = None
    tail_number: int | None = None
    tail_of: tuple[Message, int] | None = None


@dataclass(slots=True, eq=False)
class Packet:
    """A packet in the network."""

    kind: Kind
    message: Message
    target: int
    size: int
    queue: int
    hash: int
    index: int = 0
    sent: Sent | None = None
    rank: int = -1
    drop_class: int = 0
    ecn: int = 0
    sprayed: bool = False
    again: bool = False
    trimmed: bool = False
    enough: bool = False
    echo: bool = False
    entropy: int = 0
    back: bool = False
    frame: bytearray | None = None
    carry: tuple[int, ...] = ()
    enqueued_us: int = 0
    enqueued_depth: int = 0
