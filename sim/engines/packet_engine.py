# SPDX-License-Identifier: Apache-2.0
"""The interface of all engines: graphs with their streams in; completions, records and counts out.

`dlcp.sim.engines.kernel` is the fast engine, `dlcp.sim.engines.reference` the simple one to check it against.
`tests/sim/test_sim_agreement.py` checks that they agree exactly. `dlcp.sim.engines.flows` moves no packets and
approximates both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import path_hashes, slot_owners
from dlcp.sim.engines.network_tables import NetworkTables, as_rows
from dlcp.sim.graphs.graph import OWN_LANE, Graph, row_type
from dlcp.sim.limits import check_packets
from dlcp.sim.network.nodes import Routes
from dlcp.values.planes import FULL_BITS, PlaneLayout
from dlcp.wire import UDP_PORT_BASE, Queue

ORDINARY_PORT: Final = 5001
"""UDP destination port of all traffic but DLCP's: any port that is not DLCP's would do."""
PacketEngineName = Literal["auto", "kernel", "reference"]
"""``kernel`` (Numba) and ``reference`` (SimPy) give the same results; ``auto`` is the kernel if Numba is installed."""
EngineName = PacketEngineName | Literal["flows"]
"""``flows`` approximates messages as fluid. With ``auto``, the scenario chooses between flows and packets."""


class EngineCounter(IntEnum):
    """Indices of an engine's counters."""

    EVENTS = 0
    HOPS_DATA = 1
    HOPS_CONTROL = 2
    SENT = 3
    RETRANSMITTED = 4
    ARRIVED = 5
    DUPLICATES = 6
    LATE_ACKS = 7
    DECLARED_LOST = 8
    TIMEOUTS = 9
    PROBES = 10
    MARKS = 11
    TRIMS = 12
    BUDGET_SPENT = 13
    SLOT_TAKEN = 14
    DROPS_POLICY = 15
    DROPS_TAIL = 16
    DROPS_EARLY = 17
    DROPS_LINK = 18
    DROPS_ROUTE = 19
    MESSAGES_DONE = 20
    TAIL_PROBES = 21
    DROPS_BY_CLASS = 24
    """Cells 24 to 31: packets dropped in switches and on links, by drop class."""


COUNTER_CELLS: Final = 32


def counts_by_name(counts: NDArray[np.int64]) -> dict[str, int]:
    """Return an engine's counts by name, without the drops by class."""
    return {cell.name.lower(): int(counts[cell]) for cell in EngineCounter if cell != EngineCounter.DROPS_BY_CLASS}


def drops_by_class(counts: NDArray[np.int64]) -> list[int]:
    """Return the number of dropped packets by drop class, 0 to 7."""
    dropped: list[int] = counts[EngineCounter.DROPS_BY_CLASS :].tolist()
    return dropped


class CompletionKind(IntEnum):
    """Types of completions. A graph is closed when nothing in the network refers to it any more."""

    NODE_DONE = 0
    GRAPH_DONE = 1
    GRAPH_CLOSED = 2


class Completion(NamedTuple):
    """A completed node or graph; ``node`` is -1 for graphs."""

    kind: CompletionKind
    graph: int
    node: int = -1


PORT_BYTES: Final = row_type((np.int64, "sent_bytes bytes bytes_max"))
"""Bytes that a link has carried, and bytes queued for it at a switch: now, and the most ever."""
STREAM_START: Final = row_type((np.int64, "serial source target transport path_hash reverse_path_hash single_use"))
"""A new stream, in the form that engines need. A single-use stream carries one message and is freed with it."""


MESSAGE_SIZE: Final = row_type((np.int32, "packets last_bytes upper allowed budget"), (np.int16, "profile"))
"""A message's packets, all 0 for a node that sends nothing: their number, and the payload of the last one. The first
``upper`` packets have the upper digits of a message that is encoded (`dlcp.values.planes`), and are in drop class 0;
otherwise there are none. ``allowed`` packets may stay lost, and each switch may drop ``budget`` of these. ``profile``:
number of the distribution of drop classes."""


PACKET_OUTCOME: Final = row_type((np.uint8, "drop_class"), (np.bool_, "delivered"))
"""A packet's drop class, and whether it arrived before its message was done."""


