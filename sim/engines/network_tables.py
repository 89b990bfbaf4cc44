# SPDX-License-Identifier: Apache-2.0
"""Translate a scenario into the numbers of both packet engines: picoseconds, bytes, packets and tables.

The reference reads `TransportRules` and `SwitchRules`. The kernel gets the same as rows of arrays (`as_rows`), so each
number has the same name in both engines.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import DRAW_LIMIT, PS_PER_US, ps_per_kibibyte
from dlcp.sim.graphs.graph import row_type
from dlcp.sim.network.nodes import NetworkTopology, Routes
from dlcp.sim.rows import Row, f8, i8
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.transports import specs
from dlcp.sim.transports.plugins import OWN_DISCIPLINES, OWN_SETTINGS_MAX, OWN_TRANSPORTS, setting_values
from dlcp.wire import DROP_CLASSES, Queue

_ANY_ORDER: Final = 1 << 30
"""``reorder_packets`` of transports that do not take reordering for loss."""
NO_LIMIT: Final = 1 << 40
"""A limit that no queue reaches."""
PROFILE_CELLS: Final = 256
"""Cells of a drop-class profile. A packet's hash chooses a cell, so each class gets packets in proportion to its
cells."""
PROTECTED_BLOCK_PACKETS: Final = 64
"""Size of a block, in which the packets of class 0 are sent first. DLCP's hosts have since moved to blocks of 256
(`dlcp.values.tags.BLOCK_PACKETS`); the simulator keeps 64, because all its published results were computed with it."""
LOWER_PLANE_SHARES: Final = (0.0, *[1 / (DROP_CLASSES - 1)] * (DROP_CLASSES - 1))
"""Share of the lower plane's packets in each drop class, as in `dlcp.values.planes.PlaneLayout.tags`."""
TRIMMED_BYTES: Final = 64
"""Size of a packet without its payload."""
ULTRA_ETHERNET_WINDOW: Final = 1.5
"""Largest window of Ultra Ethernet's transports in bandwidth-delay products."""
NSCC_REFERENCE_BYTES: Final = 150_000
"""Bandwidth-delay product of the reference network: 100 Gbit/s and 12 us."""
# Constants of the P4 program in p4/shared/constants.p4; tests/sim/test_sim_agreement.py compares them.
SLOT_REGISTER_SIZE: Final = 1 << 16
SLOT_OWNED: Final = 0x80000000
SLOT_IDLE_US: Final = 1_000_000
ROUTE_MEMBERS_SIZE: Final = 1024
PORT_INDEX_WIDTH: Final = 6
EVENT_MARKED, EVENT_BUDGET_SPENT, EVENT_SLOT_TAKEN = 1, 5, 6

OWN_KIND: Final = 100
"""Number of the first discipline in `dlcp.sim.transports.plugins.OWN_DISCIPLINES`; the others follow."""
TRANSPORTS: Final = (*get_args(specs.TransportSpec), *OWN_TRANSPORTS)
"""All transports, by kind."""
_FACTS: Final = ("ecn", "slow_start", "credited", "smallest_first", "every_loss", "backoff_max", "loss_keep")
"""The properties of a transport that its class declares."""


class Discipline(IntEnum):
    """How ports queue and drop; names as in `dlcp.sim.scenario.SwitchSpec.discipline`."""

    FIFO = 0
    PRIORITY = 1
    DLCP = 2
    PFABRIC = 3
    TRIM = 4


class BufferScope(IntEnum):
    """Scope of a buffer: a queue, a port, or the whole switch."""

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
    """Packet types. PULL is NDP's and RCCC's. A PROBE asks a receiver whether it needs more; a PROBE_REPLY answers."""

    DATA = 0
    ACK = 1
    NACK = 2
    PULL = 3
    PROBE = 4
    PROBE_REPLY = 5


def _transport_row() -> np.dtype[Any]:
    """Return the columns of all transports' settings, and of what follows from these; microseconds become ``_ps``."""
    integers = ("kind", "payload", "control_queue", "sprayed", "profile", "levels", "is_dlcp", *_FACTS)
    columns: dict[str, Any] = {**dict.fromkeys(integers, i8), "loss_keep": f8, "scale": f8, "demotion": (i8, 8)}
    for kind in TRANSPORTS:
        for setting in msgspec.structs.fields(kind):
            if setting.name.endswith("_us"):
                columns[f"{setting.name[:-3]}_ps"] = i8
            elif isinstance(setting.default, int | float):
                columns.setdefault(setting.name, f8 if isinstance(setting.default, float) else i8)
    return row_type(*((kind, name) for name, kind in columns.items()))


TRANSPORT_ROW: Final = _transport_row()


