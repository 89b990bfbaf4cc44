# SPDX-License-Identifier: Apache-2.0
"""One run of an experiment: its measurements and its result file."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

import dlcp
from dlcp.convergence import curve
from dlcp.report.runs import progress_to
from dlcp.sim.engines.network_tables import NetworkTables, as_rows
from dlcp.sim.engines.packet_engine import PacketEngineName, counts_by_name, drops_by_class
from dlcp.sim.experiments.experiment import ExperimentRun
from dlcp.sim.experiments.recording import AnyProgress, Recorder, RunOver
from dlcp.sim.experiments.scenario_run import reporting, start, traced_job
from dlcp.sim.graphs.collectives import RESULT_MESSAGE
from dlcp.sim.jobs.pipeline_training import pipelined_training
from dlcp.sim.jobs.run_size import check_run_size, pattern_size, training_size
from dlcp.sim.jobs.skipping import StepSkipper
from dlcp.sim.jobs.step_graph import class_shares
from dlcp.sim.jobs.training import PlacedJob, place_jobs
from dlcp.sim.jobs.training_run import training
from dlcp.sim.network.topology import FileTopology
from dlcp.sim.simulation import Process, Simulation, SubmittedGraph
from dlcp.sim.traces.traced_jobs import TraceProgress, place_traces, trace_digest, trace_size
from dlcp.switch import PROGRAM_PATH

Number = TypeVar("Number", int, float)
FORMAT: Final = 4
"""Format of result files. If it changes, a sweep runs everything again."""

_SIMULATOR: Final = Path(__file__).resolve().parents[1]
_DLCP: Final = Path(dlcp.__file__).resolve().parent
_INDIFFERENT: Final = (
    "tools/",
    *(f"experiments/{name}.py" for name in ("fitted_network", "progress", "recording", "results", "sweep")),
    "experiments/trace_experiment.py",
)
"""Parts of the simulator that do not change results: they start runs, show them, or describe experiments."""
_SHARED: Final = (
    *(f"convergence/{name}" for name in ("__init__.py", "published.json", "measured.json", "shortfall.json")),
    *("examples/learning_tasks.py", "report/runs.py"),
    *("policies/arms.py", "policies/slow_ports.py", "values/planes.py", "values/tags.py"),
    *("wire/__init__.py", "wire/header.py", "wire/payloads.py"),
)
"""Parts of DLCP itself that change results: they define packets, tags, loss bounds, precision and its
costs, and what jobs learn."""

_TIMES: Final = ("fct", "contribution", "result", "other", "small")
"""Prefixes of the time metrics: all training messages, contributions, results; flows of other traffic, and the small
ones among these."""
PRECISION: Final = 0.002
"""Largest relative error of quantiles; not tuned."""
QUANTILES: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
SMALL_FLOW_BYTES: Final = 100_000
"""Flows up to this size count as small, as in the figures of pFabric and PIAS."""
SLOWDOWN_SIZES: Final = {"all": 1 << 62, "10kb": 10_000, "100kb": 100_000, "1mb": 1_000_000, "10mb": 10_000_000} | {
    "larger": 1 << 62
}
"""Largest size of a message in each class of slowdowns; a class begins where the one before ends."""
_QUANTILE_METRICS: Final = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
_BASE: Final = math.log1p(PRECISION)
RunEnd = Literal["complete", "stop_s", "stalled", "interrupted"]
"""Why a run ended: everything has finished, time was over, nothing more can happen, or a user stopped it."""


@dataclass(slots=True)
class TimeDistribution:
    """Times in picoseconds, counted in buckets that grow by `PRECISION` to save memory; the mean is exact."""

    count: int = 0
    total_ps: int = 0
    least_ps: int = 0
    most_ps: int = 0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, times_ps: NDArray[np.int64]) -> None:
        """Count times, int64 (n,)."""
        if not len(times_ps):
            return
        least, most = int(times_ps.min()), int(times_ps.max())
        self.least_ps = least if not self.count else min(self.least_ps, least)
        self.most_ps = max(self.most_ps, most)
        self.count += len(times_ps)
        # In two halves: the sum of times as long as the longest would not fit in 64 bits.
        self.total_ps += (int((times_ps >> 32).sum()) << 32) + int((times_ps & 0xFFFFFFFF).sum())
        numbers = np.floor(np.log(np.maximum(times_ps, 1)) / _BASE).astype(np.int64)
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self._buckets[int(number)] = self._buckets.get(int(number), 0) + int(count)

    @property
    def mean_s(self) -> float:
        """Return the mean in seconds; 0 if empty."""
        return self.total_ps / self.count / 1e12 if self.count else 0.0

    def quantile_s(self, share: float) -> float:
        """Return the quantile at ``share`` in seconds; 0 if empty."""
        wanted, seen = share * self.count, 0
        for number in sorted(self._buckets):
            seen += self._buckets[number]
            if seen >= wanted:
                middle = math.exp((number + 0.5) * _BASE)
                return min(max(middle, self.least_ps), self.most_ps) / 1e12
        return 0.0

    def as_json(self) -> dict[str, Any]:
        """Return count, mean and quantiles."""
        return {
            "count": self.count,
            "mean_s": significant(self.mean_s),
            "quantiles_s": [[share, significant(self.quantile_s(share))] for share in QUANTILES],
        }


class IdealTimes:
    """The times that messages take alone, without acknowledgements or windows, on the initial routes.

    The first packet crosses every link; the others follow at the rate of the slowest.
    """

    def __init__(self, plan: NetworkTables) -> None:
        self._plan, self._transports = plan, as_rows(plan.transports)
        self._paths: dict[tuple[int, int], tuple[int, int, int]] = {}

    def of(self, nodes: NDArray[Any]) -> NDArray[np.int64]:
        """Return the ideal times of messages, `dlcp.sim.graphs.graph.NODE_ROW` (n,), in picoseconds, int64 (n,)."""
        payload = self._transports["payload"][nodes["transport"]]
        header = self._transports["header_bytes"][nodes["transport"]]
        size = nodes["size_bytes"]
        first = np.minimum(size, payload) + header
        rest = size + -(-size // payload) * header - first
        pairs = zip(nodes["source"].tolist(), nodes["target"].tolist(), strict=True)
        delay, every, slowest = np.array([self._path(*pair) for pair in pairs], np.int64).reshape(-1, 3).T
        times: NDArray[np.int64] = delay + (first * every + rest * slowest) // 1024
        return times

    def _path(self, source: int, target: int) -> tuple[int, int, int]:
        """Return a path's delay, and the picoseconds that 1,024 bytes take on all its links, and on the slowest."""
        found = self._paths.get((source, target))
        if found is None:
            plan = self._plan
            links = [plan.links[number] for number in plan.routes.path(plan.topology.links, source, target)]
            times = [link.kibibyte_ps for link in links]
            found = self._paths[source, target] = sum(link.delay_ps for link in links), sum(times), max(times)
        return found


