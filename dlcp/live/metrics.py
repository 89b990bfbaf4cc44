# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of ranks; those of switches are in :mod:`dlcp.controller.watch`.

Labels are bounded: a session's ranks, and their peers. The session's name is unique to each run.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dlcp.ledger import COUNTS
from dlcp.live.training import RankProgress
from dlcp.session.session import SessionPhase
from dlcp.session.snapshots import STEP_EDGES_S, UNKNOWN, RankSnapshot

_RANK: Final = ["session", "rank"]
SESSION_PHASES: Final = tuple(phase for phase in SessionPhase if phase is not SessionPhase.CLOSED)
"""Phases of a session. A closed session reports its last phase before."""
_PACKETS: Final = {
    "sent": "Packets sent, each transmission counted",
    "delivered": "Packets that arrived",
    "lost": "Packets that never arrived and were not retransmitted, within the loss bound",
    "retransmitted": "Transmissions after a packet's first",
    "deferred": "Packets deferred to a later step",
}
_OF_PEERS: Final = {
    "rate_bytes_per_second": (
        "rate_bps",
        1 / 8,
        "Rate at which the peer receives queued packets, where it is known",
    ),
    "window_packets": ("window_packets", 1, "Packets that may be in flight to the peer"),
    "round_trip_seconds": ("rtt_s", 1, "Smoothed round-trip time to the peer, where it is known"),
    "paths": ("paths", 1, "Paths on which packets have been sent to the peer"),
    "paths_left": ("paths_left", 1, "Paths to the peer that were abandoned because others are better"),
}
"""Metrics of peers reached over the network: the name in a snapshot, the factor, and the help text."""
_UNKNOWN_IF_ZERO: Final = ("rate_bps", "rtt_s")


class RankCollector(Collector):
    """Turns snapshots of ranks into metrics.

    Parameters
    ----------
    snapshots
        The latest of each rank.
    refused
        Number of files left out because they are not valid snapshots.
    """

    def __init__(self, snapshots: Sequence[RankSnapshot], refused: int = 0) -> None:
        self._snapshots, self._refused = snapshots, refused

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        if self._refused:
            yield GaugeMetricFamily("dlcp_rank_refused_snapshots", "Files that are not valid snapshots", self._refused)
        yield self._about()
        yield self._steps()
        yield from self._times()
        yield from self._states()
        for name in COUNTS:
            metric = CounterMetricFamily(f"dlcp_rank_{name}_packets", _PACKETS[name], labels=[*_RANK, "peer"])
            for each in self._snapshots:
                for peer, counts in each["packets"].items():
                    metric.add_metric([*_rank(each), peer], counts[name])
            yield metric
        for name, (key, factor, words) in _OF_PEERS.items():
            of_peers = GaugeMetricFamily(f"dlcp_rank_peer_{name}", words, labels=[*_RANK, "peer"])
            for each in self._snapshots:
                for peer, about in each["peers"].items():
                    if about.get(key, 0) or (key in about and key not in _UNKNOWN_IF_ZERO):
                        of_peers.add_metric([*_rank(each), peer], factor * about[key])
            yield of_peers

    def _about(self) -> Metric:
        labels = [*_RANK, "process_rank", "host"]
        metric = GaugeMetricFamily("dlcp_rank_info", "1, with the place where the rank runs as labels", labels=labels)
        for each in self._snapshots:
            metric.add_metric([*_rank(each), str(each["process_rank"]), each["host"]], 1)
        return metric

    def _steps(self) -> Metric:
        metric = HistogramMetricFamily("dlcp_rank_step_seconds", "Duration of training steps", labels=_RANK)
        edges = ["+Inf" if edge == math.inf else str(edge) for edge in STEP_EDGES_S]
        for each in self._snapshots:
            buckets = list(zip(edges, map(float, accumulate(each["steps"])), strict=True))
            metric.add_metric(_rank(each), buckets, each["step_s"])
        return metric

    def _times(self) -> Iterable[Metric]:
        computing = CounterMetricFamily(
            "dlcp_rank_compute_seconds", "Time that steps did not spend waiting for averages", labels=_RANK
        )
        waiting = CounterMetricFamily(
            "dlcp_rank_waiting_seconds",
            "Time that steps waited for averages, by the peer whose message ended the wait",
            labels=[*_RANK, "peer"],
        )
        for each in self._snapshots:
            done = RankProgress.between(None, each)
            computing.add_metric(_rank(each), done.computing_s * done.steps)
            for peer, waited_s in each["waiting_s"].items():
                waiting.add_metric([*_rank(each), "unknown" if peer == UNKNOWN else peer], waited_s)
        yield computing
        yield waiting

    def _states(self) -> Iterable[Metric]:
        phase = GaugeMetricFamily("dlcp_rank_phase", "1 for the rank's current phase", labels=[*_RANK, "phase"])
        ended = GaugeMetricFamily("dlcp_rank_ended", "1 if the rank has left the session", labels=_RANK)
        exceeded = CounterMetricFamily(
            "dlcp_rank_bound_exceeded_messages", "Messages that lost more than the loss bound allows", labels=_RANK
        )
        waited = GaugeMetricFamily(
            "dlcp_rank_waited_steps",
            "Largest number of consecutive steps for which a packet was deferred",
            labels=_RANK,
        )
        written = GaugeMetricFamily(
            "dlcp_rank_snapshot_timestamp_seconds", "Unix time of the rank's latest snapshot", labels=_RANK
        )
        for each in self._snapshots:
            rank = _rank(each)
            for known in SESSION_PHASES:
                phase.add_metric([*rank, known.value], each["phase"] == known.value)
            ended.add_metric(rank, each["ended"])
            exceeded.add_metric(rank, each["bound_exceeded"])
            waited.add_metric(rank, each["waited_steps"])
            written.add_metric(rank, each["written_unix_s"])
        yield from (phase, ended, exceeded, waited, written)


def _rank(snapshot: RankSnapshot) -> list[Any]:
    return [snapshot["session"], str(snapshot["rank"])]
