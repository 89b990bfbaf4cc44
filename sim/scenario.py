# SPDX-License-Identifier: Apache-2.0
"""Describe a simulation: switches, transports, background traffic, failures, and the seed. Nothing here runs.

A `NetworkSetting` describes everything but the jobs. Jobs say what is sent: a `CollectiveJob` in a `Scenario`, training
jobs in an experiment (`dlcp.sim.experiments.experiment.RunSetting`), a `TraceJob` in both, or any SimPy process that
submits graphs to a `dlcp.sim.simulation.Simulation`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dlcp.inputs.document import PlaceError
from dlcp.inputs.error_text import nearest
from dlcp.sim.limits import (
    FLOPS_MAX,
    HOSTS_MAX,
    MAGNITUDE_MAX,
    PACKET_BYTES_MAX,
    SIZE_BYTES_MAX,
    Bytes,
    BytesOrNone,
    Count,
    HostNumber,
    Hosts,
    Moment,
    Packets,
    QueueNumber,
    Ratio,
    Seconds,
    Seed,
    check_within,
)
from dlcp.sim.network.nodes import NetworkTopology
from dlcp.sim.network.topology import Star, TopologySpec
from dlcp.sim.transports.plugins import OWN_DISCIPLINES, AnyTransport, setting_values
from dlcp.sim.transports.specs import TRANSPORTS_MAX, DctcpTransport, InterleavingTransport, NsccTransport


class EcnSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a packet is marked, by the number of packets in its queue.

    Between ``min_packets`` and ``max_packets`` the probability grows from 0 to ``max_probability`` (RED on the
    instantaneous queue); from ``max_packets`` on, every packet is marked. Equal values give DCTCP's step. With
    ``drop_incapable``, packets that do not support ECN are dropped instead, as in RED.
    """

    min_packets: Packets = 65
    max_packets: Packets = 65
    max_probability: Ratio = 1.0
    drop_incapable: bool = False


class SwitchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How every switch treats packets: queueing, dropping, marking and load balancing. Queue 7 is the most urgent.

    Parameters
    ----------
    discipline
        ``fifo``; ``priority`` (eight queues, the most urgent first); ``dlcp`` (the same queues, with the decisions of
        the compiled P4 program: drops by queue and drop class within each message's budget, marks by depth);
        ``pfabric`` (sends the flow with the fewest packets left first, drops from the flow with the most left);
        ``trim`` (NDP and Ultra Ethernet: a packet that does not fit loses its payload, and headers go first); or one of
        another package (`dlcp.sim.transports.plugins`).
    settings
        Of a discipline of another package: numbers that replace its defaults.
    buffer_packets
        Buffer size in packets of ``packet_bytes``.
    buffer
        Scope of the buffer: each queue, each port, or the whole switch. With ``dlcp``, an empty queue accepts a packet
        even if the buffer is full.
    alpha
        With a buffer for the whole switch: a port may use this multiple of the free space (dynamic thresholds,
        Choudhury and Hahne, 1998).
    ecn
        Marking thresholds; None means no marks. With ``dlcp``, the program marks by ``mark_at`` instead. With ``trim``,
        a packet is marked as it leaves, not as it arrives.
    drop_at
        With ``dlcp``: the shares of ``buffer_packets`` above which a queue drops classes 1 to 7.
    mark_at
        With ``dlcp``: the share of ``buffer_packets`` above which a queue marks.
    trim_packets
        With ``trim``: how many packets wait with their payload. NDP's authors use 8, Ultra Ethernet's a
        bandwidth-delay product.
    trim_choice
        With ``trim``: which packet loses its payload in a full queue. ``arriving``; or ``random``: that one or the last
        in the queue, as by NDP's authors. Senders whose packets arrive in step are then treated alike.
    spraying
        How a switch chooses the path of a sprayed packet: by a hash of the flow and the packet's number (in the
        P4 program, a flow's packets take the paths in turn), at random, round robin, or by the shortest queue.
    """

    discipline: str = "fifo"
    settings: dict[str, Annotated[float, Meta(ge=-MAGNITUDE_MAX, le=MAGNITUDE_MAX)]] = {}
    buffer_packets: Packets = 240
    packet_bytes: Annotated[int, Meta(ge=64, le=PACKET_BYTES_MAX)] = 1500
    buffer: Literal["queue", "port", "switch"] = "port"
    alpha: Annotated[float, Meta(ge=1 / 1024, le=1024)] = 1.0
    ecn: EcnSpec | None = msgspec.field(default_factory=EcnSpec)
    drop_at: tuple[Ratio, ...] = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    mark_at: Ratio = 0.27
    trim_packets: Packets = 8
    trim_choice: Literal["arriving", "random"] = "arriving"
    spraying: Literal["hash", "random", "round_robin", "least_queue"] = "hash"

    def __post_init__(self) -> None:
        """Reject an unknown discipline, and thresholds that would drop valuable packets first."""
        setting_values(self.discipline, self.settings)
        if len(self.drop_at) != 7:
            raise ValueError(f"drop_at takes 7 shares between 0 and 1, for drop classes 1 to 7, got {self.drop_at}")
        if list(self.drop_at) != sorted(self.drop_at, reverse=True):
            raise ValueError(f"drop_at has to fall from class 1 to class 7, got {self.drop_at}")
        if self.ecn is not None and self.ecn.max_packets < self.ecn.min_packets:
            raise ValueError(f"ecn: max_packets {self.ecn.max_packets} is less than min_packets {self.ecn.min_packets}")


Fidelity = Literal["packets", "flows"]
"""Whether a simulation moves packets or flows."""
Placement = Literal["packed", "spread", "random"]
FlowSizes: TypeAlias = tuple[tuple[float, float], ...]
"""A cumulative distribution: (bytes, probability that a flow is no larger), ascending; the last probability is 1.
Values in between are interpolated."""
_Entry = Annotated[float, Meta(ge=0, le=SIZE_BYTES_MAX)]
_ROUNDING: Final = 1e-6
"""How far the last share of a table may be from 1: tables have up to six digits."""
_WIRE_LOAD_MAX: Final = 2.0
"""Largest load with headers: more is no realistic traffic, but a little above 1 may be."""
_REPEATS_MAX: Final = 1_000_000
"""Most times that a pattern's flows begin: each is a graph of its own."""

_PACKET_BYTES: Final = 1460
_WEB_SEARCH: Final = (
    (6, 6, 13, 19, 33, 53, 133, 667, 1333, 3333, 6667, 20000),
    (0.0, 0.15, 0.2, 0.3, 0.4, 0.53, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0),
)
_DATA_MINING: Final = (
    (1, 2, 3, 7, 267, 2107, 66667, 666667),
    (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
)
WORKLOADS: Final = {
    name: tuple((float(size * _PACKET_BYTES), share) for size, share in zip(sizes, shares, strict=True))
    for name, (sizes, shares) in (("web_search", _WEB_SEARCH), ("data_mining", _DATA_MINING))
}
"""(bytes, share of flows no larger). Web search: DCTCP (SIGCOMM 2010); data mining: VL2 (SIGCOMM 2009); both in packets
of 1,460 bytes as PIAS' public simulations tabulate them (PIAS-NS2, ``scripts/CDF_dctcp.tcl`` and ``CDF_vl2.tcl``)."""


def _distribution(table: FlowSizes) -> FlowSizes:
    """Return a table of flow sizes with shares as fractions; per cent, which end with 100, are converted.

    Raises
    ------
    PlaceError
        It is no distribution; ``steps`` lead to the row.
    """
    if not table:
        raise PlaceError("the table of sizes is empty; give rows [size, share of flows no larger]", "sizes")
    size, share = table[-1]
    if abs(share - 1) > _ROUNDING and share != 100:
        swapped = " (are the columns swapped?)" if size in (1, 100) else ""
        raise PlaceError(
            f"the last share is {share:g}{swapped}; rows are [size, share of flows no larger], and the last share is "
            "1, or 100 if shares are in per cent",
            *("sizes", len(table) - 1),
        )
    for number, (before, after) in enumerate(pairwise(table), 1):
        if after[0] < before[0] or after[1] < before[1]:
            raise PlaceError(f"{list(after)} follows {list(before)}; sizes and shares must ascend", "sizes", number)
    if size < 1:
        raise PlaceError("the largest size is below 1 byte; give sizes in bytes", "sizes", len(table) - 1)
    whole = 100 if share == 100 else 1
    return (*((each, min(1.0, below / whole)) for each, below in table[:-1]), (size, 1.0))


class TrafficSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Flows of other applications between random hosts, arriving as a Poisson process.

    Parameters
    ----------
    load
        Offered load of the flows, as a share of the sum of the hosts' link rates.
    sizes
        A workload in `WORKLOADS`, or the rows of a table: a size, and the share of flows that are no larger. Both
        ascend, and the last share is 1, or 100 if shares are in per cent.
    size_unit
        The unit of the table's sizes: ``bytes``, or ``packets`` of 1,460 bytes. Without it, sizes are bytes; a table
        whose mean is below a packet is refused as unclear.
    most_bytes
        Larger flows are cut to this size; 0 means no limit. More flows make up for it, so the load stays the same. Use
        it to exclude flows that would take longer than the run.
    """

    name: str = "background"
    load: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    sizes: Literal["web_search", "data_mining"] | tuple[tuple[_Entry, _Entry], ...] = "web_search"
    size_unit: Literal["bytes", "packets"] | None = None
    most_bytes: BytesOrNone = 0
    transport: str = "dctcp"
    start_s: Seconds = 0.0
    stop_s: Moment = 0.01

    def __post_init__(self) -> None:
        """Reject a table that is no distribution, and traffic that ends before it begins."""
        _check_order(self.start_s, self.stop_s)
        if isinstance(self.sizes, str):
            return
        table = _distribution(self.sizes)
        if len(table) > 2 and self.size_unit is None and mean_size(table) < _PACKET_BYTES:
            raise PlaceError(
                f"the mean size is {mean_size(table):,.0f}, and it is unclear of what: add size_unit, bytes or packets "
                f"of {_PACKET_BYTES:,} bytes",
                "sizes",
            )
        if self.size_unit == "packets" and table[-1][0] * _PACKET_BYTES > SIZE_BYTES_MAX:
            raise PlaceError(f"the largest size is {table[-1][0]:g} packets; at most {SIZE_BYTES_MAX:,} bytes", "sizes")

    @property
    def flow_sizes(self) -> FlowSizes:
        """Return the distribution of flow sizes in bytes."""
        if isinstance(self.sizes, str):
            table = WORKLOADS[self.sizes]
        else:
            unit = _PACKET_BYTES if self.size_unit == "packets" else 1
            table = tuple((size * unit, share) for size, share in _distribution(self.sizes))
        return tuple((min(size, float(self.most_bytes)), share) for size, share in table) if self.most_bytes else table

    def flows_per_s(self, topology: NetworkTopology) -> float:
        """Return the mean number of flows that begin in a second."""
        # A host's first link leads to the network; any other leads only to GPUs in the same server.
        first = {link.source: link.spec.rate_gbps for link in reversed(topology.links)}
        rate_bps = sum(first[host] for host in range(topology.hosts)) * 1e9
        return self.load * rate_bps / 8 / mean_size(self.flow_sizes)

    def check_load(self, topology: NetworkTopology, transport: AnyTransport) -> None:
        """Reject a load of less than one flow, and flows so small that their headers alone overload the network.

        Raises
        ------
        ValueError
            On average, fewer begin, or with headers they are more than `_WIRE_LOAD_MAX` times the links' rates.
        """
        mean, payload = mean_size(self.flow_sizes), transport.packet_bytes - transport.header_bytes
        wire_load = self.load * (1 + transport.header_bytes * max(1.0, mean / payload) / mean)
        if wire_load > _WIRE_LOAD_MAX:
            raise ValueError(
                f"flows of {self.name} have {mean:,.0f} bytes on average, and with headers of {transport.header_bytes} "
                f"they are {wire_load:.1f} times what the links carry; lower load or raise most_bytes"
            )
        flows = self.flows_per_s(topology) * (self.stop_s - self.start_s)
        if flows < 1:
            raise ValueError(
                f"{flows:.3g} flows of {self.name} begin on average between start_s and stop_s; raise load or stop_s"
            )


class FlowPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Flows of one size that begin together, once or again and again.

    Parameters
    ----------
    pattern
        ``permutation``: every host sends to another one, and receives from one. ``incast``: all send to one host.
        ``all_to_all``: every host sends to all others.
    hosts
        How many hosts take part, chosen at random, each time anew; 0 means all.
    every_s
        Time from one beginning to the next, until ``stop_s``, as in microbursts; 0 means once.
    """

    name: str = "flows"
    pattern: Literal["permutation", "incast", "all_to_all"] = "permutation"
    size_bytes: Bytes = 1_000_000
    hosts: Annotated[int, Meta(ge=0, le=HOSTS_MAX)] = 0
    transport: str = "dctcp"
    start_s: Seconds = 0.0
    every_s: Seconds = 0.0
    stop_s: Moment = 0.01

    def __post_init__(self) -> None:
        """Reject repetitions that end before they begin, and too many of them."""
        if self.every_s:
            _check_order(self.start_s, self.stop_s)
            check_within("the number of times that the flows begin", self.times, _REPEATS_MAX, "raise every_s")

    @property
    def times(self) -> int:
        """How often the flows begin."""
        return math.ceil((self.stop_s - self.start_s) / self.every_s) if self.every_s else 1

    def check_hosts(self, hosts: int) -> None:
        """Reject a number of hosts that cannot take part in a network with ``hosts``.

        Raises
        ------
        ValueError
            It is 1, or larger.
        """
        if self.hosts == 1 or self.hosts > hosts:
            raise ValueError(f"{self.hosts} hosts cannot take part in {self.name}; choose 2 to {hosts}, or 0 for all")


def _check_order(start_s: float, stop_s: float) -> None:
    if stop_s <= start_s:
        raise PlaceError(f"stop_s is {stop_s:g}, which is not after start_s, {start_s:g}", "stop_s")


def draw_sizes(sizes: FlowSizes, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return flow sizes in bytes for numbers between 0 and 1, by the inverse of the distribution."""
    values, probabilities = np.array(sizes, float).T
    drawn: NDArray[np.int64] = np.maximum(1, np.interp(uniform, probabilities, values)).astype(np.int64)
    return drawn


def mean_size(sizes: FlowSizes) -> float:
    """Return the mean of a distribution in bytes."""
    values, probabilities = np.array(sizes, float).T
    middle = (values[1:] + values[:-1]) / 2
    return float(values[0] * probabilities[0] + (middle * np.diff(probabilities)).sum())


class CollectiveJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The simplest job: in each step, compute and then all-reduce one buffer.

    Parameters
    ----------
    hosts
        One host per rank.
    size_bytes
        Size of the buffer that the ranks reduce in each step.
    collective
        ``ring``, ``direct`` (every rank owns a shard: reduce-scatter and all-gather in one hop each) or
        ``parameter_server`` (through the first ``servers`` of ``hosts``; the rest are workers).
    compute_s
        Time from the end of a step's all-reduce to the beginning of the next.
    loss_bound
        The share of a contribution's packets that may be lost, if the transport bounds loss. Results are always
        delivered whole.
    queue
        Queue of the gradients; 7 is the most urgent.
    """

    name: str
    hosts: tuple[HostNumber, ...]
    size_bytes: Bytes
    collective: Literal["ring", "direct", "parameter_server"] = "ring"
    transport: str = "dctcp"
    servers: Hosts = 1
    steps: Count = 1
    compute_s: Seconds = 0.0
    start_s: Seconds = 0.0
    loss_bound: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    queue: QueueNumber = 4


class TraceJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job that repeats what a trace recorded: computations with their durations, messages over the simulated network.

    Parameters
    ----------
    file
        A GOAL file, text or binary; a file of a Chakra trace, or its name without ``.RANK.et``; a trace of
        ``dlcp train --trace``; or a profile of PyTorch: of one rank for all ranks alike, or a folder with one of each.
        Text may be compressed with gzip.
    hosts
        A host for each rank; by default, ``placement`` chooses among those without a job.
    ranks
        Number of ranks, if a single file of a rank stands for all of them.
    repeat
        How often the job runs, each time when all ranks have ended.
    collective
        The algorithm of all-reduces; by default, ``direct`` for DLCP's traces and ``ring`` for others.
    eager_bytes
        The largest message whose sender does not wait for the receiver; by default 65,535 for GOAL, as in LogGOPSim,
        and no limit for others.
    compute_factor
        Factor on the durations of computations: 0.5 is a processor that is twice as fast.
    ranks_per_node
        Consecutive ranks that share a node: messages among them take no time, as if their links within it were much
        faster, and only traffic between nodes crosses the network.
    flops
        Operations per second of a GPU, for Chakra's computations without a duration.
    groups
        The ranks of process groups by name, for a Chakra trace that does not list them.
    loss_bound
        Of contributions to all-reduces, if the transport bounds loss.
    queue
        Queue of all messages, 7 the most urgent; -1 takes the transport's.
    """

    name: str
    file: str
    hosts: tuple[HostNumber, ...] = ()
    placement: Placement = "packed"
    ranks: Hosts | None = None
    repeat: Count = 1
    transport: str = "dctcp"
    collective: Literal["ring", "direct", "tree"] | None = None
    eager_bytes: BytesOrNone | None = None
    compute_factor: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    ranks_per_node: Count = 1
    flops: Annotated[float, Meta(ge=1, le=FLOPS_MAX)] | None = None
    groups: dict[str, tuple[HostNumber, ...]] = {}
    loss_bound: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    queue: Annotated[int, Meta(ge=-1, le=7)] = -1
    start_s: Seconds = 0.0


def choose_hosts(free: Sequence[int], size: int, placement: Placement, random: np.random.Generator) -> list[int]:
    """Return ``size`` of the hosts in ``free``."""
    if placement == "packed":
        return list(free[:size])
    if placement == "spread":
        return [free[index * len(free) // size] for index in range(size)]
    return [free[int(index)] for index in random.permutation(len(free))[:size]]


class FailureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A link that loses packets or fails for a while, in both directions.

    Parameters
    ----------
    nodes
        Names of the two ends, as in `dlcp.sim.network.topology.NetworkTopology.names`: ``host3``, ``leaf0``, …
    loss_ratio
        Share of packets lost at random. 1 is a failed link; routes avoid it ``reroute_s`` after the failure.
    """

    nodes: tuple[str, str]
    loss_ratio: Ratio = 1.0
    start_s: Seconds = 0.0
    stop_s: Moment = float("inf")
    reroute_s: Seconds = 0.0

    def __post_init__(self) -> None:
        """Reject a failure that ends before it begins."""
        _check_order(self.start_s, self.stop_s)


class NetworkSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything but the jobs: the network, transports, background traffic, failures, and the seed.

    Parameters
    ----------
    transports
        Transports by the names that jobs, traffic and patterns use.
    stop_s
        Latest end of a run in simulated time; packets may still be in flight.
    engine
        ``packets`` moves every packet; ``flows`` approximates messages as fluid, which scales to many thousand hosts.
    any_discipline
        Whether transports may run on switches that they were not made for, such as ``ndp`` without trimming. That is no
        baseline for a comparison.
    """

    topology: TopologySpec = msgspec.field(default_factory=Star)
    switches: SwitchSpec = msgspec.field(default_factory=SwitchSpec)
    transports: Annotated[dict[str, AnyTransport], Meta(max_length=TRANSPORTS_MAX)] = msgspec.field(
        default_factory=lambda: {"dctcp": DctcpTransport()}
    )
    traffic: tuple[TrafficSpec, ...] = ()
    patterns: tuple[FlowPattern, ...] = ()
    failures: tuple[FailureSpec, ...] = ()
    seed: Seed = 1
    stop_s: Moment = 3600.0
    engine: Fidelity = "packets"
    any_discipline: bool = False

    def check_engine(self, engine: Fidelity) -> None:
        """Reject what an engine cannot represent.

        Raises
        ------
        ValueError
            Flows are simulated, but a transport's priorities change while a message is sent, as with pFabric and PIAS,
            or its window depends on the time since a step began, as with MLTCP.
        """
        for name, transport in self.transports.items():
            kind = transport.__struct_config__.tag
            if engine == "flows" and kind in ("pfabric", "pias"):
                raise ValueError(
                    f"engine flows does not support {kind}, transport {name!r}, whose priorities change while a "
                    "message is sent; use engine packets, or another transport"
                )
            if engine == "flows" and isinstance(transport, InterleavingTransport) and transport.step_gap_us:
                raise ValueError(f"engine flows has no windows, as step_gap_us of {name!r} needs; use engine packets")

    def check_senders(self, *fields: str) -> None:
        """Reject unknown or mismatched transports, and senders of the same name, among those in some fields.

        Raises
        ------
        dlcp.inputs.document.PlaceError
            A sender is wrong; ``steps`` lead to its place.
        """
        every = [(field, number, spec) for field in fields for number, spec in enumerate(getattr(self, field))]
        for field, number, spec in every:
            if spec.transport not in self.transports:
                known = nearest(spec.transport, self.transports)
                raise PlaceError(f"there is no transport {spec.transport!r}{known}", field, number, "transport")
            transport, discipline = self.transports[spec.transport], self.switches.discipline
            kind = str(transport.__struct_config__.tag)
            own = OWN_DISCIPLINES.get(discipline)
            fits = discipline in transport.disciplines or (own is not None and kind in own.transports)
            if not fits and not self.any_discipline:
                fitting = ", ".join(transport.disciplines)
                raise PlaceError(
                    f"{spec.transport!r} is {kind}, made for switches with the discipline {fitting}, not {discipline}: "
                    "change one of them, or set any_discipline if that is what you want to see",
                    *(field, number, "transport"),
                )
            if isinstance(transport, NsccTransport) and not self.any_discipline:
                self._check_marks(spec.transport)
        names = [spec.name for _, _, spec in every]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PlaceError(f"two jobs or kinds of traffic are called {twice!r}; rename one of them")

    def _check_marks(self, transport: str) -> None:
        """Reject switches that never mark a packet of a transport that needs marks."""
        switches, ecn = self.switches, self.switches.ecn
        room = switches.trim_packets if switches.discipline == "trim" else switches.buffer_packets
        if ecn is None or ecn.min_packets >= room:
            marks = "never mark" if ecn is None else f"mark from {ecn.min_packets} packets, where only {room} wait"
            raise PlaceError(
                f"{transport!r} is nscc, which needs marks, but switches {marks}: mark from 0.2 to 0.8 of the "
                "bandwidth-delay product (ecn: min_packets and max_packets), and trim at one (trim_packets)",
                *("switches", "ecn"),
            )


class Scenario(NetworkSetting, frozen=True, kw_only=True):
    """A complete simulation with collective jobs and traced jobs."""

    jobs: tuple[CollectiveJob, ...] = ()
    traces: tuple[TraceJob, ...] = ()