@dataclass(slots=True)
class MessageMeasures:
    """Completion times and losses of messages: contributions and results of training, and other traffic.

    A message's time runs from when its sender had it until its target had what it needed. It includes waiting for other
    messages of the same sender.

    Parameters
    ----------
    traffic
        Names of the other traffic.
    ideal
        The times that its messages would take alone.

    Attributes
    ----------
    slowdowns
        Of the other traffic, by the largest size of a message in `SLOWDOWN_SIZES`, counted as seconds.
    packets
        int64 (3, 2), of contributions and of results: their packets, how many of these never arrived, and packets sent,
        including retransmissions. An encoded contribution counts as the packets that it would have in full precision.
        None of them is missing: a lost packet of the lower plane only rounds values.
    """

    traffic: frozenset[str] = frozenset()
    ideal: IdealTimes | None = None
    slowdowns: dict[str, TimeDistribution] = field(
        default_factory=lambda: {name: TimeDistribution() for name in SLOWDOWN_SIZES}
    )
    times: dict[str, TimeDistribution] = field(default_factory=lambda: {name: TimeDistribution() for name in _TIMES})
    packets: NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, 2), np.int64))

    def __call__(self, submitted: SubmittedGraph, records: NDArray[Any]) -> None:
        """Add the records of a graph. Messages that are not done do not count."""
        nodes = submitted.graph.nodes
        sends = (nodes["size_bytes"] > 0) & (records["end_ps"] > 0)
        nodes, records, sizes, packets = nodes[sends], records[sends], submitted.sizes[sends], submitted.packets[sends]
        took = records["end_ps"] - records["begin_ps"]
        if submitted.label[0] in self.traffic:
            self.times["other"].add(took)
            self.times["small"].add(took[nodes["size_bytes"] <= SMALL_FLOW_BYTES])
            if self.ideal is not None:
                self._add_slowdowns(nodes["size_bytes"], took / self.ideal.of(nodes))
            return
        results = (nodes["message"] & RESULT_MESSAGE) != 0
        self.times["fct"].add(took)
        self.times["contribution"].add(took[~results])
        self.times["result"].add(took[results])
        encoded = sizes["upper"] > 0
        whole = np.where(encoded & ~results, packets, records["packets"])
        missing = np.where(encoded, 0, records["missing_packets"])
        for row, column in enumerate((whole, missing, records["sent_packets"])):
            self.packets[row] += column[~results].sum(), column[results].sum()

    def _add_slowdowns(self, sizes: NDArray[np.int64], ratios: NDArray[np.float64]) -> None:
        least = 0
        for name, most in SLOWDOWN_SIZES.items():
            own = sizes <= most if name == "all" else (sizes > least) & (sizes <= most)
            self.slowdowns[name].add((ratios[own] * 1e12).astype(np.int64))
            least = 0 if name == "all" else most

    @property
    def ratios(self) -> list[list[float]]:
        """Return the shares of packets that never arrived, and how often one was sent: of contributions, of results."""
        found: list[list[float]] = (self.packets[1:] / np.maximum(self.packets[0], 1)).tolist()
        return found


