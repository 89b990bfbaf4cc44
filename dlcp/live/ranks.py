# SPDX-License-Identifier: Apache-2.0
"""The state of all ranks of a training, from the snapshots that they write (:mod:`dlcp.session.snapshots`).

A snapshot holds sums since the rank started. A rank's present activity is the difference of two snapshots, and a
session's history is a series of such differences, so a missed snapshot loses nothing.
"""

import logging
import operator
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from dlcp.session.snapshots import SNAPSHOT_SUFFIX, STEP_EDGES_S, RankSnapshot
from dlcp.transport.ledger import COUNTS, coded

PRESENT_SNAPSHOTS: Final = 12
"""Number of latest snapshots with new steps that form the present: about ten seconds, or a few steps where a step takes
longer than the interval of snapshots. Not tuned."""
SILENT_SNAPSHOTS: Final = 6
"""A rank is silent after this many missed snapshots; fewer may be due to a busy host."""
HISTORY_POINTS: Final = 240
"""Longest history of a session; beyond that, pairs of points are merged. The plot has no room to show more."""
SNAPSHOT_BYTES_MAX: Final = 1 << 24
"""Largest snapshot that is read. With a thousand layers and ranks a snapshot has some 500 kB."""
_NUMBER_MAX: Final = 1e18
"""Numbers of a snapshot are smaller, so that all results of computing with them are finite."""
_OF_PEER: Final = frozenset(["rate_bps", "window_packets", "rtt_s", "paths", "paths_left", "worst_path_loss"])
"""Fields about a peer that is reached over the network."""
log = logging.getLogger("dlcp")


class HistoryPoint(NamedTuple):
    """The activity of a session's ranks in one interval. Times are in seconds; all but ``time_s`` are means per step.

    Attributes
    ----------
    time_s
        End of the interval, since the session began.
    step_s
        Duration of a step.
    computing_least_s, computing_most_s
        Time per step without waiting, of the rank that waited most and of the one that waited least.
    lost, retransmitted
        Shares of the packets sent.
    encoded
        Share of the messages' packets that hold encoded values.
    """

    time_s: float
    step_s: float
    computing_least_s: float
    computing_most_s: float
    lost: float
    retransmitted: float
    encoded: float

    def merged(self, later: "HistoryPoint") -> "HistoryPoint":
        """Return one point for this interval and the next."""
        means = [(ours + theirs) / 2 for ours, theirs in zip(self, later, strict=True)]
        return HistoryPoint(*means)._replace(
            time_s=later.time_s,
            computing_least_s=min(self.computing_least_s, later.computing_least_s),
            computing_most_s=max(self.computing_most_s, later.computing_most_s),
        )


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A rank's activity between two of its snapshots. Times are in seconds per step, counts in packets.

    Attributes
    ----------
    steps
        Number of steps.
    step_s, waiting_s
        Duration of a step, and its waiting time by the rank waited for (as text).
    packets
        Packet counts, by the names of :data:`dlcp.transport.ledger.COUNTS`, and ``encoded``.
    activities_s
        Durations of its activities; empty if ranks are not compared.
    """

    steps: int
    step_s: float
    waiting_s: Mapping[str, float]
    packets: Mapping[str, int]
    activities_s: Mapping[str, float]

    @classmethod
    def between(cls, before: RankSnapshot | None, after: RankSnapshot) -> "RankProgress":
        """Return the activity between two snapshots; since the start if ``before`` is None or of another process."""
        if before and before["began_unix_s"] != after["began_unix_s"]:
            before = None
        steps = sum(after["steps"]) - (sum(before["steps"]) if before else 0)
        step_s = after["step_s"] - (before["step_s"] if before else 0.0)
        waited: Mapping[str, float] = before["waiting_s"] if before else {}
        earlier = packets_of(before) if before else {}
        waiting = {
            peer: (total_s - waited.get(peer, 0.0)) / max(1, steps) for peer, total_s in after["waiting_s"].items()
        }
        packets = {name: count - earlier.get(name, 0) for name, count in packets_of(after).items()}
        spent: Mapping[str, float] = before["activities_s"] if before else {}
        activities = {
            name: (total_s - spent.get(name, 0.0)) / max(1, steps) for name, total_s in after["activities_s"].items()
        }
        return cls(steps, step_s / max(1, steps), waiting, packets, activities)

    @property
    def computing_s(self) -> float:
        """Time per step without waiting, in seconds."""
        return max(0.0, self.step_s - sum(self.waiting_s.values()))


def parse_snapshot(data: bytes) -> RankSnapshot:
    """Return the snapshot in a file, with all fields, each of its type, and finite numbers.

    Raises
    ------
    ValueError
        It is not a snapshot; the message says which field is wrong.
    """
    try:
        found = msgspec.json.decode(data, type=RankSnapshot)
        peers = msgspec.convert(found["peers"], dict[int, dict[str, bool | float]], str_keys=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if len(found["steps"]) != len(STEP_EDGES_S):
        raise ValueError(f"steps has {len(found['steps'])} classes, not {len(STEP_EDGES_S)}")
    needed = [(f"packets of {peer}", set(COUNTS) - counts.keys()) for peer, counts in found["packets"].items()]
    for peer, about in peers.items():
        if about.get("local") is not True:
            needed.append((f"peers {peer}", {"local", *_OF_PEER} - about.keys()))
    for place, absent in needed:
        if absent:
            raise ValueError(f"{place} lacks {', '.join(sorted(absent))}")
    if not all(abs(number) < _NUMBER_MAX for number in _numbers(found)):
        raise ValueError(f"it has a number of {_NUMBER_MAX:g} or more")
    return found


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in plain values."""
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value


