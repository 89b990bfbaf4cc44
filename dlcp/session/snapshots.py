# SPDX-License-Identifier: Apache-2.0
"""Snapshots for watching a rank while it trains: step durations, waiting times by rank, and packet counts.

A thread writes a snapshot once a second to a small file that replaces the last one, so slow or crashed readers do not
affect training. :mod:`dlcp.live` shows the files of all ranks. A snapshot holds only totals, so its size does not grow
with time; for single events, see :mod:`dlcp.host.timeline`.
"""

import json
import logging
import math
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol, TypedDict, TypeVar, cast

from dlcp.host.closing import ExitCallback
from dlcp.session.options import Options
from dlcp.session.slowness import Verdict
from dlcp.transport import Connection, Endpoint, Membership, TransportError
from dlcp.transport.ledger import Ledger
from dlcp.values.planes import FULL_BITS
from dlcp.values.tags import Segment

SNAPSHOT_SUFFIX: Final = ".snapshot"
EVERY_S: Final = 1.0
"""Interval between a rank's snapshots: often enough for a viewer, at a cost of a thousandth of a core."""
ASKING_S: Final = 1.0
"""How long to wait for an answer of the endpoint's thread, which may be busy with gradients. Not tuned."""
STEP_EDGES_S: Final = (*(0.001 * 2**power for power in range(18)), math.inf)
"""Upper edges of the histogram of step durations: 1 ms to 131 s, and infinity. Each is twice the last, so quantiles are
right within a factor of 1.4, from toy models to the largest."""
NAMING_STEPS: Final = 2
"""After this many steps all layers have been seen, so their names are no longer collected."""
UNKNOWN: Final = ""
"""Key of waiting time without a known cause: the fallback does not report which rank it waits for."""
WATCHED: Final = "watched"
"""The phase of a rank that is only watched: its gradients are averaged without DLCP."""
log = logging.getLogger("dlcp")
_serial = count()
_File = TypeVar("_File", bound="SnapshotFile")


class SlowRank(TypedDict):
    """Who makes the other ranks wait; see :class:`dlcp.session.slowness.Verdict`."""

    text: str
    """The verdict as a sentence."""
    steps: int
    step_s: float
    network_s: float
    rank: int | None
    peer: int | None
    cause: str | None
    lost_s: float
    layers: str


class RankSnapshot(TypedDict):
    """A rank's snapshot, as JSON. Times are in seconds, counts in packets; ranks used as keys are text."""

    session: str
    """Name of the session, the same on all its ranks; ``""`` until they have joined."""
    rank: int
    ranks: list[int]
    """All ranks of the session."""
    process_rank: int
    """This process's rank in the whole job."""
    process: int
    host: str
    began_unix_s: float
    written_unix_s: float
    every_s: float
    """Interval between snapshots."""
    phase: str
    """See :class:`dlcp.session.training_session.SessionPhase`, or :data:`WATCHED`; if it has ended, the phase before
    that.
    """
    reason: str
    """Why DLCP does not average; ``""`` while it does."""
    fallback: str
    """The averager in use when DLCP is not."""
    route: str
    """The current route and the reason for it; ``""`` if DLCP averages all steps."""
    framework_steps: int
    """Number of steps that the framework has averaged meanwhile."""
    changes: list[dict[str, Any]]
    """The latest changes of the ranks; see :class:`dlcp.session.training_session.RankChange`."""
    stood_s: float
    """How long training stood still in all changes of the ranks, in seconds."""
    ended: bool
    gave_up: str | None
    step: int
    """The current step; -1 before the first."""
    steps: list[int]
    """Number of finished steps by duration; see :data:`STEP_EDGES_S`."""
    step_s: float
    """Total duration of the finished steps."""
    waiting_s: dict[str, float]
    """Waiting time in those steps, by the rank that was waited for, or :data:`UNKNOWN`."""
    loss_bound: float
    bound_exceeded: int
    """Number of messages that lost more than their bound."""
    worst_loss: float
    """The largest share of its packets that a message has lost."""
    bits: int
    """Bits of a value in the latest steps' messages; 32 for all, in any number format."""
    by_bits: dict[str, tuple[int, int]]
    """Packets of messages, and lost ones, by the bits of a value."""
    packets: dict[str, dict[str, int]]
    """Packet counts by receiver and the names in :data:`dlcp.transport.ledger.COUNTS`."""
    layers: list[tuple[int, list[str], int, int, int]]
    """Of each layer, from the input on: its position, its modules' names, and its packets, lost and encoded ones."""
    peers: dict[str, dict[str, Any]]
    """Transport state per peer, see :func:`describe_peer`."""
    slow: SlowRank | None
    """Who makes the others wait, now; None unless ranks are compared."""
    activities_s: dict[str, float]
    """Total duration of what the rank does in its steps, by :class:`dlcp.session.slowness.Activity`; empty likewise."""


