# SPDX-License-Identifier: Apache-2.0
"""What a rank lets others watch while it trains: how long steps take, for whom it waits, what its packets met.

A thread writes it down once a second, as one small file that replaces the last one: so whoever reads, reads late or
dies, training does not notice. :mod:`dlcp.live` shows the files of all ranks. What happens when is for a trace to tell
(:mod:`dlcp.timeline`); a snapshot holds sums only, however long training takes.
"""

import json
import logging
import math
import os
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

from dlcp.closing import ExitCallback
from dlcp.tags import Segment
from dlcp.transport import Connection, TransportError

if TYPE_CHECKING:
    from dlcp.session.session import TrainingSession

SNAPSHOT_SUFFIX: Final = ".snapshot"
EVERY_S: Final = 1.0
"""How often a rank writes a snapshot. Chosen by us: an eye wants no more, and it costs a thousandth of a core."""
ASKING_S: Final = 1.0
"""How long to wait for the endpoint's thread, which has gradients to send. Chosen by us."""
STEP_EDGES_S: Final = (*(0.001 * 2**power for power in range(18)), math.inf)
"""Upper edges of the classes in which steps are counted by their duration: 1 ms to 131 s, and beyond. Chosen by us:
each twice the last, so that quantiles are right within a factor of 1.4 from toys to the largest models."""
NAMING_STEPS: Final = 2
"""In so many steps all layers have been seen, and their names are known."""
UNKNOWN: Final = ""
"""For whom a rank waited where that is not known: whatever averages when DLCP does not tells nothing."""
log = logging.getLogger("dlcp")
_serial = count()


class RankSnapshot(TypedDict):
    """What a rank tells of itself, as JSON. Times are in seconds, ranks as keys are text, counts are in packets."""

    session: str
    """What the session's ranks have in common; ``""`` until they have joined."""
    rank: int
    ranks: list[int]
    """All ranks of the session."""
    process_rank: int
    """What the rank is among all of the job."""
    process: int
    host: str
    began_unix_s: float
    written_unix_s: float
    every_s: float
    """How often the rank writes one."""
    phase: str
    """See :class:`dlcp.session.session.SessionPhase`; of one that has ended, what it was at before."""
    reason: str
    """Why DLCP does not average, if it does not."""
    fallback: str
    """What averages then."""
    ended: bool
    gave_up: str | None
    step: int
    """The present step; -1 before the first."""
    steps: list[int]
    """How many steps are over, by the classes of :data:`STEP_EDGES_S`."""
    step_s: float
    """What they took altogether."""
    waiting_s: dict[str, float]
    """What of that was waiting, by rank or :data:`UNKNOWN`."""
    loss_bound: float
    deferral_bound: float
    bound_exceeded: int
    """How many messages lost more than they may."""
    worst_loss: float
    """The largest share that a message has lost."""
    waited_steps: int
    """The most steps in a row that a packet has waited since it was deferred."""
    packets: dict[str, dict[str, int]]
    """What became of packets, by receiver and the names of :data:`dlcp.ledger.COUNTS`."""
    layers: list[tuple[int, list[str], int, int, int]]
    """Position, modules, packets, lost ones and deferred ones of each layer, from the model's input on."""
    peers: dict[str, dict[str, Any]]
    """What is known of the way to each peer, see :func:`describe_peer`."""


class StepMeter:
    """How long this rank's steps take, and for whom it waits. From any thread.

    A step lasts from its first gradients to those of the next one. In it a rank waits from when its last gradients are
    ready until all averages are in; the rest is computing, and whatever the script does between two steps. While a
    rank waits, each moment is put down to the rank that a message, or the confirmation of one, came from next.

    Attributes
    ----------
    steps
        How many are over, by the class of :data:`STEP_EDGES_S` that their duration falls into.
    step_s, waiting_s
        What they took altogether, and what of it was waiting, by rank.
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
        """What of this step was waiting since the latest gradients were ready."""

    def on_ready(self, step: int, segments: Sequence[Segment]) -> None:
        """Note that gradients are ready to be averaged."""
        now_s = time.monotonic()
        with self._lock:
            if step != self._step:
                if self._step is not None:
                    self._end_step(now_s)
                self._step, self._began_s, self._open = step, now_s, 0
                self._seen += 1
            self._ready_s = self._noted_s = self._averaged_s = now_s
            self._waited.clear()  # it computed meanwhile
            self._open += 1
            if self._seen <= NAMING_STEPS:
                for segment in segments:
                    self._name(segment.layer.position, segment.layer.name)

    def on_message(self, peer: int, now_s: float) -> None:
        """Note that a message of a peer is here, or that it has confirmed one."""
        with self._lock:
            if self._open and now_s > self._noted_s:
                self._waited[peer] = self._waited.get(peer, 0.0) + now_s - self._noted_s
                self._noted_s = now_s

    def on_averaged(self, step: int) -> None:
        """Note that an average is in."""
        now_s = time.monotonic()
        with self._lock:
            if step == self._step and self._open:
                self._open -= 1
                self._averaged_s = now_s

    def totals(self) -> dict[str, Any]:
        """Return the present step, -1 before the first, and the sums, as plain values.

        Times are in seconds, those of waiting by rank or :data:`UNKNOWN`.
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
        if self._open:  # the ranks have left DLCP in the middle of it: who averaged the rest did not say when
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


