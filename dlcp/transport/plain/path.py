# SPDX-License-Identifier: Apache-2.0
"""The ways to a peer, and which of them are good.

``dlcp/native/path.c`` in NumPy, which says what for and how.
"""

import math
from collections import deque

from dlcp.transport.engine import RULES, PathState
from dlcp.transport.plain.outgoing import Indices, PlainOutgoing

_QUEUES = 8


def counted_since(seen: int, total: int) -> int:
    """Return by how much a total, modulo 2**32, has grown; 0 if it is older than what was seen."""
    fresh = (total - seen) & 0xFFFFFFFF
    return 0 if fresh >= 0x80000000 else fresh


class PlainPath:
    """One path.

    Attributes
    ----------
    weight
        1: as good as the best; 0: it is left, until ``again_s``.
    on_trial
        It was left, and is tried again.
    """

    def __init__(self) -> None:
        self.flying = self.sent = 0
        self.weight = 1.0
        self.again_s = 0.0
        self.patience_s = RULES["path_again_s"]
        self.on_trial = False
        self.delay_s = self.loss = self.marks = 0.0
        self.judged = self.lost = self.marked = 0
        self.sampled_s = 0.0
        self.samples: list[tuple[float, float]] = []
        """Round trips, and ways there, since the last report."""
        self.newest_delivered_s = [-1.0] * _QUEUES
        self.runs: list[deque[tuple[float, PlainOutgoing, Indices]]] = [deque() for _ in range(_QUEUES)]
        """What was sent into each queue, in that order."""
        self._marked_seen = 0

    @property
    def state(self) -> PathState:
        """What is known of it."""
        return PathState(self.weight, self.delay_s, self.loss, self.marks, self.sent)

    @property
    def excused(self) -> bool:
        """Whether what is lost or marked on it says nothing of the others."""
        return self.weight == 0 or self.on_trial

    def take_marks(self, total: int) -> int:
        """Take in how many packets have come marked so far; return how many are new."""
        marked = counted_since(self._marked_seen, total)
        if marked:
            self._marked_seen = total
        self.marked += marked
        return marked

    def sample_delay(self, delay_s: float) -> None:
        """Take in a round trip."""
        self.delay_s = delay_s if not self.delay_s else self.delay_s + (delay_s - self.delay_s) * RULES["path_gain"]

    def try_again(self) -> None:
        """Send on it again, with little weight."""
        self.weight, self.on_trial = RULES["path_least"], True
        self.delay_s = self.loss = self.marks = 0.0
        self.judged = self.lost = self.marked = 0

    def average(self) -> float:
        """Take what came back into the averages, and return what share of it was lost."""
        lost = max(self.lost, 0) / self.judged
        self.loss += (lost - self.loss) * RULES["path_loss_gain"]
        self.marks += (min(self.marked / self.judged, 1.0) - self.marks) * RULES["path_gain"]
        self.judged = self.lost = self.marked = 0
        return lost


class PlainPaths(list[PlainPath]):
    """The paths to one peer."""

    def __init__(self) -> None:
        super().__init__([PlainPath()])
        self.last = 0
        self.fresh: set[int] = set()
        """Those of which something has come back."""

    def make(self, count: int) -> None:
        """Have so many paths."""
        self.extend(PlainPath() for _ in range(count - len(self)))

    def _affordable(self, window: float) -> int:
        return min(len(self), 1 + int(window / RULES["path_packets"]))

    def choose(self, window: float, limit: int, now_s: float) -> tuple[int, int]:
        """Return the path with the fewest packets on their way for its weight, and how many may go there at once."""
        if len(self) == 1:
            return 0, limit
        best, least, weights, left = 0, math.inf, 0.0, self._affordable(window)
        for number, path in enumerate(self):
            if not left:
                break
            if path.weight == 0:
                if now_s < path.again_s:
                    continue
                path.try_again()
            left -= 1
            weights += path.weight
            load = (path.flying + 1) / path.weight
            # Of those alike, the next one after the last.
            if load < least or (load == least and best <= self.last < number):
                best, least = number, load
        part = int(window * self[best].weight / weights)
        return best, min(limit, max(part, int(RULES["path_burst"])))

    @property
    def for_control(self) -> int:
        """The path for packets that are about messages: the first that is not known to be bad."""
        return next((number for number, path in enumerate(self) if path.weight == 1), 0)

    def leave(self, path: PlainPath, now_s: float) -> None:
        """Send nothing on a path for a while, if there is another."""
        others = any(other is not path and other.weight > 0 and not other.on_trial for other in self)
        path.on_trial = False
        if not others:
            path.weight = RULES["path_least"]
            return
        path.weight = 0.0
        path.again_s = now_s + path.patience_s
        path.patience_s = min(path.patience_s * 2, RULES["path_again_max_s"])

    def judge(self, window: float, now_s: float) -> None:
        """Judge paths of which enough has come back."""
        if len(self) == 1:
            return
        for number in sorted(self.fresh):
            path = self[number]
            if path.judged < RULES["path_judged"]:
                continue
            lost = path.average()
            if path.weight > 0:
                self._judge(path, lost, window, now_s)
        self.fresh.clear()

    def _judge(self, path: PlainPath, lost: float, window: float, now_s: float) -> None:
        kept = self._deserved(path, lost, window)
        if kept is None:
            return
        if kept < 1:
            path.weight *= kept
            if path.on_trial or path.weight < RULES["path_least"]:
                self.leave(path, now_s)
            return
        path.weight = min(1.0, path.weight + RULES["path_calm"])
        if path.weight == 1:
            path.on_trial = False
            path.patience_s = RULES["path_again_s"]

    def _deserved(self, path: PlainPath, lost: float, window: float) -> float | None:
        """Return what share of its weight a path is to keep, compared with the others; None if there are none."""
        used = [other for other in self if other.weight > 0][: self._affordable(window)]
        others = [other for other in used if other is not path and not other.on_trial and other.delay_s]
        if not others:
            return None
        kept = 1.0
        slow_s = min(other.delay_s for other in others) * RULES["path_slow"] + RULES["reorder_min_s"]
        marks = min(other.marks for other in others)
        losses = sorted(other.loss for other in others)
        lossy = RULES["path_lossy"] + RULES["path_lossier"] * losses[len(losses) // 2]
        if path.loss > lossy and lost > lossy:
            kept = 0.5
        if path.delay_s > slow_s:
            kept = min(kept, max(0.5, slow_s / path.delay_s))
        if path.marks > marks + RULES["path_marked"]:
            kept = min(kept, 1 - (path.marks - marks) / 2)
        return kept