def packets_of(snapshot: RankSnapshot) -> dict[str, int]:
    """Return a rank's packet counts, summed over all peers, and the number of ``encoded`` packets."""
    counts = {name: sum(int(counts[name]) for counts in snapshot["packets"].values()) for name in COUNTS}
    return counts | {"encoded": sum(packets for packets, _ in coded(snapshot["by_bits"]).values())}


@dataclass(slots=True)
class WatchedRank:
    """A rank, identified by its snapshot file.

    Attributes
    ----------
    latest
        Its latest snapshot.
    changed_s
        When that was read, by this process's monotonic clock, because hosts' clocks differ.
    """

    latest: RankSnapshot
    changed_s: float
    _advances: deque[RankSnapshot] = field(default_factory=lambda: deque(maxlen=PRESENT_SNAPSHOTS))
    """The latest snapshots, only those with more finished steps than the one before."""

    def __post_init__(self) -> None:
        self._advances.append(self.latest)

    def take(self, snapshot: RankSnapshot, now_s: float) -> None:
        """Add the rank's next snapshot."""
        if snapshot["began_unix_s"] != self.latest["began_unix_s"]:  # from a new process of the same rank
            self._advances.clear()
        self.latest, self.changed_s = snapshot, now_s
        if not self._advances or sum(snapshot["steps"]) > sum(self._advances[-1]["steps"]):
            self._advances.append(snapshot)

    @property
    def present(self) -> RankProgress:
        """The rank's present activity."""
        first, last = self._advances[0], self._advances[-1]
        return RankProgress.between(first if last is not first else None, last)

    def shown(self, now_s: float, over: bool) -> dict[str, Any]:
        """Return the rank's part of the page, as plain values."""
        latest, present = self.latest, self.present
        silent_s = now_s - self.changed_s
        silent = silent_s > SILENT_SNAPSHOTS * latest["every_s"] or over
        return {
            **{name: value for name, value in latest.items() if name != "layers"},  # shown for all ranks together
            "silent_s": silent_s if silent and not latest["ended"] else None,
            "packets": packets_of(latest),
            "present": {
                "steps": present.steps,
                "step_s": present.step_s,
                "computing_s": present.computing_s,
                "waiting_s": present.waiting_s,
                "packets": present.packets,
                "activities_s": present.activities_s,
            },
            "peers": [
                {"rank": int(peer), **latest["packets"].get(peer, dict.fromkeys(COUNTS, 0)), **about}
                for peer, about in latest["peers"].items()
            ],
        }


@dataclass(slots=True)
class History:
    """The history of a session's steps since it began."""

    began_s: float
    points: list[HistoryPoint] = field(default_factory=list)
    _last: dict[Path, RankSnapshot] = field(default_factory=dict)

    def sample(self, ranks: Mapping[Path, WatchedRank], now_s: float) -> None:
        """Add a point if all ranks that have not ended have finished steps since the last one."""
        latest = {path: rank.latest for path, rank in ranks.items() if not rank.latest["ended"]}
        done = [RankProgress.between(self._last.get(path), snapshot) for path, snapshot in latest.items()]
        if not done or not all(progress.steps for progress in done):
            return
        self._last = dict(latest)
        packets = {name: sum(progress.packets[name] for progress in done) for name in done[0].packets}
        totals = dict.fromkeys(("lost", "retransmitted"), max(1, packets["sent"]))
        totals["encoded"] = max(1, packets["delivered"] + packets["lost"])
        computing_s = [progress.computing_s for progress in done]
        self.points.append(
            HistoryPoint(
                now_s - self.began_s,
                sum(progress.step_s for progress in done) / len(done),
                min(computing_s),
                max(computing_s),
                *(packets[name] / total for name, total in totals.items()),
            )
        )
        if len(self.points) > HISTORY_POINTS:
            pairs = zip_longest(self.points[::2], self.points[1::2])
            self.points = [first.merged(second) if second else first for first, second in pairs]


