# SPDX-License-Identifier: Apache-2.0
"""Translate a scenario into the numbers of both packet engines: picoseconds, bytes, packets and tables.

The reference reads `TransportRules` and `SwitchRules`. The kernel gets the same records as rows of structured arrays
(`as_rows`), so each number has the same name in both engines.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import DRAW_LIMIT, PS_PER_US, ps_per_kibibyte
from dlcp.sim.switches import SwitchSpec
from dlcp.sim.topology import NetworkTopology, Routes
from dlcp.sim.transports import (
    TRANSPORTS_MAX,
    DctcpTransport,
    DlcpTransport,
    NdpTransport,
    PFabricTransport,
    PiasTransport,
    TransportSpec,
)
from dlcp.wire import Queue

Row = Any
"""A structured array, one of its rows, or Numba's view of either."""
Number = Any
"""An integer of Numba or NumPy."""
PORT_QUEUES: Final = 8
NO_LIMIT: Final = 1 << 40
"""A limit that no queue reaches."""
PROFILE_CELLS: Final = 256
"""Cells of a drop-class profile. A packet's hash chooses a cell, so each class gets packets in proportion to its
cells."""
PROTECTED_BLOCK_PACKETS: Final = 64
"""Size of a block, in which the packets of class 0 are sent first. DLCP's hosts have since moved to blocks of 256
(`dlcp.tags.BLOCK_PACKETS`); the simulator keeps 64, because all its published results were computed with it."""
TIMEOUT_BACKOFF_MAX: Final = 6
"""Most doublings of a timeout; not tuned."""
DLCP_BACKOFF_MAX: Final = 1
"""The same for DLCP, where no answer may only mean that a stream waits in a lower queue. With six doublings, some steps
took 20 ms longer; see `sim/experiments/README.md`."""
CUBIC_SCALE: Final = 0.4
"""C of RFC 9438, packets per second cubed."""
CUBIC_KEEP: Final = 0.7
"""beta of RFC 9438: the share of the window that remains after a loss."""
DLCP_LOSS_KEEP: Final = 0.75
"""The share of DLCP's window that remains after a loss: 1 - `dlcp.transport.dctcp.LOSS_CUT`."""
TRIMMED_BYTES: Final = 64
"""Size of a packet without its payload (NDP)."""

# Constants of the P4 program in p4/shared/constants.p4; tests/sim/test_sim_agreement.py compares them.
SLOT_REGISTER_SIZE: Final = 1 << 16
SLOT_OWNED: Final = 0x80000000
SLOT_IDLE_US: Final = 1_000_000
ROUTE_MEMBERS_SIZE: Final = 1024
PORT_INDEX_WIDTH: Final = 6
EVENT_MARKED, EVENT_BUDGET_SPENT, EVENT_SLOT_TAKEN = 1, 5, 6


class TransportKind(IntEnum):
    """Congestion control and loss detection of a stream; names are the ``kind`` values in experiment files."""

    NEW_RENO = 0
    CUBIC = 1
    DCTCP = 2
    SWIFT = 3
    PIAS = 4
    PFABRIC = 5
    NDP = 6
    DLCP = 7


class Discipline(IntEnum):
    """How ports queue and drop; names as in `dlcp.sim.switches.SwitchSpec.discipline`."""

    FIFO = 0
    PRIORITY = 1
    DLCP = 2
    PFABRIC = 3
    TRIM = 4


class BufferScope(IntEnum):
    """What shares one buffer."""

    QUEUE = 0
    PORT = 1
    SWITCH = 2


class PathChoice(IntEnum):
    """How a switch chooses among equal paths for a sprayed packet; other packets follow their flow's hash."""

    HASH = 0
    RANDOM = 1
    ROUND_ROBIN = 2
    LEAST_QUEUE = 3


class PacketKind(IntEnum):
    """Packet types. PULL is NDP's. A PROBE asks a receiver whether it needs more; a PROBE_REPLY answers."""

    DATA = 0
    ACK = 1
    NACK = 2
    PULL = 3
    PROBE = 4
    PROBE_REPLY = 5


