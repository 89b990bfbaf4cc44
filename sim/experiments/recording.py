# SPDX-License-Identifier: Apache-2.0
"""Record a run, for pages and tables: links over time, and the bounds of a job's steps."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.jobs.training import PlacedJob
from dlcp.sim.simulation import Simulation, SubmittedGraph
from dlcp.sim.traces.traced_jobs import TraceProgress

AnyProgress = PlacedJob | TraceProgress
FIRST_INTERVAL_PS: Final = 1_000_000
"""A microsecond: about the time of a packet, so that the first intervals of a run, or of a step, lose nothing."""
SAMPLES_MAX: Final = 1024
"""Samples of a link: about one for each pixel of a wide page."""
SAMPLES_MIN: Final = 64
CELLS_MAX: Final = 1 << 24
"""Samples of all links: 256 MiB."""


class RunOver(Exception):  # noqa: N818 - not an error
    """The run can end now, whatever is left."""


class Recorder(Protocol):
    """Looks at a run at intervals, and at each of its graphs."""

    @property
    def interval_ps(self) -> int:
        """Return the time to the next look."""

    def begin(self, simulation: Simulation, jobs: list[AnyProgress]) -> None:
        """Prepare for a run that is about to begin."""

    def look(self) -> None:
        """Look at the run; raise `RunOver` if it has shown all there is to see."""

    def __call__(self, submitted: SubmittedGraph, records: NDArray[Any]) -> None:
        """Look at a graph that is closed, or as it is at the end of the run."""


class LinkSamples:
    """Queues, carried bytes and drops, at about `SAMPLES_MAX` points of time.

    It begins with short intervals. Whenever there are too many samples, each two become one: with the larger queue, and
    all bytes. So the length of the run need not be known.

    Attributes
    ----------
    interval_ps
        Time between two samples.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._room = max(SAMPLES_MIN, min(SAMPLES_MAX, CELLS_MAX // len(simulation.plan.links))) & ~1
        self.restart()

    def restart(self) -> None:
        """Forget all samples, and begin again now."""
        self.interval_ps = FIRST_INTERVAL_PS
        # A row of `_sent` and `_counts` has totals up to its time, so there is one row more than samples.
        self._times = [int(self._simulation.env.now)]
        self._queued: list[NDArray[np.int64]] = []
        self._sent = [self._simulation.engine.port_bytes()["sent_bytes"]]
        self._counts = [self._simulation.engine.counts.copy()]

    def look(self) -> None:
        """Take a sample."""
        now, rows = int(self._simulation.env.now), self._simulation.engine.port_bytes()
        if now == self._times[-1]:
            return
        self._times.append(now)
        self._queued.append(rows["bytes"])
        self._sent.append(rows["sent_bytes"])
        self._counts.append(self._simulation.engine.counts.copy())
        if len(self._queued) >= self._room:
            self.interval_ps *= 2
            self._queued = [np.maximum(*self._queued[at : at + 2]) for at in range(0, self._room, 2)]
            for column in (self._times, self._sent, self._counts):
                del column[1::2]

    @property
    def times_ps(self) -> NDArray[np.int64]:
        """Return the bounds of the intervals, int64 (samples + 1,)."""
        return np.array(self._times, np.int64)

    @property
    def queued_bytes(self) -> NDArray[np.int64]:
        """Return the bytes queued for each link at a switch, at the end of each interval, int64 (samples, links)."""
        return np.array(self._queued, np.int64).reshape(len(self._queued), -1)

    @property
    def carried_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that each link carried in each interval, int64 (samples, links)."""
        carried: NDArray[np.int64] = np.diff(np.array(self._sent), axis=0).astype(np.int64)
        return carried

    @property
    def utilization(self) -> NDArray[np.float64]:
        """Return the share of each interval in which a link was busy, float64 (samples, links).

        Bytes count when their packet begins to leave, so the part that leaves later is carried over.
        """
        ps_per_byte = np.array([link.kibibyte_ps / 1024 for link in self._simulation.plan.links])
        lengths, work_ps = np.diff(self.times_ps), self.carried_bytes * ps_per_byte
        for own, following, length in zip(work_ps, work_ps[1:], lengths, strict=False):
            following += np.maximum(own - length, 0)
        shares: NDArray[np.float64] = np.minimum(work_ps / lengths[:, None], 1.0)
        return shares

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the engine's counts of each interval, int64 (samples, cells)."""
        counts: NDArray[np.int64] = np.diff(np.array(self._counts), axis=0).astype(np.int64)
        return counts


def link_names(simulation: Simulation, hosts: Mapping[int, str] | None = None) -> list[str]:
    """Return a name for each link, such as ``leaf0 → host3``; ``hosts`` have other names for some hosts."""
    names = [*simulation.topology.names]
    for host, name in (hosts or {}).items():
        names[host] = name
    return [f"{names[link.source]} → {names[link.target]}" for link in simulation.plan.links]


def hosts_of(job: AnyProgress) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the hosts of a job's workers, rank by rank, and those of its servers."""
    return (job.hosts, ()) if isinstance(job, TraceProgress) else (job.workers, job.servers)
