# SPDX-License-Identifier: Apache-2.0
"""One step of a simulated job as a page to play: what each rank does, and for whom it waits; queues and drops."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.inputs.error_text import nearest
from dlcp.report.style import render
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.experiments.recording import AnyProgress, LinkSamples, RunOver, hosts_of, link_names
from dlcp.sim.experiments.results import ReportError
from dlcp.sim.graphs.graph import Graph
from dlcp.sim.simulation import Simulation, SubmittedGraph

SHOWN_RANKS: Final = 32
"""Ranks on the page: as many as fit on a tall screen."""
SHOWN_LINKS: Final = 8
LANE_POINTS: Final = 400
"""Points of time at which messages on the way are counted: one for every two pixels of a lane."""
LANE_WIDTH: Final = 1000
"""Width of a lane in the units of its drawing."""
_OWN_MESSAGES: Final = "its own messages"
_SHORT_GAP: Final = 1 / 2000
"""Gaps between computations are not shown if they are shorter than this share of the step: half a pixel."""
_COUNTS: Final[Mapping[str, Sequence[EngineCounter]]] = {
    "dropped": [cell for cell in EngineCounter if EngineCounter.DROPS_POLICY <= cell <= EngineCounter.DROPS_ROUTE],
    "marked": [EngineCounter.MARKS],
    "trimmed": [EngineCounter.TRIMS],
    "sent again": [EngineCounter.RETRANSMITTED],
}


class StepRecorder:
    """Keeps one step of a job, as a `dlcp.sim.experiments.recording.Recorder`, and ends the run after it.

    Parameters
    ----------
    job
        Its name; None for the first.
    step
        Its number, from 0; None for the last.

    Raises
    ------
    ReportError
        When the run begins: there is no such job or step.
    """

    def __init__(self, job: str | None = None, step: int | None = None) -> None:
        self._name, self._wanted = job, step

    def begin(self, simulation: Simulation, jobs: list[AnyProgress]) -> None:
        """Prepare for a run that is about to begin."""
        by_name = {job.name: job for job in jobs}
        if not jobs:
            raise ReportError("the experiment has no job whose step could be shown; add training or traces")
        if self._name is not None and self._name not in by_name:
            raise ReportError(f"--job: there is no job {self._name!r}{nearest(self._name, by_name)}")
        self.simulation = simulation
        self.job = jobs[0] if self._name is None else by_name[self._name]
        self.step = self.job.steps - 1 if self._wanted is None else self._wanted
        if self.step >= self.job.steps:
            raise ReportError(f"--step: {self.job.name} has steps 0 to {self.job.steps - 1}, got {self.step}")
        self.samples = LinkSamples(simulation)
        self.graphs: list[tuple[Graph, NDArray[Any]]] = []
        self._began = self.step == 0

    @property
    def interval_ps(self) -> int:
        """Return the time to the next look."""
        return self.samples.interval_ps

    def look(self) -> None:
        """Take a sample; begin anew with the step, and end the run after it."""
        self.samples.look()
        finished = len(self.job.end_ps)
        if finished == self.step and not self._began:
            self._began = True
            self.samples.restart()
        if finished > self.step:
            raise RunOver

    def __call__(self, submitted: SubmittedGraph, records: NDArray[Any]) -> None:
        """Keep a graph that may have a part in the step."""
        if submitted.label[0] == self.job.name and len(self.job.end_ps) >= self.step:
            self.graphs.append((submitted.graph, records))


@dataclass(frozen=True, slots=True)
class LaneSegment:
    """An activity of a rank, in microseconds from the step's beginning.

    Parameters
    ----------
    kind
        ``computing`` or ``waiting``.
    peer
        Whose message or computation it waits for: the last one that had to come, as on a critical path. Empty if it
        does not wait, or if nobody is known.
    computes
        Whether ``peer`` still computes; otherwise its message is on the way.
    """

    begin_us: float
    end_us: float
    kind: str
    peer: str = ""
    computes: bool = False


@dataclass(frozen=True, slots=True)
class RankLane:
    """A rank on the page, and the number of its messages on the way at `LANE_POINTS` points of time."""

    name: str
    segments: Sequence[LaneSegment]
    outgoing: NDArray[np.int64]
    incoming: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LinkLane:
    """A link on the page: bytes queued for it, and how busy it is, at each sample."""

    name: str
    queue_bytes: NDArray[np.int64]
    busy: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepPlayback:
    """A step to show.

    Attributes
    ----------
    waits
        Waiting time in microseconds, by the rank that was waited for.
    times_us
        End of each sample of ``links`` and ``counts``.
    counts
        Packets in each sample, by what happened to them; only what did happen.
    """

    job: str
    step: int
    steps: int
    span_us: float
    ranks: Sequence[RankLane]
    hidden_ranks: int
    computing_share: float
    waits: Mapping[str, float]
    times_us: NDArray[np.float64]
    links: Sequence[LinkLane]
    counts: Mapping[str, NDArray[np.int64]]


def step_playback(recorder: StepRecorder) -> StepPlayback:
    """Return the step that a recorder has kept.

    Raises
    ------
    ReportError
        The run ended before the step did.
    """
    job, bounds = recorder.job, recorder.job.bounds_ps
    if len(bounds) <= recorder.step:
        raise ReportError(
            f"the run ended before step {recorder.step} of {job.name}; if it was not interrupted, raise stop_s"
        )
    begin, end = bounds[recorder.step]
    workers, servers = hosts_of(job)
    names = {host: f"rank {rank}" for rank, host in enumerate(workers)}
    names |= {host: f"server {number}" for number, host in enumerate(servers)}
    traced = [_Traced.of(graph, records, begin, end) for graph, records in recorder.graphs]
    lanes = [_lane(host, name, traced, names, begin, end) for host, name in names.items()]
    waits: defaultdict[str, float] = defaultdict(float)
    for lane in lanes:
        for each in lane.segments:
            if each.peer:
                waits[each.peer] += each.end_us - each.begin_us
    span_us = (end - begin) / 1e6
    computing = [each.end_us - each.begin_us for lane in lanes for each in lane.segments if each.kind == "computing"]
    times_us, links, counts = _sampled(recorder, names, begin, end)
    return StepPlayback(
        job=job.name,
        step=recorder.step,
        steps=job.steps,
        span_us=span_us,
        ranks=_shown(lanes, waits),
        hidden_ranks=max(0, len(lanes) - SHOWN_RANKS),
        computing_share=sum(computing) / (span_us * len(workers)),
        waits=dict(sorted(waits.items(), key=lambda item: -item[1])),
        times_us=times_us,
        links=links,
        counts=counts,
    )


def _shown(lanes: Sequence[RankLane], waits: Mapping[str, float]) -> list[RankLane]:
    """Return the ranks that others waited for longest, in their order."""
    kept = {lane.name for lane in sorted(lanes, key=lambda lane: -waits.get(lane.name, 0.0))[:SHOWN_RANKS]}
    return [lane for lane in lanes if lane.name in kept]


@dataclass(frozen=True, slots=True)
class _Traced:
    """A graph with the times of its nodes.

    Attributes
    ----------
    last_before
        The node that each node waited for last; -1 for none.
    """

    graph: Graph
    begin_ps: NDArray[np.int64]
    end_ps: NDArray[np.int64]
    sends: NDArray[np.bool_]
    last_before: NDArray[np.int64]

    @classmethod
    def of(cls, graph: Graph, records: NDArray[Any], begin: int, end: int) -> "_Traced":
        nodes, ends = graph.nodes, records["end_ps"].copy()
        sends, delay = nodes["size_bytes"] > 0, nodes["delay_ps"]
        before, after = np.repeat(np.arange(len(graph)), np.diff(graph.starts)), graph.followers
        order = np.lexsort((ends[before], after))
        last_before = np.full(len(graph), -1)
        last_before[after[order]] = before[order]
        # A computation that goes on when the run ends has no times yet.
        ready = np.ones(len(graph), np.bool_)
        np.logical_and.at(ready, after, ends[before] >= 0)
        going_on = (ends < 0) & ready & ~sends & (last_before >= 0)
        ends[going_on] = ends[last_before[going_on]] + delay[going_on]
        begins = np.where(sends, records["begin_ps"], ends - delay)
        # A message on its way arrives later.
        ends[sends & (ends < 0) & (begins >= 0)] = end + 1
        return cls(graph, begins, ends, sends, last_before)

    def computations(self, host: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the computations of a host that have a part in the time from ``begin`` to ``end``."""
        nodes = self.graph.nodes
        own = ~self.sends & (nodes["source"] == host) & (nodes["delay_ps"] > 0)
        return np.flatnonzero(own & (self.end_ps > begin) & (self.begin_ps <= end) & (self.end_ps >= 0))

    def critical_path(self, node: int, since: int) -> Iterator[tuple[int, int, bool]]:
        """Yield what a computation waited for since a time, backwards: when it began, whose it was, and if it computed.

        Each message or computation is the last one that the next one waited for.
        """
        nodes, at = self.graph.nodes, int(self.last_before[node])
        now = int(self.begin_ps[node])
        while at >= 0 and now > since:
            sends = bool(self.sends[at])
            if (sends or nodes["delay_ps"][at] > 0) and self.begin_ps[at] < now:
                now = max(int(self.begin_ps[at]), since)
                yield now, int(nodes["source"][at]), not sends
            at = int(self.last_before[at])