def significant(value: float) -> float:
    """Round a number to nine significant digits, for a file."""
    return float(f"{value:.9g}")


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: significant(value) for name, value in values.items()}


def run(
    item: ExperimentRun,
    engine: PacketEngineName = "auto",
    on_progress: Callable[[int, int, str], None] | None = None,
    recorder: Recorder | None = None,
) -> dict[str, Any]:
    """Run one combination of points.

    Parameters
    ----------
    engine
        The engine, unless the setting asks for flows.
    on_progress
        Called a few times a second with the number of steps that have ended, of all steps, and a note.
    recorder
        Looks at the run, and changes nothing.

    Returns
    -------
    The contents of the result file: plain values, the same in every process and on every machine for the same seed. If
    ``complete`` is false, a job or a message did not end: ``ended`` says why, ``unfinished`` how far it came, and
    there are no metrics of jobs and messages.
    """
    setting = item.setting
    messages = MessageMeasures(
        traffic=frozenset([*(each.name for each in setting.traffic), *(each.name for each in setting.patterns)])
    )

    def keep(submitted: SubmittedGraph, records: NDArray[Any]) -> None:
        messages(submitted, records)
        if recorder is not None:
            recorder(submitted, records)

    simulation = Simulation(setting, engine=engine, class_shares=class_shares(), on_records=keep)
    messages.ideal = IdealTimes(simulation.plan)
    jobs = place_jobs(setting.training, simulation.topology.hosts, setting.seed)
    traced = place_traces(setting.traces, jobs, simulation.topology.hosts, setting.seed)
    check_run_size(
        [
            *(training_size(job) for job in jobs),
            *map(trace_size, traced),
            *(pattern_size(each, simulation.topology.hosts) for each in setting.patterns),
        ]
    )
    skip_steps = StepSkipper(simulation, setting.skip_steady, jobs).skip_steps if setting.skip_steady else None
    trained = [
        pipelined_training(simulation, job) if job.spec.pipeline else training(simulation, job, skip_steps)
        for job in jobs
    ]
    started = start(simulation, [*trained, *(traced_job(simulation, progress) for progress in traced)])
    if started:
        simulation.process(_end(simulation, started))
    every_job: list[AnyProgress] = [*jobs, *traced]
    if recorder is not None:
        recorder.begin(simulation, every_job)
        simulation.process(_record(simulation, recorder))
    ended: RunEnd = "complete"
    try:
        simulation.run(on_progress and reporting(simulation, every_job, on_progress))
        ended = "stalled" if simulation.is_over else "stop_s"
    except RunOver:
        pass
    except KeyboardInterrupt:
        ended = "interrupted"
    unfinished = "" if ended == "complete" else _unfinished(simulation, every_job, ended)
    simulation.flush_records()
    if not (unfinished or every_job or messages.times["other"].count):
        unfinished = "no flow of the traffic began; raise its load or stop_s, or take another seed"
    return _document(item, simulation, jobs, traced, messages, ended if unfinished else "complete", unfinished)


def digest(item: ExperimentRun) -> str:
    """Return a hash of a run: its setting and the files that this names, and the simulator's sources."""
    parts: list[Any] = [FORMAT, sources_digest(), item.setting, item.convergence]
    parts += [trace_digest(job) for job in item.setting.traces]
    if isinstance(item.setting.topology, FileTopology):
        parts.append(Path(item.setting.topology.file).read_text(encoding="utf-8"))
    described = msgspec.json.encode(parts, order="sorted")
    return hashlib.sha256(described).hexdigest()[:16]


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write a result file atomically; devices and pipes are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    special = path.exists() and not path.is_file()  # a file must not replace /dev/null or /dev/stdout
    part = path if special else path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if not special:
        part.replace(path)