@dataclass(frozen=True, slots=True)
class TransportRules:
    """A transport's settings as numbers; `dlcp.sim.transports` explains them.

    Parameters
    ----------
    payload, header, ack
        Bytes of a packet's payload and headers, and of an acknowledgement.
    probe_mode_after
        pFabric: consecutive timeouts after which a flow sends probes instead of data.
    profile
        Drop-class profile of messages that name none.
    levels, demotion
        PIAS: the number of thresholds in use, and the thresholds in bytes, padded with 0.
    """

    kind: TransportKind
    payload: int
    header: int
    ack: int
    reorder: int
    queue: int
    control_queue: int
    sprayed: bool
    ecn: bool
    immediate: bool
    tail_probe: bool
    probe_mode_after: int
    profile: int
    hops: int
    levels: int
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
    def of(cls, spec: TransportSpec, switches: SwitchSpec, profile: int) -> "TransportRules":
        """Return a transport's rules on these switches; ``profile`` is its default drop-class profile."""
        # The P4 program puts all traffic but DLCP's into one queue, and keeps each flow on one path.
        ordinary = switches.discipline == "dlcp" and not isinstance(spec, DlcpTransport)
        # pFabric and NDP reorder packets, so they detect losses by a timer or a NACK.
        overtaken = isinstance(spec, PFabricTransport | NdpTransport)
        # Settings that a transport lacks are 0, or () for thresholds.
        demotion = getattr(spec, "demotion_bytes", ())
        return cls(
            kind=TransportKind[str(spec.__struct_config__.tag).upper()],
            payload=spec.packet_bytes - spec.header_bytes,
            header=spec.header_bytes,
            ack=spec.ack_bytes,
            reorder=1 << 30 if overtaken else spec.reorder_packets,
            queue=Queue.ORDINARY if ordinary else spec.queue,
            control_queue=Queue.ORDINARY if ordinary else Queue.CONTROL,
            sprayed=spec.balancing == "packet" and not ordinary,
            ecn=isinstance(spec, DctcpTransport | PiasTransport | DlcpTransport),
            immediate=getattr(spec, "immediate", False),
            tail_probe=getattr(spec, "tail_probe", False),
            probe_mode_after=getattr(spec, "probe_after_timeouts", 0),
            profile=profile,
            hops=getattr(spec, "switch_hops", 1),
            levels=0 if ordinary else len(demotion),
            window=spec.initial_window_packets,
            window_max=spec.max_window_packets,
            gain=getattr(spec, "gain", 0.0),
            beta=getattr(spec, "beta", 0.0),
            additive=getattr(spec, "additive_packets", 0.0),
            decrease_max=getattr(spec, "max_decrease", 0.0),
            timeout_ps=round(spec.min_timeout_us * PS_PER_US),
            target_ps=round(getattr(spec, "target_us", 0.0) * PS_PER_US),
            demotion=(*demotion, *[0] * (8 - len(demotion))),
        )


@dataclass(frozen=True, slots=True)
class SwitchRules:
    """`dlcp.sim.switches.SwitchSpec` as numbers.

    Parameters
    ----------
    alpha_1024
        ``alpha`` in units of 1/1024.
    ecn_probability
        Highest marking probability, in units of 1 / `DRAW_LIMIT`.
    mark_above, drop_above
        Queue depths in packets; ``drop_above`` is by drop class.
    """

    discipline: Discipline
    buffer: BufferScope
    limit_bytes: int
    limit_packets: int
    alpha_1024: int
    ecn_min: int
    ecn_max: int
    ecn_probability: int
    drop_incapable: bool
    trim_packets: int
    path_choice: PathChoice
    mark_above: int
    drop_above: tuple[int, ...]

    @classmethod
    def of(cls, spec: SwitchSpec) -> "SwitchRules":
        """Return the rules of a `SwitchSpec`."""
        ecn = spec.ecn
        marks = ecn is not None and spec.discipline in ("fifo", "priority")
        return cls(
            discipline=Discipline[spec.discipline.upper()],
            buffer=BufferScope[spec.buffer.upper()],
            limit_bytes=spec.buffer_packets * spec.packet_bytes,
            limit_packets=spec.buffer_packets,
            alpha_1024=round(spec.alpha * 1024),
            ecn_min=ecn.min_packets if ecn is not None and marks else NO_LIMIT,
            ecn_max=ecn.max_packets if ecn is not None and marks else NO_LIMIT,
            ecn_probability=round(ecn.max_probability * DRAW_LIMIT) if ecn is not None else 0,
            drop_incapable=ecn is not None and ecn.drop_incapable,
            trim_packets=spec.trim_packets,
            path_choice=PathChoice[spec.spraying.upper()],
            mark_above=int(spec.mark_at * spec.buffer_packets),
            drop_above=(NO_LIMIT, *(int(share * spec.buffer_packets) for share in spec.drop_at)),
        )