class StepMeter:
    """Measures how long this rank's steps take, and for which ranks it waits. Thread-safe.

    A step lasts from its first gradients to those of the next step. In a step, the rank waits from when its last
    gradients are ready until all averages have arrived. The rest is computation, and whatever the script does between
    two steps. Waiting time is attributed to the rank whose message or acknowledgement ended it.

    Attributes
    ----------
    steps
        Number of finished steps in each bin of :data:`STEP_EDGES_S`.
    step_s
        Total duration of the finished steps, in seconds.
    waiting_s
        Waiting time in those steps by rank, in seconds; None stands for an unknown rank.
    layers
        Names of the modules at each layer position.
    """

    def __init__(self) -> None:
        self.steps = [0] * len(STEP_EDGES_S)
        self.step_s = 0.0
        self.waiting_s: dict[int | None, float] = {}
        self.layers: dict[int, list[str]] = {}
        self._lock = threading.Lock()
        self._step: int | None = None
        self._seen = 0
        self._open = 0
        self._began_s = self._ready_s = self._noted_s = self._averaged_s = 0.0
        self._waited: dict[int | None, float] = {}
        """Waiting time by rank since this step's latest gradients were ready."""

    def on_ready(self, step: int, segments: Sequence[Segment]) -> None:
        """Record that a bucket of gradients is ready to be averaged."""
        now_s = time.monotonic()
        with self._lock:
            if step != self._step:
                if self._step is not None:
                    self._end_step(now_s)
                self._step, self._began_s, self._open = step, now_s, 0
                self._seen += 1
            self._ready_s = self._noted_s = self._averaged_s = now_s
            self._waited.clear()  # until now, the rank was computing, not waiting
            self._open += 1
            if self._seen <= NAMING_STEPS:
                for segment in segments:
                    self._name(segment.layer.position, segment.layer.name)

    def on_message(self, peer: int, now_s: float) -> None:
        """Record that a peer's message, or its acknowledgement of one, arrived at ``now_s`` (monotonic)."""
        with self._lock:
            if self._open and now_s > self._noted_s:
                self._waited[peer] = self._waited.get(peer, 0.0) + now_s - self._noted_s
                self._noted_s = now_s

    def on_averaged(self, step: int) -> None:
        """Record that a bucket's average has arrived."""
        now_s = time.monotonic()
        with self._lock:
            if step == self._step and self._open:
                self._open -= 1
                self._averaged_s = now_s

    def totals(self) -> dict[str, Any]:
        """Return the fields ``step``, ``steps``, ``step_s`` and ``waiting_s`` of a :class:`RankSnapshot`.

        ``layers`` holds module names by layer position, as text.
        """
        with self._lock:
            return {
                "step": -1 if self._step is None else self._step,
                "steps": list(self.steps),
                "step_s": self.step_s,
                "waiting_s": {UNKNOWN if peer is None else str(peer): s for peer, s in self.waiting_s.items()},
                "layers": {str(position): names for position, names in self.layers.items()},
            }

    def _end_step(self, now_s: float) -> None:
        step_s = now_s - self._began_s
        self.steps[bisect_left(STEP_EDGES_S, step_s)] += 1
        self.step_s += step_s
        # Buckets are still open if the ranks left DLCP during the step: the fallback does not report when it is done.
        if self._open:
            return
        rest_s = self._averaged_s - self._ready_s - sum(self._waited.values())
        if rest_s > 0:
            self._waited[None] = rest_s
        for peer, waited_s in self._waited.items():
            self.waiting_s[peer] = self.waiting_s.get(peer, 0.0) + waited_s

    def _name(self, position: int, name: str) -> None:
        module = name.rpartition(".")[0] or name
        names = self.layers.setdefault(position, [])
        if module not in names:
            names.append(module)


class ComparedRank(Protocol):
    """A rank that is compared with others."""

    rank: int
    ranks: Sequence[int]
    averages: str
    """What averages the gradients."""

    def compared(self) -> dict[str, Any]:
        """Return the fields ``slow`` and ``activities_s`` of a :class:`RankSnapshot`."""