def _end(simulation: Simulation, started: list[Any]) -> Process:
    yield simulation.env.all_of(started)
    raise RunOver


def _unfinished(simulation: Simulation, jobs: Sequence[AnyProgress], ended: RunEnd) -> str:
    """Return which jobs, or without jobs how many messages, did not end, and why; empty if all did."""
    parts = [
        f"job {job.name!r} finished {len(job.end_ps):,} of {job.steps:,} steps"
        for job in jobs
        if len(job.end_ps) < job.steps
    ]
    if not jobs and (count := simulation.unfinished_messages):
        parts = [f"{count:,} messages had not arrived"]
    if not parts:
        return ""
    stop_s, failing = simulation.scenario.stop_s, ", or check the failures" if simulation.scenario.failures else ""
    why = {
        "stop_s": f"the run ended at stop_s, {stop_s:g} s; raise it, or make the job shorter{failing}",
        "stalled": "nothing more can happen in the network; check failures and routes",
        "interrupted": "the run was interrupted; run it again",
    }
    return f"{'; '.join(parts)}: {why[ended]}"


def _record(simulation: Simulation, recorder: Recorder) -> Process:
    """Let a recorder look at intervals, as long as anything else is left to happen."""
    env = simulation.env
    while simulation.engine.has_events() or env.peek() != float("inf"):
        yield env.timeout(recorder.interval_ps)
        recorder.look()


def _document(
    item: ExperimentRun,
    simulation: Simulation,
    jobs: list[PlacedJob],
    traced: list[TraceProgress],
    messages: MessageMeasures,
    ended: RunEnd,
    unfinished: str,
) -> dict[str, Any]:
    counts = simulation.engine.counts
    metrics = _counted(simulation)
    if not unfinished:
        metrics |= _metrics(jobs, traced, messages)
        metrics |= _convergence(item, jobs, messages, metrics)
        metrics |= _learning([job for job in jobs if job.curve])
    return {
        "experiment": item.experiment,
        "point": dict(item.point),
        "seed": item.setting.seed,
        "engine": simulation.fidelity,
        "version": dlcp.__version__,
        "digest": digest(item),
        "sources": sources_digest(),
        "complete": not unfinished,
        **({"ended": ended, "unfinished": unfinished} if unfinished else {}),
        "metrics": _rounded(metrics),
        "times": {name: times.as_json() for name, times in messages.times.items() if times.count},
        "jobs": [*map(_trained, jobs), *map(_repeated, traced)],
        "counts": counts_by_name(counts),
        "drops_by_class": drops_by_class(counts),
        # JSON has no infinity, such as the end of a failure without end: null stands for it.
        "setting": msgspec.json.decode(msgspec.json.encode(item.setting)),
    }


def _trained(job: PlacedJob) -> dict[str, Any]:
    """Return a training job for the result file."""
    optional = {
        "skipped_steps": job.skipped,
        "bits": job.bits,
        "pipeline": job.pipeline,
        "curve": [_rounded(msgspec.to_builtins(each)) for each in job.curve],
    }
    return _timed(job) | {name: value for name, value in optional.items() if value} | {"profile": job.profile.source}


def _repeated(job: TraceProgress) -> dict[str, Any]:
    """Return a traced job for the result file."""
    measured_s, note = job.workload.measured_s, job.workload.note
    found = {"measured_s": list(map(significant, measured_s)), "trace": job.job.file}
    return _timed(job) | found | ({"note": note} if note else {})


def _timed(job: AnyProgress) -> dict[str, Any]:
    step_s = list(map(significant, job.step_s))
    return {"name": job.name, "compute_s": significant(job.compute_s), "step_s": step_s}


def steady(steps: list[Number]) -> list[Number]:
    """Return the steps that count: all but the first, which begins with empty queues and small windows."""
    return steps[1:] or steps


def _counted(simulation: Simulation) -> dict[str, float]:
    """Return the metrics of a run that hold even if it is incomplete."""
    dropped = [count for name, count in counts_by_name(simulation.engine.counts).items() if name.startswith("drops_")]
    simulated_s = int(simulation.engine.now_ps + simulation.skipped_ps) / 1e12
    return {"simulated_s": simulated_s, "dropped_packets": float(sum(dropped))}