def _row_type(record: type[TransportRules | SwitchRules]) -> np.dtype[Any]:
    """Return the row type of a record: a 64-bit number for each field, eight for a tuple."""
    columns: list[Any] = []
    for column in dataclasses.fields(record):
        size = (8,) if column.type == tuple[int, ...] else ()
        columns.append((column.name, np.float64 if column.type is float else np.int64, size))
    return np.dtype(columns)


TRANSPORT_ROW: Final = _row_type(TransportRules)
SWITCH_RULES_ROW: Final = _row_type(SwitchRules)


def as_rows(records: Sequence[TransportRules | SwitchRules]) -> NDArray[Any]:
    """Return records of one type as a structured array for the kernel."""
    return np.array([dataclasses.astuple(record) for record in records], _row_type(type(records[0])))


@dataclass(frozen=True, slots=True)
class LinkRules:
    """One direction of a link: times in picoseconds, loss in units of 1 / `DRAW_LIMIT`, and the random state."""

    source: int
    target: int
    kibibyte_ps: int
    delay_ps: int
    loss: int
    random: int


@dataclass(slots=True)
class EnginePlan:
    """Everything that stays constant during a run, and the initial routes.

    Attributes
    ----------
    node_random, node_salt
        Random state and hash salt, by node.
    profiles
        uint8 (n, `PROFILE_CELLS`): drop classes; the hash of a packet chooses the cell.
    """

    topology: NetworkTopology
    links: list[LinkRules]
    routes: Routes
    switches: SwitchRules
    node_random: NDArray[np.int64]
    node_salt: NDArray[np.int64]
    transports: tuple[TransportRules, ...]
    profiles: NDArray[np.uint8]
    seed: int

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return self.topology.hosts


def make_plan(
    topology: NetworkTopology,
    switches: SwitchSpec,
    transports: Mapping[str, TransportSpec],
    class_shares: Sequence[Sequence[float]],
    seed: int,
) -> EnginePlan:
    """Return the plan of a network; ``seed`` feeds one random stream per node and per link.

    Raises
    ------
    ValueError
        There are more than `TRANSPORTS_MAX` transports.
    """
    if len(transports) > TRANSPORTS_MAX:
        raise ValueError(f"there are {len(transports)} transports; a scenario has at most {TRANSPORTS_MAX}")
    root = np.random.SeedSequence(seed)
    nodes = len(topology.names)
    link_seeds, node_seeds, salts = (
        child.generate_state(count, np.uint64).view(np.int64) | 1
        for child, count in zip(root.spawn(3), (len(topology.links), nodes, nodes), strict=True)
    )
    links = [
        LinkRules(
            link.source,
            link.target,
            ps_per_kibibyte(link.spec.rate_gbps),
            round(link.spec.delay_us * PS_PER_US),
            round(link.spec.loss_ratio * DRAW_LIMIT),
            int(link_seeds[number]),
        )
        for number, link in enumerate(topology.links)
    ]
    shares: list[Sequence[float]] = list(class_shares)
    rules = []
    for spec in transports.values():
        profile = 0
        if isinstance(spec, DlcpTransport):
            profile = len(shares)
            shares.append(spec.class_shares)
        rules.append(TransportRules.of(spec, switches, profile))
    return EnginePlan(
        topology,
        links,
        topology.routes(),
        SwitchRules.of(switches),
        node_seeds,
        salts,
        tuple(rules),
        np.array([_profile(item) for item in shares or [(1.0,)]], np.uint8),
        seed,
    )


def _profile(shares: Sequence[float]) -> NDArray[np.uint8]:
    """Fill `PROFILE_CELLS` cells with drop classes in proportion to their shares, by largest remainder."""
    exact = np.asarray(shares, float) * PROFILE_CELLS
    cells = np.floor(exact).astype(np.int64)
    short = PROFILE_CELLS - int(cells.sum())
    cells[np.argsort(cells - exact, kind="stable")[:short]] += 1
    return np.repeat(np.arange(len(cells), dtype=np.uint8), cells)
