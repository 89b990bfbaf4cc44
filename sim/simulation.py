# SPDX-License-Identifier: Apache-2.0
"""Run a scenario: SimPy processes make all decisions, an engine carries the packets.

Both share one clock. The engine runs no further than SimPy's next event, and stops at the end of the first instant with
a completion that a process may wait for. So neither gets ahead of the other, without synchronization windows. At any
instant, packets come first, then processes.

`simulate` runs the jobs, background traffic and failures of a scenario. For other jobs, make a `Simulation` and start
your own processes.
"""

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import simpy
from numpy.typing import ArrayLike, NDArray

from dlcp.sim.engines.arithmetic import DRAW_LIMIT, PS_PER_S, seconds_to_ps
from dlcp.sim.engines.packet_engine import (
    Completion,
    CompletionKind,
    EngineName,
    PacketEngine,
    Submission,
    Submitter,
    counts_by_name,
    drops_by_class,
)
from dlcp.sim.engines.plan import EnginePlan, make_plan
from dlcp.sim.jobs.collectives import AllReduceSpec, all_reduce
from dlcp.sim.jobs.graph import OWN_LANE, Graph, GraphBuilder, Nodes, row_type
from dlcp.sim.jobs.step_times import StepTimes
from dlcp.sim.limits import FOREVER_PS, PACKETS_WAITING_MAX, LimitError, check_within
from dlcp.sim.network.routing import Routes
from dlcp.sim.network.topology import build_topology
from dlcp.sim.scenario import (
    CollectiveJob,
    FailureSpec,
    Fidelity,
    FlowPattern,
    NetworkSetting,
    Scenario,
    TrafficSpec,
    draw_sizes,
)
from dlcp.sim.tools.progress import ProgressBar
from dlcp.sim.traces.traced_jobs import TraceProgress, trace_progress

Process: TypeAlias = Generator[simpy.Event, Any, Any]
RecordSink: TypeAlias = Callable[["SubmittedGraph", NDArray[Any]], None]

_SLICE_S, _FIRST_SLICE_PS = 0.1, PS_PER_S // 1000
"""How long a slice between two calls of ``on_progress`` takes, and the simulated time of the first one; not tuned."""
_BATCH = 512
"""Background flows that are drawn and submitted at once; each begins at its own time. Not tuned."""


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
        Called with each graph and its records, `dlcp.sim.jobs.graph.NODE_RECORD` (n,), when the graph is closed. The
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
        """Return a graph's current records, `dlcp.sim.jobs.graph.NODE_RECORD` (n,)."""
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


# ------------------------------------------------------------------------------------------- processes of a scenario


def collective_job(simulation: Simulation, spec: CollectiveJob, number: int, times: StepTimes) -> Process:
    """Compute and all-reduce, step by step. Each rank waits until the all-reduce has ended on all ranks."""
    yield from simulation.until(spec.start_s)
    times.begin_ps = simulation.now_ps
    for step in range(spec.steps):
        if spec.compute_s:
            yield simulation.env.timeout(seconds_to_ps(spec.compute_s))
        graph = collective_graph(spec, simulation.transports[spec.transport], number, step)
        yield simulation.submit(graph, label=(spec.name, step)).done
        times.end_ps.append(simulation.now_ps)


def collective_graph(spec: CollectiveJob, transport: int, number: int, step: int) -> Graph:
    """Return the all-reduce of a step of job ``number``."""
    builder = GraphBuilder()
    servers = spec.servers if spec.collective == "parameter_server" else 0
    exchange = AllReduceSpec(
        spec.hosts[servers:],
        spec.size_bytes,
        transport,
        queue=spec.queue,
        loss_bound=spec.loss_bound,
        job=number,
        step=step,
    )
    all_reduce(builder, spec.collective, exchange, servers=spec.hosts[:servers])
    return builder.build()


def traced_job(simulation: Simulation, progress: TraceProgress) -> Process:
    """Run a traced job as often as it is to be repeated, and note the ends of its steps."""
    job = progress.job
    yield from simulation.until(job.start_s)
    progress.begin_ps = simulation.now_ps
    built = progress.graph(simulation.transports[job.transport])
    for turn in range(job.repeat):
        nodes = built.graph.nodes.copy()
        # Switches distinguish a turn's messages from earlier ones by the step.
        nodes["step"] += turn * built.serials
        running = simulation.submit(dataclasses.replace(built.graph, nodes=nodes), label=(job.name, turn))
        for end in built.ends:
            yield running.nodes[end]
            progress.end_ps.append(simulation.now_ps)
        yield running.done
        if not built.ends:
            progress.end_ps.append(simulation.now_ps)
    yield running.closed