class SnapshotWriter:
    """Writes snapshots of one rank's training session, from now on until it is closed.

    Parameters
    ----------
    session
        The session.
    folder
        Where the file is made; the folder is, too.

    Attributes
    ----------
    meter
        What measures the session's steps.
    label
        What the session's ranks have in common, once they have joined; ``""`` before.

    Raises
    ------
    OSError
        There is no writing there.
    """

    def __init__(self, session: "TrainingSession", folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._session = session
        process_rank = int(os.environ.get("RANK", session.rank))
        self._path = folder / f"rank-{process_rank}-{next(_serial)}{SNAPSHOT_SUFFIX}"
        self.meter, self.label = StepMeter(), ""
        self._peers: dict[str, Any] = {}
        self._about = {
            "rank": session.rank,
            "ranks": list(session.ranks),
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
    def open(cls, session: "TrainingSession", folder: str) -> "SnapshotWriter | None":
        """Return a writer into a folder; None, with a warning, if there is no writing there."""
        try:
            return cls(session, Path(folder))
        except OSError as error:
            log.warning("DLCP: rank %d cannot be watched: %s", session.rank, error)
            return None

    def close(self, phase: str, gave_up: str | None) -> None:
        """Write the last snapshot, which says so.

        Parameters
        ----------
        phase
            What the session was at in the end.
        gave_up
            Why this rank has given up, if it has.
        """
        self._exit.cancel()
        self._end = {"ended": True, "phase": phase, "gave_up": gave_up}
        self._closing.set()
        self._thread.join(2 * ASKING_S)

    def _at_exit(self) -> None:
        """Say that a script has ended that does not close its session."""
        self.close(self._session.phase.value, None)

    def _run(self) -> None:
        over = False
        try:
            while not over:
                over = self._closing.wait(EVERY_S)
                self._write()
        except OSError as error:
            log.warning("DLCP: rank %d cannot be watched any more: %s", self._session.rank, error)

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._snapshot(), separators=(",", ":")))
        part.replace(self._path)

    def _snapshot(self) -> RankSnapshot:
        session = self._session
        layers = session.ledger.loss_by_layer()
        found = self.meter.totals()
        names: Mapping[str, list[str]] = found.pop("layers")
        tuner = session.averager.autotuner
        snapshot = {
            **self._about,
            "session": self.label,
            "written_unix_s": time.time(),
            "phase": session.phase.value,
            "reason": session.reason,
            "fallback": session.fallback.name,
            **found,
            "loss_bound": tuner.bound.ratio if tuner else session.options.loss_bound,
            "deferral_bound": tuner.settings.deferral_bound if tuner else session.options.deferral_bound,
            "bound_exceeded": session.ledger.violations,
            "worst_loss": session.ledger.max_message_ratio,
            "waited_steps": session.ledger.max_deferred_steps,
            "packets": {str(peer): counts for peer, counts in session.ledger.by_receiver().items()},
            "layers": [
                [position, names.get(str(position), []), *layers[position].tolist()]
                for position in layers[:, 0].nonzero()[0].tolist()
            ],
            "peers": self._ask_peers(),
            **self._end,
        }
        return cast(RankSnapshot, snapshot)

    def _ask_peers(self) -> dict[str, Any]:
        """Return what the endpoint knows of the way to each peer; after its end, what it knew last."""
        session = self._session
        if session.phase.value not in ("ready", "closed"):
            self._peers = {}
        elif session.endpoint:
            answer: Future[dict[str, Any]] = Future()
            with suppress(TransportError, FutureTimeoutError):
                session.endpoint.call(partial(_describe_peers, session.endpoint.connection, answer))
                self._peers = answer.result(ASKING_S)
        return self._peers


def _describe_peers(connection: Connection, answer: "Future[dict[str, Any]]") -> None:
    """Answer with rate, window, round trip and paths to each peer, by rank; in the endpoint's thread."""
    try:
        answer.set_result({str(peer): describe_peer(connection, peer) for peer in connection.peers})
    except Exception as error:  # which must not end the thread that it comes from
        answer.set_exception(error)


def describe_peer(connection: Connection, peer: int) -> dict[str, Any]:
    """Return what a connection knows of the way to a peer; of one that memory leads to, that this is so."""
    if peer in connection.local_peers:
        return {"local": True}
    paths = connection.paths_to(peer)
    return {
        "local": False,
        "rate_bps": connection.rate_to(peer),
        "window_packets": connection.window_to(peer),
        "rtt_s": connection.rtt_to(peer),
        "paths": len(paths),
        "paths_left": sum(path.weight == 0 for path in paths),
        "worst_path_loss": max((path.loss for path in paths), default=0.0),
    }
