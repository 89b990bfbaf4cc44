# SPDX-License-Identifier: Apache-2.0
"""A scenario's jobs, background traffic, flows and failures as SimPy processes; and `simulate`."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import ArrayLike, NDArray

from dlcp.sim.arithmetic import DRAW_LIMIT, PS_PER_S, seconds_to_ps
from dlcp.sim.engines.packet_engine import (
    EngineName,
    counts_by_name,
    drops_by_class,
)
from dlcp.sim.experiments.progress import ProgressBar
from dlcp.sim.graphs.collectives import AllReduceSpec, all_reduce
from dlcp.sim.graphs.graph import OWN_LANE, Graph, GraphBuilder, row_type
from dlcp.sim.limits import FOREVER_PS
from dlcp.sim.network.nodes import Routes
from dlcp.sim.scenario import (
    CollectiveJob,
    FailureSpec,
    Fidelity,
    FlowPattern,
    Scenario,
    TrafficSpec,
    draw_sizes,
)
from dlcp.sim.simulation import Process, Simulation, StepTimes, SubmittedGraph
from dlcp.sim.traces.traced_jobs import TraceProgress, place_traces

_BATCH = 512
"""Background flows that are drawn and submitted at once; each begins at its own time. Not tuned."""


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
    """Return a function for `Simulation.run` that shows the number of finished steps, of all steps, and a note."""
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
    traced = place_traces(scenario.traces, scenario.jobs, simulation.topology.hosts, scenario.seed)
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
