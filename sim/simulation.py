# SPDX-License-Identifier: Apache-2.0
"""Run a scenario: SimPy processes make all decisions, an engine carries the packets.

Both share one clock. The engine runs no further than SimPy's next event, and stops at the end of the first instant with
a completion that a process may wait for. So neither gets ahead of the other, without synchronization windows. At any
instant, packets come first, then processes.

`dlcp.sim.simulate` runs the jobs, background traffic and failures of a scenario. For other jobs, make a `Simulation`
and start your own processes.
"""

import importlib.util
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray

from dlcp.sim.arithmetic import PS_PER_S, seconds_to_ps
from dlcp.sim.engines.network_tables import NetworkTables, make_plan
from dlcp.sim.engines.packet_engine import (
    Completion,
    CompletionKind,
    EngineName,
    PacketEngine,
    Submission,
    Submitter,
)
from dlcp.sim.graphs.graph import Graph, Nodes
from dlcp.sim.limits import FOREVER_PS, PACKETS_WAITING_MAX, LimitError, check_within
from dlcp.sim.network.topology import build_topology
from dlcp.sim.scenario import (
    Fidelity,
    NetworkSetting,
)

Process: TypeAlias = Generator[simpy.Event, Any, Any]
RecordSink: TypeAlias = Callable[["SubmittedGraph", NDArray[Any]], None]

_SLICE_S, _FIRST_SLICE_PS = 0.1, PS_PER_S // 1000
"""How long a slice between two calls of ``on_progress`` takes, and the simulated time of the first one; not tuned."""


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """When a job began, and when each of its finished steps ended, in picoseconds of the scenario.

    Parameters
    ----------
    steps
        Number of steps that the job is to run.
    """

    name: str = ""
    steps: int = 0
    begin_ps: int = 0
    end_ps: list[int] = field(default_factory=list)

    @property
    def bounds_ps(self) -> list[tuple[int, int]]:
        """Return when each finished step began and ended; each begins where the one before ends."""
        return list(pairwise([self.begin_ps, *self.end_ps]))

    @property
    def step_s(self) -> list[float]:
        """Return the durations of the finished steps in seconds."""
        return [(end - begin) / 1e12 for begin, end in self.bounds_ps]


class SubmittedGraph:
    """A graph that the engine runs.

    Attributes
    ----------
    done
        SimPy event: all nodes are done. Its value is the time in picoseconds.
    nodes
        SimPy events of watched nodes, by number.
    closed
        SimPy event: nothing of the graph is in flight any more, acknowledgements included.
    packets
        int32 (n,): packets of each message in full precision; 0 for a node that sends nothing.
    sizes
        `dlcp.sim.engines.packet_engine.MESSAGE_SIZE` (n,): the messages' sizes, in the precision that
        `Simulation.encode` has set.
    label
        The submitter's label, passed on with the records.
    last_records
        Its records once it is closed.
    last_outcomes
        Once it is closed, the outcomes of its messages that lack packets, by node; only if it ``keeps_outcomes``.
    """

    def __init__(
        self, env: simpy.Environment, submission: Submission, label: Any, *, keeps_outcomes: bool = False
    ) -> None:
        graph = submission.graph
        self.graph, self.number, self.sizes, self.label = graph, submission.number, submission.sizes, label
        self.packets: NDArray[np.int32] = submission.sizes["packets"].copy()
        self.done, self.closed = env.event(), env.event()
        self.last_records: NDArray[Any] | None = None
        self.keeps_outcomes = keeps_outcomes
        self.last_outcomes: dict[int, NDArray[Any]] = {}
        self.nodes = {int(node): env.event() for node in np.flatnonzero(graph.nodes["watched"])}