class TransportRules(Row, fields=TRANSPORT_ROW):
    """A transport's settings as numbers.

    A setting has its name in `dlcp.sim.transports.specs`, or the same with ``_ps`` if it is in microseconds; 0 if the
    transport has no such setting.

    Attributes
    ----------
    payload
        Most bytes of a message in a packet.
    profile
        Drop-class profile of messages that name none.
    levels, demotion
        PIAS: the number of thresholds in use, and the thresholds in bytes, padded with 0.
    base_rtt_ps, scale
        Ultra Ethernet: the longest round trip without queues; NSCC: its windows' growth relative to its constants.
    """

    @classmethod
    def of(
        cls, spec: specs.TransportSpec, topology: NetworkTopology, routes: Routes, switches: SwitchSpec, profile: int
    ) -> "TransportRules":
        """Return a transport's rules in a network; ``profile`` is its default drop-class profile."""
        demotion = getattr(spec, "demotion_bytes", ())
        given = {name: getattr(spec, name) for name in spec.__struct_fields__}
        numbers = {"switch_hops": 1} | {name: getattr(spec, name) for name in _FACTS}
        numbers |= {name: given[name] for name in given.keys() & {*(TRANSPORT_ROW.names or ())}}
        rules = cls(
            **numbers,
            **{f"{name[:-3]}_ps": round(us * PS_PER_US) for name, us in given.items() if name.endswith("_us")},
            kind=TRANSPORTS.index(type(spec)),
            is_dlcp=isinstance(spec, specs.DlcpTransport),
            payload=spec.packet_bytes - spec.header_bytes,
            control_queue=Queue.CONTROL,
            sprayed=spec.balancing == "packet",
            profile=profile,
            levels=len(demotion),
            demotion=(*demotion, *[0] * (8 - len(demotion))),
        )
        if spec.reorders:
            rules.reorder_packets = _ANY_ORDER
        if isinstance(spec, specs.SwiftTransport):
            rules.loss_keep = 1 - spec.max_decrease
        if isinstance(spec, specs.UltraEthernetTransport):
            vars(rules).update(_ultra_ethernet_settings(spec, topology, routes, switches))
        if switches.discipline == "dlcp" and not isinstance(spec, specs.DlcpTransport):
            # The P4 program puts all traffic but DLCP's into one queue, and keeps each flow on one path.
            rules.queue = rules.control_queue = Queue.ORDINARY
            rules.sprayed, rules.levels = False, 0
        return rules


def _ultra_ethernet_settings(
    spec: specs.UltraEthernetTransport, topology: NetworkTopology, routes: Routes, switches: SwitchSpec
) -> dict[str, Any]:
    """Return the settings of Ultra Ethernet's transports that depend on the network."""
    path = LongestPath.of(topology, routes, spec)
    if spec.base_rtt_us:
        path = dataclasses.replace(path, base_rtt_ps=round(spec.base_rtt_us * PS_PER_US))
    largest = spec.max_window_packets or max(1.0, ULTRA_ETHERNET_WINDOW * path.product_bytes / spec.packet_bytes)
    settings = {
        "base_rtt_ps": path.base_rtt_ps,
        "max_window_packets": largest,
        "initial_window_packets": spec.initial_window_packets or largest,
    }
    if isinstance(spec, specs.NsccTransport):
        trims = switches.discipline == "trim"
        settings |= {
            "target_ps": round(spec.target_us * PS_PER_US) or path.base_rtt_ps * (3 if trims else 4) // 4,
            "scale": path.product_bytes / NSCC_REFERENCE_BYTES,
            "reorder_packets": _ANY_ORDER if trims else spec.reorder_packets,
        }
    return settings


@dataclass(frozen=True, slots=True)
class LongestPath:
    """The path with the longest round trip of a packet and its acknowledgement without queues.

    Parameters
    ----------
    rate_gbps
        Rate of the slower link at its ends.
    """

    base_rtt_ps: int
    rate_gbps: float

    @property
    def product_bytes(self) -> float:
        """Return the bandwidth-delay product."""
        return self.base_rtt_ps * self.rate_gbps / 8000

    @classmethod
    def of(cls, topology: NetworkTopology, routes: Routes, spec: specs.UltraEthernetTransport) -> "LongestPath":
        """Return a network's longest path: from the host that is farthest from host 0 to the one farthest from it.

        It is the longest of all in a tree, and in a network whose hosts are alike.
        """

        def path(source: int, target: int) -> LongestPath:
            links = [topology.links[number].spec for number in routes.path(topology.links, source, target)]
            both_ways = sum(
                2 * link.delay_us + (spec.packet_bytes + spec.ack_bytes) * 0.008 / link.rate_gbps for link in links
            )
            return cls(round(both_ways * PS_PER_US), min(links[0].rate_gbps, links[-1].rate_gbps))

        def farthest(source: int) -> int:
            others = (host for host in range(topology.hosts) if host != source)
            return max(others, key=lambda host: path(source, host).base_rtt_ps)

        end = farthest(0)
        return path(end, farthest(end))