def _metrics(jobs: list[PlacedJob], traced: list[TraceProgress], messages: MessageMeasures) -> dict[str, float]:
    """Return the metrics for figures and claims of a complete run; see `sim/experiments/README.md`."""
    found: dict[str, float] = {}
    for prefix, times in messages.times.items():
        if times.count:
            found[f"{prefix}_mean_s"] = times.mean_s
            found |= {f"{prefix}_{name}_s": times.quantile_s(share) for name, share in _QUANTILE_METRICS.items()}
            found[f"{prefix}_max_s"] = times.most_ps / 1e12
    for name, slowdowns in messages.slowdowns.items():
        if slowdowns.count:
            prefix = "slowdown" if name == "all" else f"slowdown_{name}"
            found |= {f"{prefix}_mean": slowdowns.mean_s, f"{prefix}_p99": slowdowns.quantile_s(0.99)}
    (lost, results_lost), (sent, results_sent) = messages.ratios
    if messages.packets[0, 0]:
        found |= {"loss_ratio": lost, "contribution_sent_ratio": sent}
    if messages.packets[0, 1]:
        found |= {"result_loss_ratio": results_lost, "result_sent_ratio": results_sent}
    if bits := [each for job in jobs for each in steady(job.bits)]:
        found["bits_per_value"] = fmean(bits)
    every_job: list[AnyProgress] = [*jobs, *traced]
    counted = {job.name: steady(job.step_s) for job in every_job if job.step_s}
    if counted:
        every = [seconds for steps in counted.values() for seconds in steps]
        found["step_s"] = sum(every) / len(every)
        found["compute_s"] = fmean(job.compute_s for job in every_job)
        found["waiting_s"] = found["step_s"] - found["compute_s"]
        found["slowest_step_s"] = max(every)
    if any(job.step_s for job in jobs):
        found["samples_per_s"] = sum(
            job.profile.batch * job.spec.workers * len(steps) / sum(steps)
            for job in jobs
            if (steps := counted.get(job.name))
        )
        speeds = [
            (job.profile.compute_s / fmean(counted[job.name]), job.spec.workers)
            for job in jobs
            if job.step_s and job.profile.compute_s
        ]
        if speeds:
            found["efficiency"] = fmean(speed for speed, _ in speeds)
            found["speedup"] = fmean(speed * workers for speed, workers in speeds)
        samples = sum(job.minibatches * job.profile.batch for job in jobs)
        if not traced:  # whose packets would count, too
            found["packets_per_sample"] = int(messages.packets[2].sum()) / samples
    if measured := [seconds for each in traced for seconds in steady(each.workload.measured_s)]:
        found["measured_step_s"] = fmean(measured)
    return found


def _convergence(
    item: ExperimentRun, jobs: list[PlacedJob], messages: MessageMeasures, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return the factor on the number of steps due to loss and precision, and the step time multiplied by it.

    The factor of precision is the mean over a job's steps, of the job with the largest.
    """
    if not jobs or "step_s" not in metrics:
        return {}  # nothing that converges
    factor = curve(item.convergence).steps_factor(messages.ratios[0][0])
    by_job = [map(job.spec.precision_steps_factor, steady(job.bits)) for job in jobs if job.bits]
    factor *= max(map(fmean, by_job), default=1.0)
    return {"steps_factor": factor, "accuracy_step_s": factor * metrics["step_s"]}


def _learning(jobs: Sequence[PlacedJob]) -> dict[str, float]:
    """Return the accuracy of jobs with ``learn``, and when and after how many steps they reached their targets.

    These are means over jobs. Those of the target are missing if a job has not held it.
    """
    if not jobs:
        return {}
    found = {"accuracy": fmean(job.curve[-1].accuracy for job in jobs)}
    for name, unit in (("accuracy_s", "seconds"), ("accuracy_steps", "step")):
        reached = [
            progress_to({"curve": msgspec.to_builtins(job.curve)}, job.spec.learn.target, unit)
            for job in jobs
            if job.spec.learn
        ]
        if None not in reached:
            found[name] = fmean(value for value in reached if value is not None)
    return found


@cache
def sources_digest() -> str:
    """Return a hash of all sources that can change a run's results; it is the same on every machine."""
    found = hashlib.sha256()
    own = [path.relative_to(_SIMULATOR).as_posix() for path in _SIMULATOR.rglob("*.py")] + ["jobs/models.yaml"]
    for folder, names in ((_SIMULATOR, sorted(own)), (_DLCP, _SHARED)):
        for name in names:
            if folder is _DLCP or not name.startswith(_INDIFFERENT):
                found.update(f"{name}\0".encode() + (folder / name).read_bytes() + b"\0")
    found.update(PROGRAM_PATH.read_bytes())
    return found.hexdigest()[:16]
