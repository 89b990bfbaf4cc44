# SPDX-License-Identifier: Apache-2.0
"""Among which ranks the data of each step is divided, so that every rank draws a share of its own, and nobody twice.

Data is drawn before it is used: a loader may be several steps ahead. So when ranks end, the others keep the old
division for all steps that one of them has drawn for; the shares of the ended ranks in these are lost. New ranks take
part only from a step on for which nobody has drawn yet.
"""

import threading


class Division:
    """The ranks that divide the data of each step; the same on all ranks. Thread-safe.

    Parameters
    ----------
    ranks
        The ranks at first.

    Attributes
    ----------
    drawn
        The first step for which this rank has not drawn data.
    ahead
        How many steps it has drawn ahead at most.
    deciding
        Held while ranks decide from which step on others divide the data: nobody draws meanwhile.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.drawn = self.ahead = 0
        self.deciding = threading.RLock()
        self._changes: list[tuple[int, tuple[int, ...]]] = [(0, ranks)]

    def draw(self, step: int, now: int) -> tuple[int, ...]:
        """Return the ranks that divide the data of a step, which this rank now draws in step ``now``."""
        with self.deciding:
            self.drawn, self.ahead = step + 1, max(self.ahead, step - now)
            return self.ranks_of(step)

    def ranks_of(self, step: int) -> tuple[int, ...]:
        """Return the ranks that divide the data of a step."""
        return next(ranks for first, ranks in reversed(self._changes) if first <= step)

    def change(self, first_step: int, ranks: tuple[int, ...]) -> None:
        """Divide the data among other ranks from a step on."""
        kept = [each for each in self._changes if each[0] < first_step][-2:]
        self._changes = [*kept, (first_step, ranks)] if kept else [(0, ranks)]