def _lane(host: int, name: str, traced: Sequence[_Traced], names: Mapping[int, str], begin: int, end: int) -> RankLane:
    computations = [(each, node) for each in traced for node in each.computations(host, begin, end).tolist()]
    computations.sort(key=lambda pair: int(pair[0].begin_ps[pair[1]]))
    segments: list[LaneSegment] = []
    gap_us = _SHORT_GAP * (end - begin) / 1e6
    now = 0.0
    for each, node in computations:
        first = max(0.0, (int(each.begin_ps[node]) - begin) / 1e6)
        last = min(int(each.end_ps[node]) - begin, end - begin) / 1e6
        if first - now > gap_us:
            segments += _waits(each, node, host, names, begin, now, first, gap_us)
            now = first
        if last > now:
            if segments and segments[-1].kind == "computing":
                now = segments.pop().begin_us
            segments.append(LaneSegment(now, last, "computing"))
            now = last
    points = np.linspace(begin, end, LANE_POINTS)
    counts = [_on_the_way(traced, column, host, points) for column in ("source", "target")]
    return RankLane(name, segments, *counts)


def _waits(
    traced: _Traced,
    node: int,
    host: int,
    names: Mapping[int, str],
    begin: int,
    begin_us: float,
    end_us: float,
    gap_us: float,
) -> list[LaneSegment]:
    """Return the parts of a wait before a computation, divided by whom it was for."""
    parts: list[LaneSegment] = []
    for since, source, computes in traced.critical_path(node, begin + round(begin_us * 1e6)):
        first = max(begin_us, (since - begin) / 1e6)
        peer = _OWN_MESSAGES if source == host else names.get(source, "")
        last = parts.pop() if parts and (parts[-1].peer, parts[-1].computes) == (peer, computes) else None
        if end_us - first > gap_us or last:
            parts.append(LaneSegment(first, last.end_us if last else end_us, "waiting", peer, computes))
            end_us = first
    if end_us - begin_us > gap_us or not parts:
        parts.append(LaneSegment(begin_us, end_us, "waiting"))
    else:
        parts[-1] = dataclasses.replace(parts[-1], begin_us=begin_us)
    return parts[::-1]