class Training:
    """All ranks whose snapshots are in the given folders. Not thread-safe.

    Parameters
    ----------
    folders
        Folders in which ranks write snapshots.

    Attributes
    ----------
    over
        Whether all ranks are known to have ended.
    refused
        Files whose latest content is not a valid snapshot. The rank's last valid one, if any, stays in use.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.over = False
        self.refused: set[Path] = set()
        self._folders = folders
        self._ranks: dict[Path, WatchedRank] = {}
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._histories: dict[str, History] = {}

    def refresh(self) -> bool:
        """Read the snapshots written since the last call; return whether there were any."""
        now_s = time.monotonic()
        changed = False
        for path in (path for folder in self._folders for path in folder.glob(f"*{SNAPSHOT_SUFFIX}")):
            changed |= self._read(path, now_s)
        if changed:
            for name, ranks in self._sessions().items():
                self._histories.setdefault(name, History(now_s)).sample(ranks, now_s)
        return changed

    @property
    def snapshots(self) -> list[RankSnapshot]:
        """The latest snapshot of each rank and session."""
        return [rank.latest for rank in self._ranks.values()]

    def document(self) -> dict[str, Any]:
        """Return the content of the page as plain values, the latest session first."""
        now_s = time.monotonic()
        sessions = sorted(self._sessions().items(), key=lambda each: -_began(each[1].values()))
        return {
            "now_unix_s": time.time(),
            "refused": sorted(path.name for path in self.refused),
            "over": self.over or bool(self._ranks and all(rank.latest["ended"] for rank in self._ranks.values())),
            "sessions": [self._shown(name, ranks, now_s) for name, ranks in sessions],
        }

    def _shown(self, name: str, ranks: Mapping[Path, WatchedRank], now_s: float) -> dict[str, Any]:
        """Return a session's part of the page; who has ended, and is no member any more, has none."""
        latest = max((rank.latest for rank in ranks.values()), key=operator.itemgetter("written_unix_s"))
        members = [rank.shown(now_s, self.over) for rank in ranks.values() if rank.latest["rank"] in latest["ranks"]]
        return {
            "session": name,
            "ranks": latest["ranks"],
            "members": sorted(members, key=operator.itemgetter("rank")),
            "layers": _layers([rank.latest for rank in ranks.values()]),
            "history": self._histories[name].points,
        }

    def _read(self, path: Path, now_s: float) -> bool:
        try:
            status = path.stat()
            stamp = status.st_mtime_ns, status.st_ino
            if self._stamps.get(path) == stamp:
                return False
            self._stamps[path] = stamp
            if status.st_size > SNAPSHOT_BYTES_MAX:
                raise ValueError(f"{status.st_size} bytes exceed {SNAPSHOT_BYTES_MAX}")
            snapshot = parse_snapshot(path.read_bytes())
            alone = WatchedRank(snapshot, now_s)
            alone.shown(now_s, self.over)  # an invalid snapshot fails here, and not later together with other ranks
            _layers([snapshot])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            log.warning("%s is left out: it is not a snapshot by this version of DLCP (%r)", path, error)
            self.refused.add(path)
            return True
        self.refused.discard(path)
        if path in self._ranks:
            self._ranks[path].take(snapshot, now_s)
        else:
            self._ranks[path] = alone
        return True

    def _sessions(self) -> dict[str, dict[Path, WatchedRank]]:
        """Return the ranks of each session. A rank with no session name yet is added to a session that lacks it."""
        found: dict[str, dict[Path, WatchedRank]] = defaultdict(dict)
        for path, rank in sorted(self._ranks.items(), key=lambda each: not each[1].latest["session"]):
            name = rank.latest["session"] or next((name for name in found if name and _lacks(found[name], rank)), "")
            found[name][path] = rank
        return found


def _lacks(ranks: Mapping[Path, WatchedRank], newcomer: WatchedRank) -> bool:
    """Return whether a session has the same list of ranks as a newcomer's, and the newcomer's is missing from it."""
    there = {rank.latest["rank"] for rank in ranks.values()}
    alike = next(iter(ranks.values())).latest["ranks"] == newcomer.latest["ranks"]
    return alike and newcomer.latest["rank"] not in there


def _began(ranks: Iterable[WatchedRank]) -> float:
    return max(float(rank.latest["began_unix_s"]) for rank in ranks)


def _layers(snapshots: Sequence[RankSnapshot]) -> list[dict[str, Any]]:
    """Return each layer's packet counts, summed over the ranks, in order from the model's input to its output."""
    names: dict[int, list[str]] = {}
    totals: dict[int, list[int]] = {}
    for position, layer_names, *counts in (row for snapshot in snapshots for row in snapshot["layers"]):
        names[position] = layer_names or names.get(position, [])
        totals[position] = [a + b for a, b in zip(totals.get(position, (0, 0, 0)), counts, strict=True)]
    counted = "packets", "lost", "encoded"
    return [
        {"position": position, "names": names[position], **dict(zip(counted, counts, strict=True))}
        for position, counts in sorted(totals.items())
    ]
