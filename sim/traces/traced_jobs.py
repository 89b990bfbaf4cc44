# SPDX-License-Identifier: Apache-2.0
"""Jobs that repeat a trace: recognize its format, place its ranks on hosts, and make their graph.

`dlcp.sim.experiments.scenario_run.traced_job` runs them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from dlcp.inputs.document import Document, DocumentError, PlaceError
from dlcp.inputs.foreign_formats import foreign_format
from dlcp.sim.graphs.collectives import AllReduceSpec
from dlcp.sim.jobs.run_size import GraphCounter, PartSize
from dlcp.sim.jobs.training import PlacedJob
from dlcp.sim.scenario import CollectiveJob, TraceJob, choose_hosts
from dlcp.sim.simulation import StepTimes
from dlcp.sim.traces.chakra import SUFFIX_PATTERN, rank_files, read_chakra
from dlcp.sim.traces.goal import is_binary_goal, read_goal
from dlcp.sim.traces.operations import (
    OperationKind,
    TracedCollective,
    TraceFormatError,
    TraceGraph,
    Workload,
    add_traced,
    check_workload,
    collection_paused,
    trace_content,
    workload_graph,
)
from dlcp.sim.traces.profiler_trace import is_dlcp_trace, read_dlcp_trace, read_pytorch_profiles

_OtherJob = PlacedJob | CollectiveJob
OPERATION_BYTES: Final = 1_500
"""Memory of an operation: a ring of 128 ranks as GOAL took 0.30 GB for 131,000."""
_PROFILES: Final = ("*.json", "*.json.gz")
_KEPT: Final = 8
"""Traces that are kept in memory, because each run of an experiment needs them again; not tuned."""


def read_trace(job: TraceJob) -> Workload:
    """Return the job in a trace, checked: it can run on any network with enough hosts.

    Raises
    ------
    TraceFormatError
        A file is wrong or incomplete; the message names the file, the rank, the operation and the reason.
    """
    files = trace_files(Path(job.file))
    groups = tuple(sorted(job.groups.items()))
    return _read(tuple(files), tuple(map(_version, files)), job.ranks, groups, job.flops, job.eager_bytes)


def trace_files(path: Path) -> list[Path]:
    """Return the files of a trace.

    Raises
    ------
    TraceFormatError
        There is none.
    """
    if path.is_dir():
        found = sorted(file for pattern in _PROFILES for file in path.glob(pattern))
        if found:
            return found
        jobs = {match["prefix"]: file for file in path.iterdir() if (match := SUFFIX_PATTERN.match(file.name))}
        if len(jobs) > 1:
            raise TraceFormatError(
                f"{path}: the folder has {len(jobs)} Chakra traces; name {min(jobs)}.0.et or another"
            )
        if not jobs:
            raise TraceFormatError(f"{path}: the folder has no profiles (*.json, *.json.gz) and no NAME.RANK.et")
        return rank_files(*jobs.values())
    if path.is_file() and not SUFFIX_PATTERN.match(path.name):
        return [path]
    return rank_files(path)


def trace_digest(job: TraceJob) -> str:
    """Return a hash of the contents of a trace's files."""
    found = hashlib.sha256()
    for file in trace_files(Path(job.file)):
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _version(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_mtime_ns, about.st_size


@lru_cache(maxsize=_KEPT)
def _read(
    files: tuple[Path, ...],
    versions: tuple[Any, ...],
    ranks: int | None,
    groups: tuple[tuple[str, tuple[int, ...]], ...],
    flops: float | None,
    eager_bytes: int | None,
) -> Workload:
    """Return the job in some files; ``versions`` tell a changed file from the one in the cache."""
    with collection_paused():
        workload, alike = _workload(files, ranks, groups, flops)
    if ranks is not None and not alike:
        raise TraceFormatError(
            f"{files[0]}: `ranks` is for a single file of one rank; this trace has {len(workload.ranks)} of its own"
        )
    if eager_bytes is not None:
        workload.eager_bytes = eager_bytes
    check_workload(workload)
    return workload


def _workload(
    files: Sequence[Path], ranks: int | None, groups: Sequence[tuple[str, tuple[int, ...]]], flops: float | None
) -> tuple[Workload, bool]:
    """Return the job in some files, and whether a single file may stand for several ranks."""
    if files[0].suffix == ".et":
        alike = len(files) == 1
        return read_chakra([*files] * (ranks or 1) if alike else [*files], groups=dict(groups), flops=flops), alike
    contents = [trace_content(file) for file in files]
    if contents[0].lstrip()[:1] not in (b"{", b"["):
        if not is_binary_goal(contents[0]) and b"num_ranks" not in contents[0]:
            if sentence := foreign_format(contents[0], _plain(files[0])):
                raise TraceFormatError(f"{files[0]}: {sentence}")
            raise TraceFormatError(
                f"{files[0]}: not a trace: expected GOAL (num_ranks ...), Chakra (NAME.RANK.et) or Chrome events (JSON)"
            )
        return read_goal(files[0], contents[0]), False
    documents = [(file, _chrome(file, content)) for file, content in zip(files, contents, strict=True)]
    if is_dlcp_trace(documents[0][1]["traceEvents"]):
        if len(files) > 1:
            raise TraceFormatError(f"{files[0].parent}: a trace of DLCP is one file with all ranks; name the file")
        return read_dlcp_trace(files[0], documents[0][1]["traceEvents"]), False
    return read_pytorch_profiles(documents, ranks), len(files) == 1


def _plain(file: Path) -> Any:
    """Return the content of a file that may be YAML; None if it is not."""
    try:
        return Document(file).content
    except DocumentError:
        return None


def _chrome(file: Path, content: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        reason = foreign_format(content) or f"not complete JSON: {error}"
        raise TraceFormatError(f"{file}: {reason}") from None
    if sentence := foreign_format(content, document):
        raise TraceFormatError(f"{file}: {sentence}")
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceFormatError(f"{file}: JSON without traceEvents; this is neither DLCP's trace nor PyTorch's")
    return document


# ---------------------------------------------------------------------------------------------------------- simulating


@dataclass(slots=True)
class TraceProgress(StepTimes):
    """Progress of a traced job; a trace without steps is one step.

    Parameters
    ----------
    hosts
        A host for each rank.
    number
        Number of the job in the simulation.
    """

    job: TraceJob
    workload: Workload
    hosts: tuple[int, ...]
    number: int

    def __post_init__(self) -> None:
        """Count the steps of all turns."""
        self.name, self.steps = self.job.name, self.job.repeat * max(1, len(self.workload.steps))

    @property
    def compute_s(self) -> float:
        """Return the longest computing time of a rank, per step."""
        most = max(self.workload.compute_s(rank) for rank in range(len(self.workload.ranks)))
        return most * self.job.compute_factor / max(1, len(self.workload.steps))

    def graph(self, transport: int) -> TraceGraph:
        """Return the graph of one turn of the job; ``transport`` is the number of its transport."""
        return workload_graph(self.workload, self.hosts, transport, self.job, self.number)


def place_traces(traces: Sequence[TraceJob], others: Sequence[_OtherJob], hosts: int, seed: int) -> list[TraceProgress]:
    """Return traced jobs on their hosts, numbered behind the other jobs.

    Parameters
    ----------
    others
        Jobs whose hosts are left alone by traced jobs without ``hosts`` of their own.

    Raises
    ------
    PlaceError
        A trace cannot be used, or the hosts do not fit its ranks; ``steps`` lead to its place.
    """
    used = set[int]().union(*(job.hosts for job in (*others, *traces)))
    placed: list[TraceProgress] = []
    for number, job in enumerate(traces):
        try:
            workload = read_trace(job)
        except TraceFormatError as error:
            raise PlaceError(str(error), "traces", number, "file") from None
        count, chosen = len(workload.ranks), job.hosts
        if count > 1 and job.ranks_per_node >= count:
            raise PlaceError(
                f"{job.file} has {count} ranks, all on one node: nothing would cross the network; make nodes smaller",
                *("traces", number, "ranks_per_node"),
            )
        if not chosen:
            free = [host for host in range(hosts) if host not in used]
            if len(free) < count:
                raise PlaceError(
                    f"{job.file} has {count} ranks, and {len(free)} of {hosts} hosts are free; use a larger topology",
                    *("traces", number),
                )
            chosen = tuple(choose_hosts(free, count, job.placement, np.random.default_rng([seed, 0x7ACE, number])))
            used.update(chosen)
        beyond = [host for host in chosen if host >= hosts]
        if len(chosen) != count or len(set(chosen)) < count or beyond:
            wrong = f"host {beyond[0]} does not exist" if beyond else f"{len(set(chosen))} different ones are given"
            raise PlaceError(
                f"{job.file} has {count} ranks, and needs as many hosts from 0 to {hosts - 1}; {wrong}",
                *("traces", number, "hosts"),
            )
        placed.append(TraceProgress(job, workload, chosen, len(others) + number))
    return placed


def trace_size(progress: TraceProgress) -> PartSize:
    """Return the size of a traced job."""
    job, workload = progress.job, progress.workload

    @cache
    def count(kind: TracedCollective, ranks: int) -> int:
        counter = GraphCounter()
        spec = AllReduceSpec(range(ranks), ranks, 0)
        add_traced(counter, kind, job.collective or workload.algorithm, spec, 0, np.arange(ranks))
        return len(counter)

    # An operation becomes up to two nodes, one on average. Each rank has its part of a collective.
    nodes = sum(
        count(each.collective, len(each.group)) / len(each.group) if each.kind is OperationKind.COLLECTIVE else 1.0
        for each in workload.operations()
    )
    ways = "fewer ranks or steps of the trace, or a `collective` of fewer messages"
    return PartSize(job.name, "the trace", ways, round(nodes), 1, job.repeat, OPERATION_BYTES)