class ObservedAverager(Protocol):
    """The parts of a :class:`dlcp.session.averager.StepAverager` that snapshots show."""

    ledger: Ledger
    options: Options
    membership: Membership


class ObservedSession(Protocol):
    """The parts of a :class:`dlcp.session.training_session.TrainingSession` that snapshots show."""

    endpoint: Endpoint | None

    @property
    def averager(self) -> ObservedAverager:
        """Its averager."""

    def described(self) -> dict[str, Any]:
        """Return the fields ``phase``, ``reason``, ``fallback``, ``route``, ``framework_steps`` of a snapshot.

        Also ``session``, ``ranks``, ``changes``, ``stood_s``, ``slow`` and ``activities_s``.
        """


def as_slow_rank(verdict: Verdict) -> SlowRank:
    """Return a verdict as a snapshot shows it."""
    found = verdict.as_json()
    return cast(SlowRank, {name: found[name] for name in SlowRank.__annotations__})


class SnapshotFile(ABC):
    """Writes snapshots of one rank to a file until closed.

    Parameters
    ----------
    rank, ranks
        This rank, and all that it trains with.
    folder
        The folder for the file; it is created if it does not exist.

    Raises
    ------
    OSError
        The folder or the file cannot be written.
    """

    def __init__(self, rank: int, ranks: Sequence[int], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        process_rank = int(os.environ.get("RANK", rank))
        self._path = folder / f"rank-{process_rank}-{next(_serial)}{SNAPSHOT_SUFFIX}"
        self._rank = rank
        self._about = {
            "rank": rank,
            "ranks": list(ranks),
            "process_rank": process_rank,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "began_unix_s": time.time(),
            "every_s": EVERY_S,
        }
        self._closing = threading.Event()
        self._end: dict[str, Any] = {"ended": False, "gave_up": None}
        self._write()
        self._thread = threading.Thread(target=self._run, name="dlcp-snapshots", daemon=True)
        self._thread.start()
        self._exit = ExitCallback(self._at_exit)

    @classmethod
    def open(cls: type[_File], source: Any, folder: str) -> _File | None:
        """Return a writer into a folder; None, with a warning, if the folder cannot be written."""
        try:
            return cls(source, Path(folder))  # type: ignore[call-arg]  # of the subclass
        except OSError as error:
            log.warning("DLCP: rank %d cannot be watched: %s", source.rank, error)
            return None

    @abstractmethod
    def phase(self) -> str:
        """Return the present phase."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Return the fields of a :class:`RankSnapshot` that this class does not know."""

    def close(self, phase: str, gave_up: str | None) -> None:
        """Write the last snapshot, marked as ended.

        Parameters
        ----------
        phase
            The last phase before it was closed.
        gave_up
            Why this rank has given up; None if it has not.
        """
        self._exit.cancel()
        self._end = {"ended": True, "phase": phase, "gave_up": gave_up}
        self._closing.set()
        self._thread.join(2 * ASKING_S)

    def _at_exit(self) -> None:
        """Write the last snapshot of a script that ends without closing its session."""
        self.close(self.phase(), None)

    def _run(self) -> None:
        over = False
        try:
            while not over:
                over = self._closing.wait(EVERY_S)
                self._write()
        except OSError as error:
            log.warning("DLCP: rank %d cannot be watched any more: %s", self._rank, error)

    def _write(self) -> None:
        common = {**self._about, "written_unix_s": time.time(), "phase": self.phase()}
        snapshot = cast(RankSnapshot, {**common, **self.figures(), **self._end})
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(snapshot, separators=(",", ":")))
        part.replace(self._path)


class SnapshotWriter(SnapshotFile):
    """Writes snapshots of one rank's training session.

    Parameters
    ----------
    session
        The session.
    folder
        See :class:`SnapshotFile`.

    Attributes
    ----------
    meter
        Measures the session's steps.
    """

    def __init__(self, session: ObservedSession, folder: Path) -> None:
        self._session = session
        self.meter = StepMeter()
        self._peers: dict[str, Any] = {}
        super().__init__(session.averager.membership.rank, session.averager.membership.ranks, folder)

    def phase(self) -> str:
        """Return the session's phase."""
        phase: str = self._session.described()["phase"]
        return phase

    def figures(self) -> dict[str, Any]:
        """Return the session's fields."""
        session = self._session
        ledger = session.averager.ledger
        totals = ledger.summary()
        found = self.meter.totals()
        names: Mapping[str, list[str]] = found.pop("layers")
        return {
            **session.described(),
            **found,
            "loss_bound": session.averager.options.bound().ratio,
            "bound_exceeded": totals["violations"],
            "worst_loss": totals["max_message_ratio"],
            "bits": ledger.latest_bits(),
            "by_bits": totals["by_bits"],
            "packets": {str(peer): counts for peer, counts in ledger.by_receiver().items()},
            "layers": [
                [int(position), names.get(position, []), *counts] for position, counts in totals["by_layer"].items()
            ],
            "peers": self._ask_peers(),
        }

    def _ask_peers(self) -> dict[str, Any]:
        """Return the transport state of each peer by rank; the last known one if the endpoint does not answer."""
        if self.phase() not in ("ready", "closed"):
            self._peers = {}
        elif self._session.endpoint:
            with suppress(TransportError, FutureTimeoutError):
                self._peers = peers_of(self._session.endpoint)
        return self._peers


