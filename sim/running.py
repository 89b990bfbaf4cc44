# SPDX-License-Identifier: Apache-2.0
"""One run of an experiment, from its setting to the numbers in its file."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from dlcp.sim.convergence.curves import curve
from dlcp.sim.counters import NAMES
from dlcp.sim.engine import EngineName
from dlcp.sim.experiment import Run, Setting
from dlcp.sim.graph import Graph
from dlcp.sim.jobs import background, failure
from dlcp.sim.measures import Messages, significant
from dlcp.sim.simulation import Process, Running, Simulation
from dlcp.sim.sources import sources_digest
from dlcp.sim.training.placement import place
from dlcp.sim.training.process import Progress, profile_of, training
from dlcp.sim.training.schedulers import class_shares

from dlcp import __version__

FORMAT: Final = 2
"""Of result files; another number makes a sweep run again."""

_PREFIXES: Final = {"all": "fct", "push": "push", "pull": "pull", "other": "other", "other_small": "small"}
_DROPS: Final = ("drops_policy", "drops_tail", "drops_early", "drops_link", "drops_route")


class _TrainingOver(Exception):  # noqa: N818 - not an error
    """All jobs have finished their steps, and what others still send is of no interest."""


class _Recorded(Simulation):
    """A simulation that knows which graphs are still open, for a run may end while others' flows are on their way."""

    def __init__(self, item: Run, engine: EngineName, messages: Messages) -> None:
        super().__init__(
            item.setting.scenario(), engine=engine, class_shares=class_shares(), on_records=self._take_records
        )
        self._open: dict[int, Running] = {}
        self._messages = messages

    def submit(self, graph: Graph, label: Any = None) -> Running:
        """Let a graph begin now."""
        running = super().submit(graph, label)
        self._open[running.number] = running
        return running

    def take_open(self) -> None:
        """Count what is over of graphs that are not."""
        for number, running in sorted(self._open.items()):
            self._messages(running, self.engine.records(number))
        self._open.clear()

    def _take_records(self, running: Running, records: Any) -> None:
        del self._open[running.number]
        self._messages(running, records)


def run(item: Run, engine: EngineName = "auto", heartbeat: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run one combination of points.

    Parameters
    ----------
    heartbeat
        Is told now and then how far the run is.

    Returns
    -------
    What goes into the run's file: plain values, the same in every process and on every machine for the same seed. An
    interrupted run returns what it has, with ``complete`` false.
    """
    setting = item.setting
    messages = Messages(traffic=frozenset(traffic.name for traffic in setting.traffic))
    simulation = _Recorded(item, engine, messages)
    jobs = [
        Progress(job, profile_of(job.spec)) for job in place(setting.training, simulation.network.hosts, setting.seed)
    ]
    _start(simulation, setting, jobs)
    if heartbeat is not None:
        simulation.process(_beat(simulation, jobs, heartbeat))
    complete = True
    try:
        simulation.run()
        complete = not jobs or all(len(job.step_s) == job.job.spec.steps for job in jobs)
    except _TrainingOver:
        pass
    except KeyboardInterrupt:
        complete = False
    simulation.take_open()
    return _document(item, simulation, jobs, messages, complete)


def digest(item: Run) -> str:
    """Return what a run's file has to carry to be that run's: a hash of its setting and of what it was run by."""
    said = msgspec.json.encode([FORMAT, sources_digest(), item.setting, item.convergence], order="sorted")
    return hashlib.sha256(said).hexdigest()[:16]


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write a result file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def _start(simulation: Simulation, setting: Setting, jobs: list[Progress]) -> None:
    scenario = simulation.scenario
    started = [simulation.process(training(simulation, job)) for job in jobs]
    for number, spec in enumerate(scenario.background):
        simulation.process(background(simulation, spec, number))
    for wrong in scenario.failures:
        simulation.process(failure(simulation, wrong))
    if started:
        simulation.process(_end(simulation, started))


def _end(simulation: Simulation, started: list[Any]) -> Process:
    yield simulation.env.all_of(started)
    raise _TrainingOver


def _beat(simulation: Simulation, jobs: list[Progress], heartbeat: Callable[[str], None]) -> Process:
    while True:
        yield simulation.env.timeout(1_000_000_000)
        steps = sum(len(job.step_s) for job in jobs)
        wanted = sum(job.job.spec.steps for job in jobs)
        heartbeat(f"{int(simulation.env.now) / 1e9:.0f} ms simulated, {steps} of {wanted} steps")


def _document(
    item: Run, simulation: Simulation, jobs: list[Progress], messages: Messages, complete: bool
) -> dict[str, Any]:
    counts = simulation.engine.counts
    first = NAMES["drops_by_class"]
    metrics = _metrics(simulation, jobs, messages)
    metrics |= _convergence(item.convergence, messages.loss_ratio, metrics)
    return {
        "experiment": item.experiment,
        "point": dict(item.point),
        "seed": item.setting.seed,
        "version": __version__,
        "digest": digest(item),
        "sources": sources_digest(),
        "complete": complete,
        "metrics": {name: significant(value) for name, value in metrics.items()},
        "times": {name: times.as_json() for name, times in messages.times.items() if times.count},
        "jobs": [
            {
                "name": job.job.name,
                "compute_s": significant(job.compute_s),
                "step_s": [significant(seconds) for seconds in job.step_s],
                "profile": job.profile.source,
            }
            for job in jobs
        ],
        "counts": {name: int(counts[cell]) for name, cell in NAMES.items() if name != "drops_by_class"},
        "drops_by_class": counts[first : first + 8].tolist(),
        "setting": msgspec.to_builtins(item.setting),
    }


def _metrics(simulation: Simulation, jobs: list[Progress], messages: Messages) -> dict[str, float]:
    """Return what figures and claims can ask for; see README.md."""
    counts = simulation.engine.counts
    found: dict[str, float] = {"simulated_s": int(simulation.engine.now_ps) / 1e12}
    for name, prefix in _PREFIXES.items():
        times = messages.times[name]
        if times.count:
            found[f"{prefix}_mean_s"] = times.mean_s
            found[f"{prefix}_p50_s"] = times.quantile_s(0.5)
            found[f"{prefix}_p99_s"] = times.quantile_s(0.99)
            found[f"{prefix}_p999_s"] = times.quantile_s(0.999)
            found[f"{prefix}_max_s"] = times.most_ps / 1e12
    found["loss_ratio"] = messages.loss_ratio
    found["dropped_packets"] = float(sum(int(counts[NAMES[name]]) for name in _DROPS))
    # The first step begins with empty queues and small windows.
    steady = {job.job.name: job.step_s[1:] or job.step_s for job in jobs if job.step_s}
    if steady:
        every = [seconds for steps in steady.values() for seconds in steps]
        found["step_s"] = sum(every) / len(every)
        found["compute_s"] = sum(job.compute_s for job in jobs) / len(jobs)
        found["waiting_s"] = found["step_s"] - found["compute_s"]
        found["samples_per_s"] = sum(
            job.profile.batch * job.job.spec.workers * len(steps) / sum(steps)
            for job in jobs
            if (steps := steady.get(job.job.name))
        )
    return found


def _convergence(name: str, loss_ratio: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return how many times as many steps the loss costs, and a step's time with them: time to accuracy is as that."""
    if "step_s" not in metrics:
        return {}
    factor = curve(name).steps_factor(loss_ratio)
    return {"steps_factor": factor, "accuracy_step_s": factor * metrics["step_s"]}
