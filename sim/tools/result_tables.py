# SPDX-License-Identifier: Apache-2.0
"""A run as tables for a spreadsheet or pandas: steps, ranks, messages, links and counts over time.

Units are in the names of columns. Times are in seconds of simulated time.
"""

import csv
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import PS_PER_S
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.experiments.recording import AnyProgress, LinkSamples, hosts_of, link_names
from dlcp.sim.experiments.results import ReportError
from dlcp.sim.experiments.running import IdealTimes
from dlcp.sim.graphs.collectives import RESULT_MESSAGE
from dlcp.sim.graphs.graph import row_type
from dlcp.sim.simulation import Simulation, SubmittedGraph
from dlcp.sim.traces.traced_jobs import TraceProgress

Table: TypeAlias = Mapping[str, NDArray[Any]]
"""Columns of equal length, by name."""
TableFormat = Literal["csv", "parquet"]
_ROWS_AT_ONCE: Final = 65_536
_COUNTED: Final = [cell for cell in EngineCounter if EngineCounter.EVENTS < cell < EngineCounter.DROPS_BY_CLASS]
_EVENT: Final = row_type(
    (np.int32, "label step source target"),
    (np.int64, "size_bytes begin_ps end_ps ideal_ps"),
    (np.int32, "packets missing_packets"),
    (np.int64, "sent_packets"),
    (np.bool_, "result congested"),
)
"""A message, or a computation if it has no bytes."""