@dataclass(slots=True)
class Submission:
    """A graph with values that both engines derive from it.

    Attributes
    ----------
    sizes
        `MESSAGE_SIZE` (n,) in full precision.
    streams
        int64 (n,): serial number of each message's stream, -1 for other nodes.
    new_streams
        `STREAM_START` (n,) of the new streams.
    bounded
        Whether a message has a loss bound.
    owner
        The hash by which switches identify a message.
    salt
        Salt of the hashes that choose drop classes.
    """

    graph: Graph
    number: int
    now_ps: int
    sizes: NDArray[Any]
    streams: NDArray[np.int64]
    new_streams: NDArray[Any]
    bounded: NDArray[np.bool_]
    owner: NDArray[np.int64]
    queue: NDArray[np.int8]
    salt: NDArray[np.int64]


class PacketEngine(Protocol):
    """Carries packets through the network."""

    plan: NetworkTables

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the counts, indexed by `EngineCounter`."""

    @property
    def now_ps(self) -> int:
        """Return the time of the latest event."""

    def submit(self, submission: Submission) -> None:
        """Start a graph. A node without predecessors begins after its delay."""

    def run(self, limit_ps: int) -> list[Completion]:
        """Run to the end of the first instant with a completion, at most to ``limit_ps``."""

    def has_events(self) -> bool:
        """Return whether any events are pending."""

    def records(self, number: int) -> NDArray[Any]:
        """Return the records of a graph that has not been forgotten, `dlcp.sim.graphs.graph.NODE_RECORD` (n,)."""

    def outcomes(self, number: int, nodes: NDArray[np.int64]) -> NDArray[Any]:
        """Return the fate of the packets of finished messages, `PACKET_OUTCOME`, message after message."""

    def resize(self, number: int, nodes: NDArray[np.int64], sizes: NDArray[Any]) -> None:
        """Set the sizes of messages that have not begun, `MESSAGE_SIZE` (nodes,). Others keep theirs.

        A message has from 1 packet to as many as at first.
        """

    def forget(self, number: int) -> None:
        """Free the memory of a closed graph."""

    def set_loss(self, links: Sequence[int], loss: int) -> None:
        """Set the loss probability of links, in units of 1 / `dlcp.sim.arithmetic.DRAW_LIMIT`."""

    def set_routes(self, routes: Routes) -> None:
        """Replace the routes."""

    def port_bytes(self) -> NDArray[Any]:
        """Return the bytes at each link, `PORT_BYTES` (links,)."""


def source_port(serial: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the UDP source ports of streams; streams between the same hosts differ in them."""
    return 49152 + serial % 4096


