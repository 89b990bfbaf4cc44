# SPDX-License-Identifier: Apache-2.0
"""A scenario in the numbers that both engines work with: picoseconds, bytes, packets and tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from dlcp.sim.arithmetic import DRAW_LIMIT, PS_PER_US, ps_per_kibibyte
from dlcp.sim.switches import BUFFERS, DISCIPLINES, SPRAYINGS, SwitchSpec
from dlcp.sim.topology.network import Network, Routes
from dlcp.sim.transports import (
    KINDS,
    TRANSPORTS_MAX,
    Dctcp,
    Dlcp,
    Ndp,
    PFabric,
    Pias,
    Swift,
    TransportSpec,
    WithTailProbe,
)
from numpy.typing import NDArray

QUEUES: Final = 8
CONTROL_QUEUE: Final = 7
ORDINARY_QUEUE: Final = 1
NEVER: Final = 1 << 40
"""A limit that no queue reaches."""
PROFILE_CELLS: Final = 256
BLOCK_PACKETS: Final = 64
"""`dlcp.tags.BLOCK_PACKETS`."""
OTHER_PORT: Final = 5001
"""Destination port of what is not DLCP."""

NEW_RENO, CUBIC, DCTCP, SWIFT, PIAS, PFABRIC, NDP, DLCP = range(8)
FIFO, PRIORITY, SELECTIVE, SMALLEST_FIRST, TRIM = range(5)
PER_QUEUE, PER_PORT, PER_SWITCH = range(3)
BY_HASH, AT_RANDOM, IN_TURNS, LEAST_QUEUE = range(4)

TRANSPORT: Final = np.dtype(
    [
        ("kind", np.int32),
        ("payload", np.int32),
        ("header", np.int32),
        ("ack", np.int32),
        ("reorder", np.int32),
        ("queue", np.int32),
        ("control_queue", np.int32),
        ("sprayed", np.int32),
        ("ecn", np.int32),
        ("immediate", np.int32),
        ("tail_probe", np.int32),
        ("silences", np.int32),
        ("profile", np.int32),
        ("hops", np.int32),
        ("levels", np.int32),
        ("window", np.float64),
        ("window_max", np.float64),
        ("gain", np.float64),
        ("beta", np.float64),
        ("additive", np.float64),
        ("decrease_max", np.float64),
        ("timeout_ps", np.int64),
        ("target_ps", np.int64),
        ("demotion", np.int64, (8,)),
    ],
    align=True,
)


(
    R_DISCIPLINE,
    R_BUFFER,
    R_LIMIT_BYTES,
    R_LIMIT_PACKETS,
    R_ALPHA,
    R_ECN_MIN,
    R_ECN_MAX,
    R_ECN_PROBABILITY,
    R_DROP_INCAPABLE,
    R_TRIM_PACKETS,
    R_SPRAYING,
    R_MARK_ABOVE,
) = range(12)
R_DROP_ABOVE: Final = 16
R_CELLS: Final = 24


@dataclass(frozen=True, slots=True)
class SwitchRules:
    """`dlcp.sim.switches.SwitchSpec` in numbers; a share of ``alpha`` is in 1/1024."""

    discipline: int
    buffer: int
    limit_bytes: int
    limit_packets: int
    alpha_1024: int
    ecn_min: int
    ecn_max: int
    ecn_probability: int
    drop_incapable: int
    trim_packets: int
    spraying: int
    mark_above: int
    drop_above: tuple[int, ...]

    @classmethod
    def of(cls, spec: SwitchSpec) -> "SwitchRules":
        """Return the rules of a switch."""
        ecn = spec.ecn
        marks = ecn is not None and spec.discipline in ("fifo", "priority")
        return cls(
            discipline=DISCIPLINES.index(spec.discipline),
            buffer=BUFFERS.index(spec.buffer),
            limit_bytes=spec.buffer_packets * spec.packet_bytes,
            limit_packets=spec.buffer_packets,
            alpha_1024=round(spec.alpha * 1024),
            ecn_min=ecn.min_packets if ecn is not None and marks else NEVER,
            ecn_max=ecn.max_packets if ecn is not None and marks else NEVER,
            ecn_probability=round(ecn.max_probability * DRAW_LIMIT) if ecn is not None else 0,
            drop_incapable=int(ecn is not None and ecn.drop_incapable),
            trim_packets=spec.trim_packets,
            spraying=SPRAYINGS.index(spec.spraying),
            mark_above=int(spec.mark_at * spec.buffer_packets),
            drop_above=(NEVER, *(int(share * spec.buffer_packets) for share in spec.drop_at)),
        )

    def cells(self) -> NDArray[np.int64]:
        """Return them in the order of the ``R_`` constants."""
        cells = np.zeros(R_CELLS, np.int64)
        values = [getattr(self, name) for name in self.__slots__]
        cells[: R_MARK_ABOVE + 1] = values[: R_MARK_ABOVE + 1]
        cells[R_DROP_ABOVE:] = self.drop_above
        return cells


@dataclass(frozen=True, slots=True)
class LinkNumbers:
    """One direction of a link: picoseconds for 1,024 bytes and of delay, loss of `DRAW_LIMIT`, state of its dice."""

    source: int
    target: int
    kibibyte_ps: int
    delay_ps: int
    loss: int
    random: int


@dataclass(slots=True)
class Plan:
    """Everything that does not change while packets fly, but for the routes.

    Attributes
    ----------
    node_random, node_salt
        State of the dice, and salt of the hash, of every node.
    divisors
        Of every node, by what the hash is divided before a path is chosen by it; see `dlcp.sim.topology`.
    transports
        `TRANSPORT` (n,).
    profiles
        uint8 (n, 256): drop classes, from which the hash of a packet chooses.
    """

    network: Network
    links: list[LinkNumbers]
    routes: Routes
    rules: SwitchRules
    node_random: NDArray[np.int64]
    node_salt: NDArray[np.int64]
    divisors: NDArray[np.int32]
    transports: NDArray[Any]
    profiles: NDArray[np.uint8]
    seed: int

    @property
    def hosts(self) -> int:
        """Return how many of the nodes are hosts."""
        return self.network.hosts


def make_plan(
    network: Network,
    switches: SwitchSpec,
    transports: Mapping[str, TransportSpec],
    class_shares: Sequence[Sequence[float]],
    seed: int,
) -> Plan:
    """Return the plan of a network; ``seed`` feeds one stream of random numbers per node and per link.

    Raises
    ------
    ValueError
        There are more transports than streams can name.
    """
    if len(transports) > TRANSPORTS_MAX:
        raise ValueError(f"there are {len(transports)} transports; a scenario has at most {TRANSPORTS_MAX}")
    root = np.random.SeedSequence(seed)
    link_seeds, node_seeds, salts = (
        child.generate_state(count, np.uint64).view(np.int64) | 1
        for child, count in zip(
            root.spawn(3), (len(network.links), len(network.names), len(network.names)), strict=True
        )
    )
    links = [
        LinkNumbers(
            link.source,
            link.target,
            ps_per_kibibyte(link.spec.rate_gbps),
            round(link.spec.delay_us * PS_PER_US),
            round(link.spec.loss_ratio * DRAW_LIMIT),
            int(link_seeds[number]),
        )
        for number, link in enumerate(network.links)
    ]
    shares: list[Sequence[float]] = list(class_shares)
    rows = np.zeros(len(transports), TRANSPORT)
    for row, spec in zip(rows, transports.values(), strict=True):
        _fill(row, spec, switches)
        if isinstance(spec, Dlcp):
            row["profile"] = len(shares)
            shares.append(spec.class_shares)
    profiles = np.array([_profile(item) for item in shares or [(1.0,)]], np.uint8)
    return Plan(
        network,
        links,
        network.routes(),
        SwitchRules.of(switches),
        node_seeds,
        salts,
        np.array(network.divisors, np.int32),
        rows,
        profiles,
        seed,
    )


def _fill(row: Any, spec: TransportSpec, switches: SwitchSpec) -> None:
    row["kind"] = KINDS.index(type(spec))
    row["payload"] = spec.packet_bytes - spec.header_bytes
    row["header"], row["ack"], row["reorder"] = spec.header_bytes, spec.ack_bytes, spec.reorder_packets
    row["queue"], row["sprayed"] = spec.queue, spec.balancing == "packet"
    row["control_queue"] = CONTROL_QUEUE
    row["ecn"] = isinstance(spec, Dctcp | Pias | Dlcp)
    row["window"], row["window_max"] = spec.initial_window_packets, spec.max_window_packets
    row["timeout_ps"] = round(spec.min_timeout_us * PS_PER_US)
    row["hops"] = 1
    row["tail_probe"] = isinstance(spec, WithTailProbe) and spec.tail_probe
    if isinstance(spec, Dctcp | Pias | Dlcp):
        row["gain"] = spec.gain
    if isinstance(spec, Swift):
        row["target_ps"], row["beta"] = round(spec.target_us * PS_PER_US), spec.beta
        row["additive"], row["decrease_max"] = spec.additive_packets, spec.max_decrease
    if isinstance(spec, Pias):
        row["levels"] = len(spec.demotion_bytes)
        row["demotion"][: len(spec.demotion_bytes)] = spec.demotion_bytes
    if isinstance(spec, Dlcp):
        row["immediate"], row["hops"] = spec.immediate, spec.switch_hops
    if isinstance(spec, PFabric):
        row["silences"] = spec.probe_after_timeouts
    if switches.discipline == "dlcp" and not isinstance(spec, Dlcp):
        # The P4 program puts everything but DLCP into one queue, and keeps a flow on one path.
        row["queue"] = row["control_queue"] = ORDINARY_QUEUE
        row["sprayed"] = row["levels"] = 0
    if isinstance(spec, PFabric | Ndp):
        row["reorder"] = 1 << 30  # a timer or a NACK tells, for packets overtake each other


def _profile(shares: Sequence[float]) -> NDArray[np.uint8]:
    """Return the classes in proportion to their shares, by largest remainder, in 256 cells."""
    exact = np.asarray(shares, float) * PROFILE_CELLS
    cells = np.floor(exact).astype(np.int64)
    short = PROFILE_CELLS - int(cells.sum())
    cells[np.argsort(cells - exact, kind="stable")[:short]] += 1
    return np.repeat(np.arange(len(cells), dtype=np.uint8), cells)


def source_port(serial: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the UDP source ports of streams: they tell streams between the same hosts apart."""
    return 49152 + serial % 4096