def background(simulation: Simulation, spec: TrafficSpec, number: int) -> Process:
    """Submit batches of flows that arrive as a Poisson process."""
    env = simulation.env
    random = simulation.random(1, number)
    interval_ps = PS_PER_S / spec.flows_per_s(simulation.topology)
    yield from simulation.until(spec.start_s)
    stop_ps = seconds_to_ps(spec.stop_s)
    while simulation.now_ps < stop_ps:
        moments = np.cumsum(random.exponential(interval_ps, _BATCH))
        times: NDArray[np.int64] = np.minimum(moments, FOREVER_PS).astype(np.int64)
        span = int(times[-1])
        times = times[times + simulation.now_ps < stop_ps]
        if len(times):
            count, hosts = len(times), simulation.topology.hosts
            source = random.integers(hosts, size=count)
            target = (source + random.integers(1, hosts, size=count)) % hosts
            _submit(simulation, spec, source, target, draw_sizes(spec.flow_sizes, random.random(count)), times)
        yield env.timeout(span)


def _submit(
    simulation: Simulation,
    spec: TrafficSpec | FlowPattern,
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    size_bytes: ArrayLike,
    delay_ps: ArrayLike = 0,
) -> SubmittedGraph:
    """Submit flows, each a stream of its own."""
    builder, transport = GraphBuilder(), simulation.transports[spec.transport]
    builder.messages(source, target, size_bytes, transport=transport, lane=OWN_LANE, delay_ps=delay_ps)
    return simulation.submit(builder.build(), label=(spec.name, 0))


def flow_pattern(simulation: Simulation, spec: FlowPattern, number: int) -> Process:
    """Submit the flows of a pattern, each time that they begin."""
    spec.check_hosts(simulation.topology.hosts)
    random = simulation.random(4, number)
    begin_s = spec.start_s
    while True:
        yield from simulation.until(begin_s)
        running = _submit_pattern(simulation, spec, random)
        begin_s += spec.every_s
        if not spec.every_s or begin_s >= spec.stop_s:
            break
    yield running.done


def _submit_pattern(simulation: Simulation, spec: FlowPattern, random: np.random.Generator) -> SubmittedGraph:
    hosts = simulation.topology.hosts
    chosen = random.permutation(hosts)[: spec.hosts or hosts]
    if spec.pattern == "permutation":
        # Each sends to the next one of a random order, so none sends to itself.
        source, target = chosen, np.roll(chosen, -1)
    elif spec.pattern == "incast":
        source, target = chosen[:-1], np.full(len(chosen) - 1, chosen[-1])
    else:
        source, target = (ends.ravel() for ends in np.meshgrid(chosen, chosen))
        source, target = source[source != target], target[source != target]
    return _submit(simulation, spec, source, target, spec.size_bytes)


def failure(simulation: Simulation, spec: FailureSpec) -> Process:
    """Make a link lose packets for a while. If it loses all of them, route around it."""
    engine, topology = simulation.engine, simulation.topology
    links = topology.between(*spec.nodes)
    yield from simulation.until(spec.start_s)
    engine.set_loss(links, round(spec.loss_ratio * DRAW_LIMIT))
    if spec.loss_ratio >= 1:
        yield from simulation.until(spec.start_s + spec.reroute_s)
        simulation.failed_links.update(links)
        engine.set_routes(Routes.of(topology, simulation.failed_links))
    if spec.stop_s == float("inf"):
        return
    yield from simulation.until(spec.stop_s)
    for link in links:
        engine.set_loss([link], simulation.plan.links[link].loss)
    if spec.loss_ratio >= 1:
        simulation.failed_links.difference_update(links)
        engine.set_routes(Routes.of(topology, simulation.failed_links))


def start(simulation: Simulation, jobs: Iterable[Process]) -> list[simpy.Process]:
    """Start the processes of jobs, then those of the scenario's patterns, background traffic and failures.

    Returns
    -------
    The jobs.
    """
    scenario, started = simulation.scenario, [simulation.process(job) for job in jobs]
    for number, pattern in enumerate(scenario.patterns):
        simulation.process(flow_pattern(simulation, pattern, number))
    for number, flows in enumerate(scenario.traffic):
        simulation.process(background(simulation, flows, number))
    for failing in scenario.failures:
        simulation.process(failure(simulation, failing))
    return started


def reporting(
    simulation: Simulation, jobs: Sequence[StepTimes], show: Callable[[int, int, str], None]
) -> Callable[[], None]:
    """Return what shows the number of finished steps, of all steps, and a note, for `Simulation.run`."""
    total = sum(job.steps for job in jobs)

    def report() -> None:
        done_ms = (simulation.engine.now_ps + simulation.skipped_ps) / 1e9
        show(sum(len(job.end_ps) for job in jobs), total, f"steps, {done_ms:.3g} ms simulated")

    return report