class Submitter:
    """Prepares graphs for an engine, and keeps track of the streams."""

    def __init__(self, plan: NetworkTables) -> None:
        self.plan = plan
        self._transports = as_rows(plan.transports)
        self._streams: dict[int, int] = {}
        self._next_stream = 0
        self._next_graph = 0

    def prepare(self, graph: Graph, now_ps: int) -> Submission:
        """Return the submission of a graph that begins at ``now_ps``.

        Raises
        ------
        ValueError
            A message is from a host to itself, or names a host or a transport that does not exist.
        dlcp.sim.limits.LimitError
            It has more packets than engines can count.
        """
        nodes, rules = graph.nodes, self._transports
        sends = nodes["size_bytes"] > 0
        self._check(nodes, sends)
        # Column by column: a graph may have millions of nodes.
        transport, bounded = nodes["transport"], self._bounded(nodes)
        owner = np.zeros(len(nodes), np.int64)
        if bounded.any():
            owner[bounded] = slot_owners(*(nodes[name][bounded] for name in ("job", "step", "message", "sender")))
        streams, new_streams = self._assign_streams(nodes, np.flatnonzero(sends))
        preset = (rules["control_queue"][transport] == Queue.ORDINARY) | (nodes["queue"] < 0)
        number = self._next_graph
        self._next_graph += 1
        return Submission(
            graph=graph,
            number=number,
            now_ps=now_ps,
            sizes=self.sizes(nodes),
            streams=streams,
            new_streams=new_streams,
            bounded=bounded,
            owner=owner,
            queue=np.where(preset, rules["queue"][transport], nodes["queue"]).astype(np.int8),
            salt=(nodes["step"] * np.int64(131) + nodes["message"]) * 257 + nodes["sender"] + self.plan.seed * 65537,
        )

    def sizes(self, nodes: NDArray[Any], bits: int = FULL_BITS, value_bytes: int = 4) -> NDArray[Any]:
        """Return the sizes of messages, `MESSAGE_SIZE` (n,).

        Parameters
        ----------
        nodes
            Their descriptions, `dlcp.sim.graphs.graph.NODE_ROW` (n,).
        bits, value_bytes
            Bits of each value that are sent, and bytes of a value in full precision. Like real ranks, messages are sent
            in full precision if they would not have fewer packets otherwise.
        """
        transport, size_bytes, shares = nodes["transport"], nodes["size_bytes"], nodes["class_shares"]
        payload = self._transports["payload"][transport]
        sizes = np.zeros(len(nodes), MESSAGE_SIZE)
        sizes["profile"] = np.where(shares < 0, self._transports["profile"][transport], shares)
        loss_bound = np.where(self._bounded(nodes), nodes["loss_bound"], 0.0)
        if bits < FULL_BITS:
            plain, size_bytes = size_bytes, size_bytes.copy()
            for size, most in set(zip(plain.tolist(), payload.tolist(), strict=True)):
                if layout := PlaneLayout.of(size // value_bytes, value_bytes, bits, most):
                    own = (plain == size) & (payload == most)
                    size_bytes[own], sizes["upper"][own] = layout.bytes, layout.packets
                    sizes["profile"][own] = self.plan.lower_profile
                    loss_bound[own] = np.minimum(loss_bound[own], layout.loss_bound_max)
        packets = -(-size_bytes // payload)
        if len(packets):
            largest = int(packets.argmax())
            check_packets(int(size_bytes[largest]), int(payload[largest]))
        sizes["packets"] = packets
        sizes["last_bytes"] = np.where(packets > 0, size_bytes - (packets - 1) * payload, 0)
        sizes["allowed"] = np.floor(loss_bound * packets + 1e-9)
        sizes["budget"] = np.minimum(sizes["allowed"] // self._transports["switch_hops"][transport], 0xFFFF)
        return sizes

    def _bounded(self, nodes: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which nodes are messages with a loss bound."""
        dlcp = self._transports["is_dlcp"][nodes["transport"]] != 0
        bounded: NDArray[np.bool_] = (nodes["size_bytes"] > 0) & dlcp & (nodes["loss_bound"] > 0)
        return bounded

    def _check(self, nodes: NDArray[Any], sends: NDArray[np.bool_]) -> None:
        hosts, transports = self.plan.hosts, len(self.plan.transports)
        source, target, transport = nodes["source"], nodes["target"], nodes["transport"]
        wrong = (source == target) | (source < 0) | (target < 0) | (source >= hosts) | (target >= hosts)
        wrong = np.flatnonzero(wrong & sends)
        if len(wrong):
            raise ValueError(
                f"a message goes from host {source[wrong[0]]} to host {target[wrong[0]]}; choose two different hosts "
                f"from hosts 0 to {hosts - 1}"
            )
        if not 0 <= transport.min() <= transport.max() < transports:
            raise ValueError(f"a message names transport {transport.max()}; there are transports 0 to {transports - 1}")

    def _assign_streams(
        self, nodes: NDArray[Any], sending: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the serial number of each node's stream, and the streams that are new."""
        streams = np.full(len(nodes), -1, np.int64)
        own = nodes["lane"][sending] == OWN_LANE
        # Messages share a stream if these fields are equal: 16 + 16 + 16 + 5 + 9 bits.
        key = nodes["job"][sending].astype(np.int64) & 0xFFFF
        for name, width in (("source", 16), ("target", 16), ("transport", 5), ("lane", 9)):
            key = key << width | (nodes[name][sending].astype(np.int64) & ((1 << width) - 1))
        fresh: list[int] = []
        serials = np.empty(len(sending), np.int64)
        shared = np.flatnonzero(~own)
        keys, first, inverse = np.unique(key[shared], return_index=True, return_inverse=True)
        known = np.empty(len(keys), np.int64)
        # Number streams in the graph's order: a stream's serial number decides its port, and so its path.
        for position in np.argsort(first, kind="stable").tolist():
            serial = self._streams.get(int(keys[position]))
            if serial is None:
                serial = self._streams[int(keys[position])] = self._next_stream
                self._next_stream += 1
                fresh.append(int(shared[first[position]]))
            known[position] = serial
        serials[shared] = known[inverse]
        alone = np.flatnonzero(own)
        serials[alone] = self._next_stream + np.arange(len(alone))
        self._next_stream += len(alone)
        fresh += alone.tolist()
        streams[sending] = serials
        new = np.zeros(len(fresh), STREAM_START)
        new["serial"], new["single_use"] = serials[fresh], own[fresh]
        for name in ("source", "target", "transport"):
            new[name] = nodes[name][sending[fresh]]
        ports = source_port(new["serial"])
        dlcp = self._transports["is_dlcp"][new["transport"]] != 0
        to_port = np.where(dlcp, UDP_PORT_BASE, ORDINARY_PORT)
        new["path_hash"] = path_hashes(new["source"], new["target"], ports, to_port)
        new["reverse_path_hash"] = path_hashes(new["target"], new["source"], ports, to_port)
        return streams, new