def _on_the_way(traced: Sequence[_Traced], column: str, host: int, points: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many messages from or to a host are on the way at each point of time."""
    found = np.zeros(len(points), np.int64)
    for each in traced:
        own = each.sends & (each.graph.nodes[column] == host) & (each.begin_ps >= 0)
        found += np.searchsorted(np.sort(each.begin_ps[own]), points, "right")
        found -= np.searchsorted(np.sort(each.end_ps[own]), points, "right")
    return found


def _sampled(
    recorder: StepRecorder, ranks: Mapping[int, str], begin: int, end: int
) -> tuple[NDArray[np.float64], list[LinkLane], dict[str, NDArray[np.int64]]]:
    """Return the samples of the step: their times, the links with the longest queues, and the counts."""
    samples = recorder.samples
    samples.look()
    inside = (samples.times_ps[1:] > begin) & (samples.times_ps[:-1] < end)
    times_us = np.minimum((samples.times_ps[1:][inside] - begin) / 1e6, (end - begin) / 1e6)
    queued, busy, counts = samples.queued_bytes[inside], samples.utilization[inside], samples.counts[inside]
    names = link_names(recorder.simulation, ranks)
    order = np.lexsort((-busy.sum(axis=0), -queued.max(axis=0, initial=0)))[:SHOWN_LINKS].tolist()
    links = [LinkLane(names[link], queued[:, link], busy[:, link]) for link in order if busy[:, link].any()]
    found = {name: counts[:, cells].sum(axis=1) for name, cells in _COUNTS.items()}
    return times_us, links, {name: column for name, column in found.items() if column.any()}


# ----------------------------------------------------------------------------------------------------------------- page


def playback_page(playback: StepPlayback, title: str) -> str:
    """Return the page: one file, which needs no network."""
    return render(
        Path(__file__).parent / "playback.html",
        {"blocks": _blocks, "area": _area},
        playback=playback,
        title=title,
        lane=LANE_WIDTH,
        busiest=max((int(max(lane.outgoing.max(), lane.incoming.max())) for lane in playback.ranks), default=0) or 1,
        longest=max((int(link.queue_bytes.max()) for link in playback.links), default=0),
        data=json.dumps(_data(playback)).replace("<", "\\u003c"),
    )


def _data(playback: StepPlayback) -> dict[str, Any]:
    """Return what the page's script shows at a point of time."""
    return {
        "span": playback.span_us,
        "ranks": [
            {
                "segments": [[each.begin_us, each.end_us, _words(each)] for each in lane.segments],
                "outgoing": lane.outgoing.tolist(),
                "incoming": lane.incoming.tolist(),
            }
            for lane in playback.ranks
        ],
        "times": [round(each, 3) for each in playback.times_us.tolist()],
        "links": [
            {"queue": link.queue_bytes.tolist(), "busy": np.rint(100 * link.busy).astype(int).tolist()}
            for link in playback.links
        ],
        "counts": {name: np.cumsum(column).tolist() for name, column in playback.counts.items()},
    }


def _words(segment: LaneSegment) -> str:
    if segment.kind == "computing":
        return "computes"
    return "waits" + (f" for {segment.peer}" if segment.peer else "") + (" to compute" if segment.computes else "")


def _blocks(segments: Sequence[LaneSegment], kind: str, span_us: float, top: float, height: float) -> str:
    """Return the path of all segments of a kind."""
    scale = LANE_WIDTH / span_us
    return "".join(
        f"M{each.begin_us * scale:.2f} {top:g}h{(each.end_us - each.begin_us) * scale:.2f}v{height:g}"
        f"H{each.begin_us * scale:.2f}z"
        for each in segments
        if each.kind == kind
    )


def _area(
    values: NDArray[Any], most: float, bottom: float, height: float, times: NDArray[np.float64] | None, span_us: float
) -> str:
    """Return the path of an area of steps; without ``times``, values are at even distances."""
    ends = np.linspace(0, LANE_WIDTH, len(values) + 1)[1:] if times is None else times * LANE_WIDTH / span_us
    heights = bottom - values * (height / (most or 1))
    steps = [f"V{level:.1f}H{x:.1f}" for level, x in zip(heights.tolist(), ends.tolist(), strict=True)]
    return f"M0 {bottom:g}{''.join(steps)}V{bottom:g}z"
