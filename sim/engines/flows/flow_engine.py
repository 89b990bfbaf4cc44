# SPDX-License-Identifier: Apache-2.0
"""The Python side of the engine: grow arrays, add and free graphs, change links and routes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import DRAW_LIMIT
from dlcp.sim.engines.flows import rates as r
from dlcp.sim.engines.flows.fluid import begin_nodes, relist, run
from dlcp.sim.engines.flows.paths import PortMap, measure_paths, network_of, trace
from dlcp.sim.engines.growing import CompiledEngine, Room, enlarged
from dlcp.sim.engines.network_tables import (
    Discipline,
    NetworkTables,
    as_rows,
)
from dlcp.sim.engines.packet_engine import COUNTER_CELLS, PORT_BYTES, Completion, Submission
from dlcp.sim.limits import FOREVER_PS
from dlcp.sim.network.nodes import Routes
from dlcp.sim.rows import PORT_QUEUES

_ENTRIES: Final = 1 << 12
"""Initial room for the paths of a graph's flows; doubled until they fit."""


class FlowEngine(CompiledEngine):
    """Carries messages as fluid; see `dlcp.sim.engines.packet_engine.PacketEngine`."""

    def __init__(self, plan: NetworkTables) -> None:
        numbers, transports = np.zeros(1, r.NUMBERS), as_rows(plan.transports)
        a = SimpleNamespace(numbers=numbers, counts=np.zeros(COUNTER_CELLS, np.int64), transports=transports)
        super().__init__(plan, a)
        a.messages, a.graphs = np.zeros(0, r.FLUID_MESSAGE_ROW), np.zeros(0, r.FLUID_GRAPH_ROW)
        a.flows, a.entries, a.ports = np.zeros(0, r.FLOW_ROW), np.zeros(0, r.ENTRY_ROW), np.zeros(0, r.FLUID_PORT_ROW)
        a.followers, a.finishing, a.touched, a.due = (np.zeros(0, np.int32) for _ in range(4))
        a.event_times, a.event_nodes, a.completions = (np.zeros(0, np.int64) for _ in range(3))
        self._n = numbers[0]
        self._n["seed"], self._n["rates_at"] = plan.seed, FOREVER_PS
        self._n["mark_above"] = min(plan.switches.mark_above, plan.switches.ecn_min)
        self._droppable = _droppable_shares(plan)
        self._keep: NDArray[np.float64] = transports["loss_keep"]
        self._loss = np.array([link.loss for link in plan.links], np.int64)
        self._flow_room, self._entry_room = Room(), Room()
        # Flows that were added together: their rows, their entries, and their serial numbers. Those of a graph's
        # single-use streams are freed with it, by its number; others stay, by numbers below 0.
        self._batches: dict[int, tuple[slice, slice, list[int]]] = {}
        self._flow_of: dict[int, int] = {-1: -1}
        self._sent_bytes = np.zeros(len(plan.links))
        self._set_ports(plan.routes)
        self._resize_scratch()

    # ------------------------------------------------------------------------------------------------------ running

    @property
    def now_ps(self) -> int:
        """Return the time of the latest event."""
        return int(self._n["now"])

    def run(self, limit_ps: int) -> list[Completion]:
        """Run to the end of the first instant with a completion, at most to ``limit_ps``."""
        while not run(self._state, limit_ps):
            pass
        found = self._completions(int(self._n["completed"]))
        self._n["completed"] = 0
        return found

    def has_events(self) -> bool:
        """Return whether any events are pending."""
        return bool(self._n["events"] or self._n["finishing"] or self._n["due_count"])

    # ------------------------------------------------------------------------------------------------------- graphs

    def submit(self, submission: Submission) -> None:
        """Start a graph. A node without predecessors begins after its delay."""
        graph = submission.graph
        self._add_flows(submission)
        slot, nodes = self._place(submission, self._flow_of)
        self._a.graphs[slot] = (len(graph), len(graph) + np.count_nonzero(submission.sizes["packets"]))
        self._resize_scratch()
        first = np.flatnonzero(graph.waits == 0)
        begin_nodes(self._state, submission.now_ps + graph.nodes["delay_ps"][first], first + nodes.start)

    def outcomes(self, number: int, nodes: NDArray[np.int64]) -> NDArray[Any]:
        """Refuse: fluid has no packets."""
        raise ValueError("the engine `flows` does not know which packets are missing; use `packets`")

    def _set_sizes(self, rows: NDArray[Any], where: slice | NDArray[np.int64], sizes: NDArray[Any]) -> None:
        for name in ("packets", "last_bytes", "allowed"):
            rows[name][where] = sizes[name]
        droppable = self._droppable[sizes["profile"]] * (sizes["packets"] - sizes["upper"])
        rows["droppable"][where] = np.minimum(sizes["allowed"], droppable)

    def forget(self, number: int) -> None:
        """Free the rows of a closed graph, and of its single-use streams."""
        super().forget(number)
        flows, entries, serials = self._batches.pop(number, (slice(0, 0), slice(0, 0), []))
        self._flow_room.give(flows)
        self._entry_room.give(entries)
        for serial in serials:
            del self._flow_of[serial]

    def _add_flows(self, submission: Submission) -> None:
        """Add the rows of new streams, and find their paths."""
        for single_use, key in ((True, submission.number), (False, -1 - submission.number)):
            new = submission.new_streams[(submission.new_streams["single_use"] != 0) == single_use]
            if not len(new):
                continue
            flows = self._flow_room.take(len(new))
            self._a.flows = enlarged(self._a.flows, flows.stop)
            rows = self._a.flows[flows]
            touched = rows["touched"].copy()  # a freed row may still be in the list of touched ones
            rows.view(np.uint8)[:] = 0
            rows["touched"], rows["head"], rows["heap_at"] = touched, -1, -1
            rows["window"] = self._a.transports["initial_window_packets"][new["transport"]]
            for name in ("source", "target", "transport", "path_hash", "reverse_path_hash", "single_use"):
                rows[name] = new[name]
            serials = new["serial"].tolist()
            self._flow_of.update(zip(serials, range(flows.start, flows.stop), strict=True))
            self._batches[key] = (flows, slice(0, 0), serials)
            self._find_paths(key)

    # -------------------------------------------------------------------------------------------------------- links

    def set_loss(self, links: Sequence[int], loss: int) -> None:
        """Set the loss probability of links, in units of 1 / `dlcp.sim.arithmetic.DRAW_LIMIT`."""
        self._loss[list(links)] = loss
        self._change_paths(None)

    def set_routes(self, routes: Routes) -> None:
        """Replace the routes."""
        self._change_paths(routes)

    def _change_paths(self, routes: Routes | None) -> None:
        """Find the paths of all flows anew, and continue on these; without routes, only measure them anew."""
        active = np.flatnonzero(self._a.flows["active"]).tolist()
        for flow in active:
            relist(self._state, flow, 0)
        r.compute_rates(self._state)
        if routes is not None:
            self._set_ports(routes)
            self._entry_room = Room()
        for key in self._batches:
            if routes is not None:
                self._find_paths(key)
            else:
                self._measure(key)
        self._resize_scratch()
        for flow in active:
            relist(self._state, flow, 1)
        r.compute_rates(self._state)

    def _set_ports(self, routes: Routes) -> None:
        """Make the ports of these routes; all links of a port have the same rate."""
        if len(self._a.ports):
            self._collect_bytes()
        self._map = PortMap.of(self.plan, routes)
        self._network = network_of(self.plan, routes, self._map)
        number, size = self._map.port, self._map.size
        rate = np.array([1024 / link.kibibyte_ps for link in self.plan.links])
        source = np.array([link.source for link in self.plan.links])
        delay = np.array([float(link.delay_ps) for link in self.plan.links])
        prioritized = self.plan.switches.discipline in (Discipline.PRIORITY, Discipline.DLCP)
        self._a.ports = np.zeros(len(size), r.FLUID_PORT_ROW)
        self._a.ports["capacity"] = np.bincount(number, rate)
        self._a.ports["ordered"][number] = (source < self.plan.hosts) | prioritized  # hosts serve urgent queues first
        self._a.levels = np.zeros(len(size) * PORT_QUEUES, r.LEVEL_ROW)
        self._a.levels["level"], self._a.levels["head"] = r.UNLIMITED, -1
        self._a.stale = np.zeros(len(self._a.levels), np.int32)
        self._n["stale_first"] = self._n["stale_count"] = 0
        self._a.ports["delay"][number], self._a.ports["ps_per_byte"][number] = delay, 1 / rate

    def _find_paths(self, key: int) -> None:
        """Find the paths of a batch of flows."""
        flows, _, serials = self._batches[key]
        even_acks = int(len(self._map.size) < len(self.plan.links))
        found, room = -1, _ENTRIES
        while found < 0:
            entries, room = np.zeros(room, r.ENTRY_ROW), 2 * room
            sprayed = self._a.transports["sprayed"]
            found = trace(entries, self._a.flows[flows], sprayed, self._network, even_acks)
        own = self._entry_room.take(found)
        self._a.entries = enlarged(self._a.entries, own.stop)
        self._a.entries[own] = entries[:found]
        self._a.flows["entries"][flows] += own.start
        lengths = self._a.flows["forward"][flows] + self._a.flows["backward"][flows]
        self._a.entries["flow"][own] = np.repeat(np.arange(flows.start, flows.stop), lengths)
        self._batches[key] = (flows, own, serials)
        self._measure(key)

    def _measure(self, key: int) -> None:
        """Derive what follows from the paths of a batch of flows."""
        loss = np.bincount(self._map.port, self._loss / DRAW_LIMIT) / self._map.size
        whole = (self._a.transports["header_bytes"] + self._a.transports["payload"]).astype(float)
        acks = self._a.transports["ack_bytes"].astype(float)
        measure_paths(
            self._a.entries,
            self._a.flows[self._batches[key][0]],
            self._a.ports,
            loss,
            whole,
            acks,
            self._keep,
        )

    def port_bytes(self) -> NDArray[Any]:
        """Return the bytes at each link, `PORT_BYTES` (links,). Nothing is queued: rates never exceed capacities."""
        self._collect_bytes()
        found = np.zeros(len(self.plan.links), PORT_BYTES)
        found["sent_bytes"] = np.rint(self._sent_bytes)
        return found

    def _collect_bytes(self) -> None:
        """Add what ports have carried to their links, in equal parts."""
        self._sent_bytes += (self._a.ports["sent_bytes"] / self._map.size)[self._map.port]
        self._a.ports["sent_bytes"] = 0

    # ------------------------------------------------------------------------------------------------------- growth

    def _resize_scratch(self) -> None:
        """Make room for an event of each message and each flow, and pass all arrays to the compiled code."""
        a = self._a
        flows, messages = len(a.flows), len(a.messages)
        needed = {"finishing": flows, "touched": flows, "due": messages, "event_times": messages}
        needed |= {"event_nodes": messages, "completions": 2 * (messages + 2 * len(a.graphs))}
        for name, rows in needed.items():
            setattr(a, name, enlarged(getattr(a, name), rows))
        self._state = r.FlowState(**vars(a))


def _droppable_shares(plan: NetworkTables) -> NDArray[np.float64]:
    """Return the share of packets in classes that a queue drops before it marks, by drop-class profile."""
    rules = plan.switches
    if rules.discipline != Discipline.DLCP:
        return np.zeros(len(plan.profiles))
    classes = [number for number, depth in enumerate(rules.drop_above) if depth < rules.mark_above]
    shares: NDArray[np.float64] = np.isin(plan.profiles, classes).mean(axis=1)
    return shares
