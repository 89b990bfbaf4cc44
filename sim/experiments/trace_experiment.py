# SPDX-License-Identifier: Apache-2.0
"""An experiment around a trace, and the trace of a job in an experiment."""

from pathlib import Path
from typing import Any

import yaml

from dlcp.inputs.document import PlaceError
from dlcp.inputs.error_text import nearest
from dlcp.sim.experiments.experiment import ExperimentRun, RunSetting, changed_fields
from dlcp.sim.experiments.fitted_network import FittedNetwork
from dlcp.sim.graphs.graph import Graph
from dlcp.sim.jobs.run_size import check_run_size, training_size
from dlcp.sim.jobs.step_graph import training_graph
from dlcp.sim.jobs.training import place_jobs
from dlcp.sim.scenario import TraceJob
from dlcp.sim.traces.chakra import SUFFIX_PATTERN, write_chakra
from dlcp.sim.traces.goal import write_goal
from dlcp.sim.traces.operations import OperationKind, Workload
from dlcp.sim.traces.traced_jobs import place_traces, read_trace, trace_size
from dlcp.values.planes import FULL_BITS


def trace_experiment(job: TraceJob, network: FittedNetwork, seed: int) -> dict[str, Any]:
    """Return the contents of an experiment file with one traced job.

    Raises
    ------
    TraceFormatError
        The trace cannot be used.
    """
    return {
        "name": "trace",
        "title": f"{Path(job.file).name} on a network",
        "question": "How long does the traced job take on this network?",
        "setting": changed_fields(_setting(job, network, seed)),
    }


def trace_run(job: TraceJob, network: FittedNetwork, seed: int) -> ExperimentRun:
    """Return the only run of `trace_experiment`.

    Raises
    ------
    ValueError
        The trace cannot be used, or does not fit the network.
    """
    setting = _setting(job, network, seed)
    setting.check_senders("traces")
    return ExperimentRun(experiment="trace", point={}, setting=setting, convergence="published")


def _setting(job: TraceJob, network: FittedNetwork, seed: int) -> RunSetting:
    return RunSetting(**network.fields(len(read_trace(job).ranks)), traces=(job,), seed=seed)


def write_experiment(described: dict[str, Any], path: Path) -> None:
    """Write an experiment file."""
    text = yaml.safe_dump(described, sort_keys=False, default_flow_style=None, width=110)
    path.write_text("# SPDX-License-Identifier: Apache-2.0\n" + text, encoding="utf-8")


def summary(workload: Workload) -> str:
    """Return a line about what a trace contains."""
    kinds = [operation.kind for operation in workload.operations()]
    counts = {kind: kinds.count(kind) for kind in OperationKind}
    compute_s = max(workload.compute_s(rank) for rank in range(len(workload.ranks)))
    steps = f", {len(workload.steps)} steps" if workload.steps else ""
    return (
        f"{len(workload.ranks)} ranks{steps}, {counts[OperationKind.COMPUTE]} computations (at most {compute_s:.6g} s "
        f"on a rank), {counts[OperationKind.SEND]} messages ({workload.message_bytes:,} bytes), "
        f"{workload.collectives} collectives"
    )


# -------------------------------------------------------------------------------------------------------------- writing


def job_graph(setting: RunSetting, name: str | None = None) -> Graph:
    """Return a job of an experiment's run as one graph: all steps of a training job, or one turn of a traced one.

    Parameters
    ----------
    name
        Name of the job; not needed if there is only one.

    Raises
    ------
    ValueError
        There is no such job.
    """
    topology = setting.topology.build()
    placed = {job.name: job for job in place_jobs(setting.training, topology.hosts, setting.seed)}
    names = [*placed, *(job.name for job in setting.traces)]
    if name is None and len(names) != 1:
        raise PlaceError(f"the experiment has {len(names)} jobs; choose one with --job{nearest('', names)}")
    chosen = names[0] if name is None else name
    if chosen not in names:
        raise PlaceError(f"there is no job {chosen!r}{nearest(chosen, names)}")
    numbers = {transport: number for number, transport in enumerate(setting.transports)}
    if chosen in placed:
        job = placed[chosen]
        if job.spec.pipeline or job.spec.precision != FULL_BITS:
            raise PlaceError(
                f"job {chosen!r} has a pipeline or a precision, which a trace cannot express; leave them out"
            )
        check_run_size([training_size(job, at_once=True)])
        return training_graph(job, topology, numbers[job.spec.transport], setting.seed)
    traced = place_traces(setting.traces, [*placed.values()], topology.hosts, setting.seed)
    progress = next(each for each in traced if each.job.name == chosen)
    check_run_size([trace_size(progress)])
    return progress.graph(numbers[progress.job.transport]).graph


def write_trace(graph: Graph, path: Path) -> list[Path]:
    """Write a graph as a trace, and return its files: GOAL (``NAME.goal``) or Chakra (``NAME.et``).

    Raises
    ------
    ValueError
        The name is neither, or the graph cannot be written; see `dlcp.sim.traces.goal.write_goal`.
    OSError
        A file cannot be written.
    """
    if path.suffix == ".goal":
        write_goal(graph, path)
        return [path]
    if path.suffix == ".et":
        match = SUFFIX_PATTERN.match(path.name)
        return write_chakra(graph, path.with_name(match["prefix"] if match else path.stem))
    raise PlaceError(f"{path}: the name has to end in .goal or .et")