class TableRecorder:
    """Keeps the messages of a run, as a `dlcp.sim.experiments.recording.Recorder`: about 80 bytes for each message.

    Messages and computations that had not ended when the run ended are left out.
    """

    def begin(self, simulation: Simulation, jobs: list[AnyProgress]) -> None:
        """Prepare for a run that is about to begin."""
        self._simulation, self._jobs = simulation, jobs
        self._samples, self._ideal = LinkSamples(simulation), IdealTimes(simulation.plan)
        self._labels: dict[str, int] = {}
        self._events: list[NDArray[Any]] = []

    @property
    def interval_ps(self) -> int:
        """Return the time to the next look."""
        return self._samples.interval_ps

    def look(self) -> None:
        """Take a sample of all links."""
        self._samples.look()

    def __call__(self, submitted: SubmittedGraph, records: NDArray[Any]) -> None:
        """Keep the messages and computations of a graph."""
        nodes = submitted.graph.nodes
        sends, computes = nodes["size_bytes"] > 0, (nodes["delay_ps"] > 0) & (nodes["source"] >= 0)
        kept = (sends | computes) & (records["end_ps"] > 0)
        nodes, records, sends = nodes[kept], records[kept], sends[kept]
        rows = np.zeros(len(nodes), _EVENT)
        rows["label"] = self._labels.setdefault(submitted.label[0], len(self._labels))
        for name in ("step", "source", "target", "size_bytes"):
            rows[name] = nodes[name]
        for name in ("end_ps", "packets", "missing_packets", "sent_packets", "congested"):
            rows[name] = records[name]
        rows["begin_ps"] = np.where(sends, records["begin_ps"], records["end_ps"] - nodes["delay_ps"])
        rows["ideal_ps"][sends] = self._ideal.of(nodes[sends])
        rows["result"] = (nodes["message"] & RESULT_MESSAGE) != 0
        self._events.append(rows)

    def tables(self) -> dict[str, Table]:
        """Return the tables of the run, by name."""
        self._samples.look()
        events = np.concatenate(self._events) if self._events else np.zeros(0, _EVENT)
        for job in self._jobs:
            if isinstance(job, TraceProgress):  # its column `step` tells messages apart
                own = events["label"] == self._labels.get(job.name, -1)
                events["step"][own] = np.searchsorted(np.array(job.end_ps, np.int64), events["begin_ps"][own], "right")
        return {
            "steps": self._steps(),
            "ranks": self._ranks(events),
            "messages": self._messages(events),
            "links": self._links(),
            "counts": self._counts(),
        }

    def _steps(self) -> Table:
        rows = []
        for job in self._jobs:
            for step, (begin, end) in enumerate(job.bounds_ps):
                seconds = (end - begin) / PS_PER_S
                rows.append((job.name, step, begin / PS_PER_S, end / PS_PER_S, seconds, job.compute_s))
        return _columns(("job", "step", "begin_s", "end_s", "step_s", "compute_s"), rows)

    def _ranks(self, events: NDArray[Any]) -> Table:
        """Return what each rank did in each finished step: a row for each."""
        rows = []
        for job in self._jobs:
            own = events[events["label"] == self._labels.get(job.name, -1)]
            workers, servers = hosts_of(job)
            hosts, bounds = (*workers, *servers), job.bounds_ps
            steps, size = len(bounds), 1 + max(hosts)
            # A cell for each step and host.
            taken = own["step"] < steps
            own = own[taken]
            cells = {end: own["step"].astype(np.int64) * size + own[end] for end in ("source", "target")}
            sends = own["size_bytes"] > 0
            computed = np.bincount(cells["source"][~sends], (own["end_ps"] - own["begin_ps"])[~sends], steps * size)
            sent, received = (np.bincount(at, own["size_bytes"], steps * size) for at in cells.values())
            ended = np.zeros(steps * size, np.int64)
            np.maximum.at(ended, cells["target"], own["end_ps"])
            for step in range(steps):
                for rank, host in enumerate(hosts):
                    cell = step * size + host
                    role = "worker" if rank < len(workers) else "server"
                    busy = computed[cell] / PS_PER_S, ended[cell] / PS_PER_S
                    rows.append((job.name, step, role, rank, host, *busy, int(sent[cell]), int(received[cell])))
        names = ("job", "step", "role", "rank", "host", "computing_s", "end_s", "sent_bytes", "received_bytes")
        return _columns(names, rows)

    def _messages(self, events: NDArray[Any]) -> Table:
        sent = events[events["size_bytes"] > 0]
        sent = sent[np.argsort(sent["begin_ps"], kind="stable")]
        took = sent["end_ps"] - sent["begin_ps"]
        jobs = {self._labels.get(job.name, -1) for job in self._jobs}
        half = np.where(sent["result"], "result", "contribution")
        return {
            "job": np.array(list(self._labels), object)[sent["label"]] if len(sent) else np.zeros(0, object),
            "kind": np.where(np.isin(sent["label"], list(jobs)), half, "other"),
            **{name: sent[name] for name in ("step", "source", "target", "size_bytes")},
            "begin_s": sent["begin_ps"] / PS_PER_S,
            "end_s": sent["end_ps"] / PS_PER_S,
            "took_s": took / PS_PER_S,
            "ideal_s": sent["ideal_ps"] / PS_PER_S,
            "slowdown_ratio": took / np.maximum(sent["ideal_ps"], 1),
            **{name: sent[name] for name in ("packets", "missing_packets", "sent_packets", "congested")},
        }

    def _links(self) -> Table:
        """Return the intervals in which a link carried or queued something."""
        samples, times = self._samples, self._samples.times_ps
        carried, queued, utilization = samples.carried_bytes, samples.queued_bytes, samples.utilization
        interval, link = np.nonzero((utilization > 0) | (queued > 0))
        begin, end = times[interval], times[interval + 1]
        return {
            "begin_s": begin / PS_PER_S,
            "end_s": end / PS_PER_S,
            "link": np.array(link_names(self._simulation), object)[link],
            "queue_bytes": queued[interval, link],
            "carried_bytes": carried[interval, link],
            "utilization_ratio": utilization[interval, link],
        }

    def _counts(self) -> Table:
        """Return the engine's counts of each interval, of those that count anything."""
        times, counts = self._samples.times_ps, self._samples.counts
        named = [cell for cell in _COUNTED if counts[:, cell].any()]
        bounds = {"begin_s": times[:-1] / PS_PER_S, "end_s": times[1:] / PS_PER_S}
        return {**bounds, **{cell.name.lower(): counts[:, cell] for cell in named}}


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    """Return rows as columns."""
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return {
        name: np.array(column, object if name in ("job", "role") else None)
        for name, column in zip(names, columns, strict=True)
    }


# -------------------------------------------------------------------------------------------------------------- writing


def table_writer(kind: TableFormat) -> Callable[[Table, Path], None]:
    """Return the function that writes a table as a file.

    Raises
    ------
    ReportError
        Parquet is asked for, and pyarrow is not installed.
    """
    if kind == "csv":
        return _write_csv
    if importlib.util.find_spec("pyarrow") is None:
        raise ReportError("--parquet requires pyarrow: pip install 'dlcp[parquet]', or use --csv")
    return _write_parquet


def write_tables(tables: Mapping[str, Table], folder: Path, kind: TableFormat) -> list[Path]:
    """Write each table as ``NAME.csv`` or ``NAME.parquet``, and return the files.

    Raises
    ------
    ReportError
        See `table_writer`, or a file cannot be written.
    """
    write, files = table_writer(kind), []
    for name, table in tables.items():
        files.append(folder / f"{name}.{kind}")
        try:
            write(table, files[-1])
        except OSError as error:
            raise ReportError(f"{files[-1]} cannot be written: {error.strerror or error}") from None
    return files


def _write_csv(table: Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(table)
        length = len(next(iter(table.values())))
        for start in range(0, length, _ROWS_AT_ONCE):
            part = [column[start : start + _ROWS_AT_ONCE].tolist() for column in table.values()]
            writer.writerows(zip(*part, strict=True))


def _write_parquet(table: Table, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(dict(table)), path)
