# SPDX-License-Identifier: Apache-2.0
"""The kernel's Python side: grow arrays, add and free graphs, change links and routes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.engines.growing import CompiledEngine, Room, aligned_zeros, enlarged
from dlcp.sim.engines.kernel import arrays as k
from dlcp.sim.engines.kernel.events import BUCKETS_PER_WORD, TIME_BUCKETS
from dlcp.sim.engines.kernel.loop import begin_nodes, run
from dlcp.sim.engines.network_tables import SLOT_REGISTER_SIZE, SWITCH_RULES_ROW, Discipline, NetworkTables, as_rows
from dlcp.sim.engines.packet_engine import (
    COUNTER_CELLS,
    PACKET_OUTCOME,
    PORT_BYTES,
    STREAM_START,
    Completion,
    Submission,
)
from dlcp.sim.network.nodes import Routes
from dlcp.sim.rows import PORT_QUEUES, STREAM_ROW

_POOL: Final = 1 << 12
"""Initial room for packets, transmissions and events; not tuned, because arrays double when they are full."""
_COMPLETIONS: Final = 1 << 12


class KernelEngine(CompiledEngine):
    """Runs a plan in the compiled kernel; see `dlcp.sim.engines.packet_engine.PacketEngine`."""

    def __init__(self, plan: NetworkTables) -> None:
        a = self._a = SimpleNamespace(**{name: np.zeros(0, row) for name, row in k.ARRAYS.items()})
        super().__init__(plan, a)
        self._world = np.zeros(1, k.WORLD)
        self._w = self._world[0]
        self._w["hosts"] = plan.hosts
        self._w["free_stream"] = -1
        a.counts, a.profiles = np.zeros(COUNTER_CELLS, np.int64), plan.profiles
        a.buckets = np.full(TIME_BUCKETS, -1, np.int32)
        a.occupied = np.zeros(TIME_BUCKETS // BUCKETS_PER_WORD, np.int64)
        self._w["bucket_shift"], self._w["free_event"] = _bucket_shift(plan), -1
        self._grow_events(_POOL)
        a.ports = _make_ports(plan)
        a.queues = aligned_zeros(len(a.ports) * PORT_QUEUES, np.zeros(0, k.QUEUE_ROW))
        a.queues["head"] = a.queues["tail"] = -1
        a.switches = np.zeros(len(plan.topology.names), k.SWITCH_ROW)
        a.switches["random"], a.switches["salt"] = plan.node_random, plan.node_salt
        a.switches["divisor"] = plan.topology.divisors
        switches = len(plan.topology.names) - plan.hosts
        has_slots = plan.switches.discipline == Discipline.DLCP
        a.slots = np.zeros((switches, SLOT_REGISTER_SIZE) if has_slots else (1, 1), k.SLOT_ROW)
        self._stream_count = 0
        self._stream_rows: dict[int, int] = {-1: -1}
        a.completions = np.zeros((_COMPLETIONS, 2), np.int64)
        a.rules, a.transports = as_rows([plan.switches], SWITCH_RULES_ROW), as_rows(plan.transports)
        self.set_routes(plan.routes)
        self._state_room, self._segments = Room(), dict[int, slice]()
        self._bound: dict[str, NDArray[Any]] = {}
        self._grow_pool("packet")
        self._grow_pool("transmission")

    # ------------------------------------------------------------------------------------------------------ running

    def _bind(self) -> None:
        """Store the addresses of replaced arrays in the record."""
        for name, array in vars(self._a).items():
            if self._bound.get(name) is not array:
                k.bind(self._w, name, array)
                self._bound[name] = array

    @property
    def now_ps(self) -> int:
        """Return the time of the latest event."""
        return int(self._w["now"])

    def run(self, limit_ps: int) -> list[Completion]:
        """Run to the end of the first instant with a completion, at most to ``limit_ps``."""
        while True:
            self._bind()
            if run(self._world, limit_ps):
                break
            self._grow()
        found = self._completions(int(self._w["completed"]))
        self._w["completed"] = 0
        return found

    def has_events(self) -> bool:
        """Return whether any events are pending."""
        return bool(self._w["events_waiting"])

    # ------------------------------------------------------------------------------------------------------- graphs

    def submit(self, submission: Submission) -> None:
        """Start a graph. A node without predecessors begins after its delay."""
        graph = submission.graph
        self._add_streams(submission.new_streams)
        segment = self._segments[submission.number] = self._state_room.take(int(submission.sizes["packets"].sum()))
        self._a.states = enlarged(self._a.states, segment.stop)
        self._a.states[segment] = 0
        slot, nodes = self._place(submission, self._stream_rows)
        _refuse_beyond(nodes.stop, "messages in flight")
        self._a.graphs[slot] = (len(graph), len(graph))
        packets = submission.sizes["packets"]
        self._a.messages["offset"][nodes] = segment.start + np.cumsum(packets) - packets
        self._w["followers_max"] = max(self._w["followers_max"], np.diff(graph.starts).max())
        first = np.flatnonzero(graph.waits == 0)
        self._begin(first + nodes.start, submission.now_ps + graph.nodes["delay_ps"][first])

    def _begin(self, nodes: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        self._grow_events(int(self._w["events_waiting"]) + len(nodes) + k.SPARE_ROWS)
        self._bind()
        begin_nodes(self._world, times, nodes)

    def outcomes(self, number: int, nodes: NDArray[np.int64]) -> NDArray[Any]:
        """Return what became of packets; see `dlcp.sim.engines.packet_engine.PacketEngine.outcomes`."""
        rows = self._rows(number)[nodes]
        packets, ends = rows["packets"], np.cumsum(rows["packets"])
        cells = np.arange(packets.sum()) + np.repeat(rows["offset"] - ends + packets, packets)
        states = self._a.states[cells]
        outcomes = np.empty(len(states), PACKET_OUTCOME)
        arrived = k.STATE_RECEIVED | k.STATE_DELIVERED
        outcomes["drop_class"], outcomes["delivered"] = states & k.CLASS_MASK, states & arrived == arrived
        return outcomes

    def _set_sizes(self, rows: NDArray[Any], where: slice | NDArray[np.int64], sizes: NDArray[Any]) -> None:
        for name in ("packets", "last_bytes", "upper", "budget", "profile"):
            rows[name][where] = sizes[name]
        rows["required"][where] = sizes["packets"] - sizes["allowed"]

    def forget(self, number: int) -> None:
        """Free the rows of a closed graph."""
        self._state_room.give(self._segments.pop(number))
        super().forget(number)

    def _add_streams(self, new: NDArray[Any]) -> None:
        if not len(new):
            return
        indices = np.empty(len(new), np.int64)
        for number, serial in enumerate(new["serial"].tolist()):
            index = int(self._w["free_stream"])
            if index >= 0:
                self._w["free_stream"] = self._a.streams["next"][index]
                self._stream_rows.pop(int(self._a.streams["serial"][index]), None)
            else:
                index = self._stream_count
                self._stream_count += 1
                _refuse_beyond(self._stream_count, "streams")
                self._a.streams = enlarged(self._a.streams, self._stream_count)
            indices[number] = self._stream_rows[serial] = index
        rows = np.zeros(len(new), STREAM_ROW)
        for name in ("head", "tail", "retransmissions", "next", "first", "last", "epoch", "timer_at"):
            rows[name] = -1
        for name in STREAM_START.names or ():
            rows[name] = new[name]
        chosen = self._a.transports[new["transport"]]
        rows["window"], rows["alpha"] = chosen["initial_window_packets"], 1.0
        rows["threshold"] = np.where(chosen["slow_start"] != 0, chosen["max_window_packets"], 0.0)
        self._a.streams[indices] = rows

    # -------------------------------------------------------------------------------------------------------- links

    def set_loss(self, links: Sequence[int], loss: int) -> None:
        """Set the loss probability of links, in units of 1 / `dlcp.sim.arithmetic.DRAW_LIMIT`."""
        self._a.ports["loss"][list(links)] = loss
        self._a.ports["lossy"][list(links)] = loss > 0

    def set_routes(self, routes: Routes) -> None:
        """Replace the routes."""
        self._a.route_row, self._a.route_cells, self._a.choices = routes.row, routes.cells, routes.choices
        self._a.route_first, self._a.route_targets = routes.first, routes.targets

    def port_bytes(self) -> NDArray[Any]:
        """Return the bytes at each link, `dlcp.sim.engines.packet_engine.PORT_BYTES` (links,)."""
        return np.array(self._a.ports[list(PORT_BYTES.names or ())])

    # ------------------------------------------------------------------------------------------------------- growth

    def _grow(self) -> None:
        spare = k.SPARE_ROWS + int(self._w["in_flight_max"])
        while self._w["free_packets"] < spare:
            self._grow_pool("packet")
        while self._w["free_transmissions"] < k.SPARE_ROWS:
            self._grow_pool("transmission")
        self._grow_events(int(self._w["events_waiting"]) + spare + int(self._w["followers_max"]))
        self._a.completions = enlarged(self._a.completions, int(self._w["completed"]) + spare)
        if self._w["sequence"] > k.SEQUENCE_MAX:
            self._renumber()

    def _renumber(self) -> None:
        """Renumber the waiting events from 0, in the order of insertion."""
        near, far = int(self._w["heap_length"]), int(self._w["far_length"])
        listed = []
        following = self._a.events["next"]
        for event in self._a.buckets[self._a.buckets >= 0].tolist():
            while event >= 0:
                listed.append(event)
                event = int(following[event])
        keys = np.concatenate([self._a.keys[:near], self._a.far_keys[:far], self._a.events["key"][listed]])
        order = np.argsort(keys)  # by insertion number, the highest bits
        what = keys & ((1 << k.SEQUENCE_SHIFT) - 1)
        keys[order] = np.arange(len(keys)) << k.SEQUENCE_SHIFT | what[order]
        self._a.keys[:near], self._a.far_keys[:far] = keys[:near], keys[near : near + far]
        self._a.events["key"][listed] = keys[near + far :]
        self._w["sequence"] = len(keys)

    def _grow_events(self, needed: int) -> None:
        """Make room for ``needed`` events in each of the three places."""
        before = len(self._a.events)
        self._a.times, self._a.keys = enlarged(self._a.times, needed), enlarged(self._a.keys, needed)
        self._a.far_times, self._a.far_keys = enlarged(self._a.far_times, needed), enlarged(self._a.far_keys, needed)
        self._a.events = enlarged(self._a.events, needed)
        if len(self._a.events) > before:
            self._a.events["next"][before:] = np.arange(before + 1, len(self._a.events) + 1)
            self._a.events["next"][-1] = self._w["free_event"]
            self._w["free_event"] = before

    def _grow_pool(self, pool: str) -> None:
        """Double a pool, and put its new rows at the head of its free list."""
        rows, free = getattr(self._a, f"{pool}s"), f"free_{pool}"
        before = len(rows)
        larger = enlarged(rows, max(_POOL, 2 * before))
        _refuse_beyond(len(larger), "packets in flight")
        larger["next"][before:] = np.arange(before + 1, len(larger) + 1)
        larger["serial"][before:] = -1
        larger["next"][-1] = self._w[f"{free}_head"] if before else -1
        self._w[f"{free}_head"] = before
        self._w[f"{free}s"] += len(larger) - before
        setattr(self._a, f"{pool}s", larger)


def _make_ports(plan: NetworkTables) -> NDArray[Any]:
    ports = aligned_zeros(len(plan.links), np.zeros(0, k.PORT_ROW))
    columns = {"node": "source", "target": "target", "kibibyte_ps": "kibibyte_ps", "delay": "delay_ps"}
    for column, name in {**columns, "loss": "loss", "random": "random"}.items():
        ports[column] = [getattr(link, name) for link in plan.links]
    ports["lossy"] = ports["loss"] > 0
    ports["control"] = ports["pulls"] = ports["spare_pulls"] = -1
    return ports


def _bucket_shift(plan: NetworkTables) -> int:
    """Return the base-2 logarithm of the width of a time bucket in picoseconds.

    A bucket has about eight events when every link is busy, which is not tuned. All buckets together span more than a
    packet's time over the slowest link.
    """
    packet_ps = sum(1500 * link.kibibyte_ps >> 10 for link in plan.links) // len(plan.links)
    reach_ps = max(link.delay_ps + (9000 * link.kibibyte_ps >> 10) for link in plan.links)
    return max(8 * packet_ps // len(plan.links), 2 * reach_ps // TIME_BUCKETS, 1).bit_length()


def _refuse_beyond(count: int, what: str) -> None:
    """Raise MemoryError if ``count`` rows are more than an event's key can number."""
    if count > k.ID_MASK:
        raise MemoryError(f"{count:,} {what} exceed the simulator's limit of {k.ID_MASK:,}; simulate a smaller setting")