SWITCH_RULES_ROW: Final = row_type(
    (i8, "discipline buffer limit_bytes limit_packets alpha_1024 ecn_min ecn_max ecn_probability drop_incapable"),
    (i8, "trim_packets trims_either path_choice mark_above"),
    ((i8, DROP_CLASSES), "drop_above"),
    ((f8, OWN_SETTINGS_MAX), "own"),
)


class SwitchRules(Row, fields=SWITCH_RULES_ROW):
    """`dlcp.sim.scenario.SwitchSpec` as numbers.

    Attributes
    ----------
    alpha_1024
        ``alpha`` in units of 1/1024.
    own
        Settings of a discipline of another package.
    ecn_probability
        Highest marking probability, in units of 1 / `DRAW_LIMIT`.
    mark_above, drop_above
        Queue depths in packets; ``drop_above`` is by drop class.
    """

    @classmethod
    def of(cls, spec: SwitchSpec) -> "SwitchRules":
        """Return the rules of a `SwitchSpec`."""
        # The P4 program marks by `mark_at`; pFabric does without marks.
        ecn = spec.ecn if spec.discipline in ("fifo", "priority", "trim") else None
        own = [*OWN_DISCIPLINES].index(spec.discipline) if spec.discipline in OWN_DISCIPLINES else -1
        return cls(
            discipline=Discipline[spec.discipline.upper()] if own < 0 else OWN_KIND + own,
            buffer=BufferScope[spec.buffer.upper()],
            limit_bytes=spec.buffer_packets * spec.packet_bytes,
            limit_packets=spec.buffer_packets,
            alpha_1024=round(spec.alpha * 1024),
            ecn_min=ecn.min_packets if ecn else NO_LIMIT,
            ecn_max=ecn.max_packets if ecn else NO_LIMIT,
            ecn_probability=round(ecn.max_probability * DRAW_LIMIT) if ecn else 0,
            drop_incapable=ecn is not None and ecn.drop_incapable,
            trim_packets=spec.trim_packets,
            trims_either=spec.trim_choice == "random",
            path_choice=PathChoice[spec.spraying.upper()],
            mark_above=int(spec.mark_at * spec.buffer_packets),
            drop_above=(NO_LIMIT, *(int(share * spec.buffer_packets) for share in spec.drop_at)),
            own=setting_values(spec.discipline, spec.settings),
        )


def as_rows(records: Sequence[Any], kind: np.dtype[Any] = TRANSPORT_ROW) -> NDArray[Any]:
    """Return `TransportRules`, or others of a type, as a structured array for the kernel."""
    return np.array([tuple(getattr(record, name) for name in kind.names or ()) for record in records], kind)


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
class NetworkTables:
    """Everything that stays constant during a run, and the initial routes.

    Attributes
    ----------
    node_random, node_salt
        Random state and hash salt, by node.
    profiles
        uint8 (n, `PROFILE_CELLS`): drop classes; the hash of a packet chooses the cell. The last one is for packets of
        the lower plane in messages that are encoded.
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

    @property
    def lower_profile(self) -> int:
        """Return the drop-class profile of lower planes."""
        return len(self.profiles) - 1


def make_plan(
    topology: NetworkTopology,
    switches: SwitchSpec,
    transports: Mapping[str, specs.TransportSpec],
    class_shares: Sequence[Sequence[float]],
    seed: int,
) -> NetworkTables:
    """Return the plan of a network; ``seed`` feeds one random stream per node and per link.

    Raises
    ------
    ValueError
        There are more than `TRANSPORTS_MAX` transports.
    """
    if len(transports) > specs.TRANSPORTS_MAX:
        raise ValueError(f"there are {len(transports)} transports; a scenario has at most {specs.TRANSPORTS_MAX}")
    routes = Routes.of(topology)
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
            int(random),
        )
        for link, random in zip(topology.links, link_seeds, strict=True)
    ]
    # A DLCP transport's own shares follow those of the messages.
    dlcp = [spec for spec in transports.values() if isinstance(spec, specs.DlcpTransport)]
    shares = [*class_shares, *(spec.class_shares for spec in dlcp), LOWER_PLANE_SHARES]
    rules = tuple(
        TransportRules.of(spec, topology, routes, switches, len(class_shares) + dlcp.index(spec) if spec in dlcp else 0)
        for spec in transports.values()
    )
    return NetworkTables(
        topology,
        links,
        routes,
        SwitchRules.of(switches),
        node_seeds,
        salts,
        rules,
        np.array([_profile(item) for item in shares], np.uint8),
        seed,
    )


def _profile(shares: Sequence[float]) -> NDArray[np.uint8]:
    """Fill `PROFILE_CELLS` cells with drop classes in proportion to their shares, by largest remainder."""
    exact = np.asarray(shares, float) * PROFILE_CELLS
    cells = np.floor(exact).astype(np.int64)
    short = PROFILE_CELLS - int(cells.sum())
    cells[np.argsort(cells - exact, kind="stable")[:short]] += 1
    return np.repeat(np.arange(len(cells), dtype=np.uint8), cells)