class Simulation:
    """One run of a scenario.

    Parameters
    ----------
    class_shares
        Additional distributions of drop classes, which messages refer to by number.
    on_records
        Called with each graph and its records, `dlcp.sim.graphs.graph.NODE_RECORD` (n,), when the graph is closed. The
        engine then frees the graph, so memory holds only what is in flight.

    Attributes
    ----------
    env
        SimPy's environment; its clock counts picoseconds.
    transports
        Numbers of the scenario's transports, by name.
    failed_links
        Links that routes currently avoid.
    skipped_ps
        The time that was skipped so far (`dlcp.sim.jobs.skipping`): a moment of the scenario comes earlier by it.
    fidelity
        Whether packets or flows are simulated.
    """

    def __init__(
        self,
        scenario: NetworkSetting,
        *,
        engine: EngineName = "auto",
        class_shares: tuple[tuple[float, ...], ...] = (),
        on_records: RecordSink | None = None,
    ) -> None:
        self.scenario = scenario
        self.topology = build_topology(scenario.topology)
        self.plan = make_plan(self.topology, scenario.switches, scenario.transports, class_shares, scenario.seed)
        name = scenario.engine if engine == "auto" and scenario.engine == "flows" else engine
        self.fidelity: Fidelity = "flows" if name == "flows" else "packets"
        scenario.check_engine(self.fidelity)
        self.engine = make_engine(self.plan, name)
        self.env = simpy.Environment(0)
        self.transports = {name: number for number, name in enumerate(scenario.transports)}
        self._submitter = Submitter(self.plan)
        self._open: dict[int, SubmittedGraph] = {}
        self._on_records = on_records
        self.failed_links: set[int] = set()
        self.skipped_ps = 0
        self._skipped = self.env.event()

    def process(self, generator: Process) -> simpy.Process:
        """Start a SimPy process."""
        return self.env.process(generator)

    def random(self, *concern: int) -> np.random.Generator:
        """Return a random generator of its own for each ``concern``: the same numbers in every run."""
        return random_of(self.scenario.seed, *concern)

    def submit(self, graph: Graph, label: Any = None, *, keeps_outcomes: bool = False) -> SubmittedGraph:
        """Start a graph now; with ``keeps_outcomes``, `outcomes` answers even when it is closed.

        Raises
        ------
        LimitError
            A message has more packets than engines can count, or all of them have more than the packet engines can
            hold.
        """
        try:
            submission = self._submitter.prepare(graph, int(self.env.now))
            if self.fidelity == "packets":
                packets = submission.sizes["packets"].sum(dtype=np.int64)
                check_within("the number of packets", packets, PACKETS_WAITING_MAX, "send less, or use engine flows")
        except LimitError as error:
            raise LimitError(f"{label[0]}: {error}" if label else str(error)) from None
        submitted = SubmittedGraph(self.env, submission, label, keeps_outcomes=keeps_outcomes)
        self._open[submission.number] = submitted
        self.engine.submit(submission)
        return submitted

    def records(self, submitted: SubmittedGraph) -> NDArray[Any]:
        """Return a graph's current records, `dlcp.sim.graphs.graph.NODE_RECORD` (n,)."""
        return self.engine.records(submitted.number) if submitted.last_records is None else submitted.last_records

    def outcomes(self, submitted: SubmittedGraph, nodes: Nodes) -> dict[int, NDArray[Any]]:
        """Return what became of the packets of messages that are done and lack some.

        Returns
        -------
        By node, `dlcp.sim.engines.packet_engine.PACKET_OUTCOME` (packets,), for those of ``nodes`` that lack packets.
        """
        if submitted.last_records is not None:
            return {node: found for node in nodes.tolist() if (found := submitted.last_outcomes.get(node)) is not None}
        records = self.records(submitted)
        lacking = nodes[records["missing_packets"][nodes] > 0]
        found = self.engine.outcomes(submitted.number, lacking)
        ends = np.cumsum(records["packets"][lacking])[:-1]
        return dict(zip(lacking.tolist(), np.split(found, ends), strict=True)) if len(lacking) else {}

    def resize(self, submitted: SubmittedGraph, nodes: Nodes, sizes: NDArray[Any]) -> None:
        """Set the sizes of messages that have not begun, `dlcp.sim.engines.packet_engine.MESSAGE_SIZE` (nodes,)."""
        if submitted.last_records is None:
            self.engine.resize(submitted.number, nodes, sizes)

    def encode(self, submitted: SubmittedGraph, bits: int, value_bytes: int) -> None:
        """Set the precision of messages that have not begun.

        Parameters
        ----------
        bits
            Bits per value.
        value_bytes
            Bytes of a value in full precision.
        """
        waiting = np.flatnonzero((submitted.packets > 0) & (self.records(submitted)["begin_ps"] < 0))
        sizes = self._submitter.sizes(submitted.graph.nodes[waiting], bits, value_bytes)
        submitted.sizes[waiting] = sizes
        self.resize(submitted, waiting, sizes)

    @property
    def now_ps(self) -> int:
        """Return the time of the scenario, including what was skipped."""
        return int(self.env.now) + self.skipped_ps

    def skip(self, span_ps: int) -> None:
        """Let ``span_ps`` pass at once; what is in the network stays where it is."""
        self.skipped_ps += span_ps
        skipped, self._skipped = self._skipped, self.env.event()
        skipped.succeed()

    def until(self, seconds: float) -> Process:
        """Wait until a moment of the scenario, which comes earlier if time is skipped."""
        due = seconds_to_ps(seconds)
        while True:
            yield self.env.timeout(max(0, due - self.now_ps)) | self._skipped
            if self.now_ps >= due:
                return

    def run(self, on_progress: Callable[[], None] | None = None) -> None:
        """Run until no events are left, or to ``stop_s`` of the scenario.

        Parameters
        ----------
        on_progress
            Called a few times a second, without any effect on the results.
        """
        env, engine = self.env, self.engine
        slice_ps, slice_end_ps = _FIRST_SLICE_PS, FOREVER_PS if on_progress is None else _FIRST_SLICE_PS
        began_s = time.monotonic()
        while True:
            end = min(FOREVER_PS, seconds_to_ps(self.scenario.stop_s)) - self.skipped_ps
            coming = env.peek()
            limit = end if coming == float("inf") else min(end, int(coming))
            if engine.has_events():
                completions = engine.run(min(limit, slice_end_ps))
                if completions:
                    self._wake(completions)
                    continue
                if on_progress is not None and slice_end_ps < limit:
                    on_progress()
                    took_s, began_s = time.monotonic() - began_s, time.monotonic()
                    slice_ps = slice_ps * 2 if took_s < _SLICE_S else max(1, slice_ps // 2)
                    slice_end_ps += slice_ps
                    continue
            if coming == float("inf") or coming > end:
                return
            # All packets of this instant have been handled; now handle the processes, event by event.
            env.step()

    @property
    def unfinished_messages(self) -> int:
        """Return the number of submitted messages that have not arrived."""
        return sum(
            int(((submitted.packets > 0) & (self.engine.records(number)["end_ps"] < 0)).sum())
            for number, submitted in self._open.items()
        )

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will happen."""
        return not self.engine.has_events() and self.env.peek() == float("inf")

    def flush_records(self) -> None:
        """Pass on the current records of all open graphs, for a run that ends early."""
        if self._on_records is not None:
            for number, submitted in sorted(self._open.items()):
                self._on_records(submitted, self.engine.records(number))
        self._open.clear()

    def _wake(self, completions: list[Completion]) -> None:
        """Advance SimPy's clock to the engine's, and wake the waiting processes."""
        env = self.env
        now = self.engine.now_ps
        if now > env.now:
            env.run(until=now)
        for completion in completions:
            submitted = self._open[completion.graph]
            if completion.kind == CompletionKind.GRAPH_DONE:
                submitted.done.succeed(now)
            elif completion.kind == CompletionKind.GRAPH_CLOSED:
                if submitted.keeps_outcomes:
                    submitted.last_outcomes = self.outcomes(submitted, np.arange(len(submitted.graph)))
                submitted.last_records = self.engine.records(completion.graph)
                if self._on_records is not None:
                    self._on_records(submitted, submitted.last_records)
                self.engine.forget(completion.graph)
                del self._open[completion.graph]
                submitted.closed.succeed(now)
            else:
                submitted.nodes[completion.node].succeed(now)


def random_of(seed: int, *concern: int) -> np.random.Generator:
    """Return the random generator of a concern in a simulation with a seed."""
    return np.random.default_rng(np.random.SeedSequence([seed, 0x51D, *concern]))


def make_engine(plan: NetworkTables, name: EngineName = "auto") -> PacketEngine:
    """Return an engine by name; see `dlcp.sim.engines.packet_engine.EngineName`."""
    if name == "flows":
        from dlcp.sim.engines.flows.flow_engine import FlowEngine  # needs Numba

        return FlowEngine(plan)
    if name == "kernel" or (name == "auto" and importlib.util.find_spec("numba") is not None):
        from dlcp.sim.engines.kernel.kernel_engine import KernelEngine  # needs Numba

        return KernelEngine(plan)
    from dlcp.sim.engines.reference import ReferenceEngine  # needs SimPy

    return ReferenceEngine(plan)