# ----------------------------------------------------------------------------------------- a scenario and its result

MESSAGE_RECORD = row_type(
    (np.int32, "label step source target"),
    (np.int64, "size_bytes begin_ps end_ps"),
    (np.int32, "packets missing_packets"),
    (np.int64, "sent_packets"),
    (np.bool_, "congested"),
)
"""A message's outcome: it began when it could be sent, and ended when its target had what it needed."""


def joined_rows(kind: np.dtype[Any], *parts: NDArray[Any]) -> NDArray[Any]:
    """Return rows of a type with the columns that it has in common with other rows, of equal length."""
    rows = np.zeros(len(parts[0]), kind)
    for part in parts:
        for name in {*(kind.names or ())} & {*(part.dtype.names or ())}:
            rows[name] = part[name]
    return rows


@dataclass(slots=True)
class SimulationResult:
    """The result of a scenario.

    Attributes
    ----------
    end_ps
        Time of the last event.
    fidelity
        Whether packets were simulated, or flows, whose results are approximate.
    counts
        All counts by name; see `dlcp.sim.engines.packet_engine.EngineCounter`.
    drops_by_class
        Packets dropped, by drop class 0 to 7.
    steps
        Step times of each job.
    messages
        `MESSAGE_RECORD` (n,), in the order in which graphs were closed.
    labels
        Names of jobs and background traffic, by the number in ``messages``.
    wall_s
        Duration of the run: the only number here that differs from run to run.
    """

    end_ps: int
    fidelity: Fidelity
    counts: dict[str, int]
    drops_by_class: list[int]
    steps: list[StepTimes]
    messages: NDArray[Any]
    labels: list[str]
    wall_s: float

    @property
    def hops(self) -> int:
        """Return the number of transmissions over a link, of data and control packets."""
        return self.counts["hops_data"] + self.counts["hops_control"]


def simulate(scenario: Scenario, *, engine: EngineName = "auto", keep_messages: bool = True) -> SimulationResult:
    """Run a scenario. On a terminal, standard error shows the progress and the remaining time.

    Parameters
    ----------
    keep_messages
        Whether to collect ``messages``. Without them memory holds only what is in flight.

    Raises
    ------
    ValueError
        Jobs or traffic contradict each other or the network.
    """
    scenario.check_senders("jobs", "traces", "traffic", "patterns")
    senders: list[Any] = [*scenario.jobs, *scenario.traces, *scenario.traffic, *scenario.patterns]
    labels = [each.name for each in senders]
    messages = [np.zeros(0, MESSAGE_RECORD)]

    def keep(submitted: SubmittedGraph, records: NDArray[Any]) -> None:
        sent = submitted.graph.nodes["size_bytes"] > 0
        rows = joined_rows(MESSAGE_RECORD, submitted.graph.nodes[sent], records[sent])
        rows["label"], rows["step"] = labels.index(submitted.label[0]), submitted.label[1]
        messages.append(rows)

    simulation = Simulation(scenario, engine=engine, on_records=keep if keep_messages else None)
    steps = [StepTimes(name=job.name, steps=job.steps) for job in scenario.jobs]
    taken = {host for job in scenario.jobs for host in job.hosts}
    traced = trace_progress(scenario.traces, taken, simulation.topology.hosts, scenario.seed, first=len(steps))
    jobs = [
        collective_job(simulation, job, number, times)
        for number, (job, times) in enumerate(zip(scenario.jobs, steps, strict=True))
    ]
    start(simulation, [*jobs, *(traced_job(simulation, progress) for progress in traced)])
    began = time.perf_counter()
    with ProgressBar("simulating") as bar:
        simulation.run(reporting(simulation, [*steps, *traced], bar.update) if bar.shown else None)
    return SimulationResult(
        end_ps=simulation.engine.now_ps,
        fidelity=simulation.fidelity,
        counts=counts_by_name(simulation.engine.counts),
        drops_by_class=drops_by_class(simulation.engine.counts),
        steps=[*steps, *traced],
        messages=np.concatenate(messages),
        labels=labels,
        wall_s=time.perf_counter() - began,
    )


def make_engine(plan: EnginePlan, name: EngineName = "auto") -> PacketEngine:
    """Return an engine by name; see `dlcp.sim.engines.packet_engine.EngineName`."""
    if name == "flows":
        from dlcp.sim.engines.flows.flow_engine import FlowEngine  # needs Numba

        return FlowEngine(plan)
    if name == "kernel" or (name == "auto" and importlib.util.find_spec("numba") is not None):
        from dlcp.sim.engines.kernel.kernel_engine import KernelEngine  # needs Numba

        return KernelEngine(plan)
    from dlcp.sim.engines.reference import ReferenceEngine  # needs SimPy

    return ReferenceEngine(plan)