class WatchedRankWriter(SnapshotFile):
    """Writes snapshots of a rank whose gradients are averaged without DLCP.

    Parameters
    ----------
    source
        Has the rank, and compares it with others.
    folder
        See :class:`SnapshotFile`.

    Attributes
    ----------
    label
        Name of the session, the same on all its ranks; ``""`` until they have met.
    """

    def __init__(self, source: "ComparedRank", folder: Path) -> None:
        self._source, self.label = source, ""
        self._steps, self._step_s = [0] * len(STEP_EDGES_S), 0.0
        self._waiting_s: dict[str, float] = {}
        super().__init__(source.rank, source.ranks, folder)

    def note(self, steps_s: Sequence[float], waiting_s: Mapping[int | None, float]) -> None:
        """Record the durations of further steps, and the total waiting time by the rank waited for."""
        for step_s in steps_s:
            self._steps[bisect_left(STEP_EDGES_S, step_s)] += 1
        self._step_s += sum(steps_s)
        self._waiting_s = {UNKNOWN if peer is None else str(peer): s for peer, s in waiting_s.items()}

    def phase(self) -> str:
        """Return the phase of a rank that is only watched."""
        return WATCHED

    def figures(self) -> dict[str, Any]:
        """Return the steps and their waiting times; no packets of DLCP are counted."""
        steps = sum(self._steps)
        nothing: dict[str, Any] = {"by_bits": {}, "packets": {}, "layers": [], "peers": {}, "bits": FULL_BITS}
        zero = ("loss_bound", "bound_exceeded", "worst_loss")
        return {
            "session": self.label,
            "reason": "",
            "fallback": self._source.averages,
            "route": "",
            "framework_steps": steps,
            "changes": [],
            "stood_s": 0.0,
            "step": steps - 1,
            "steps": list(self._steps),
            "step_s": self._step_s,
            "waiting_s": self._waiting_s,
            **dict.fromkeys(zero, 0),
            **nothing,
            **self._source.compared(),
        }


def peers_of(endpoint: Endpoint) -> dict[str, Any]:
    """Return the transport state of each peer, by rank as text; see :func:`describe_peer`.

    Raises
    ------
    TransportError
        The endpoint is closed.
    TimeoutError
        Its thread does not answer (``concurrent.futures.TimeoutError``).
    """
    answer: Future[dict[str, Any]] = Future()
    endpoint.call(partial(_describe_peers, endpoint.connection, answer))
    return answer.result(ASKING_S)


def _describe_peers(connection: Connection, answer: "Future[dict[str, Any]]") -> None:
    """Set the answer to the state of all peers, by rank; runs on the endpoint's thread."""
    try:
        answer.set_result({str(peer): describe_peer(connection, peer) for peer in connection.peers})
    except Exception as error:  # must not end the endpoint's thread
        answer.set_exception(error)


def describe_peer(connection: Connection, peer: int) -> dict[str, Any]:
    """Return a connection's transport state for a peer.

    Returns
    -------
    ``local`` tells whether shared memory leads to the peer; if so, that is all. Otherwise also the rate in bit/s, the
    window in packets, the round-trip time in seconds, the number of paths that packets were sent on and of those since
    abandoned, and the largest share of packets that a path loses.
    """
    found = connection.peers[peer]
    if found.local:
        return {"local": True}
    paths = connection.engine.paths_to(peer)
    return {
        "local": False,
        "rate_bps": found.rate_bps,
        "window_packets": found.window_packets,
        "rtt_s": found.smoothed_rtt_s,
        "paths": len(paths),
        "paths_left": sum(path.weight == 0 for path in paths),
        "worst_path_loss": max((path.loss for path in paths), default=0.0),
    }
