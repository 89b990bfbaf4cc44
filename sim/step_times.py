# SPDX-License-Identifier: Apache-2.0
"""The progress of a job: the times of its steps."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """When a job began, and when each of its finished steps ended, in picoseconds of the scenario.

    Parameters
    ----------
    steps
        Number of steps that the job is to run.
    """

    name: str = ""
    steps: int = 0
    begin_ps: int = 0
    end_ps: list[int] = field(default_factory=list)

    @property
    def bounds_ps(self) -> list[tuple[int, int]]:
        """Return when each finished step began and ended; each begins where the one before ends."""
        return list(pairwise([self.begin_ps, *self.end_ps]))

    @property
    def step_s(self) -> list[float]:
        """Return the durations of the finished steps in seconds."""
        return [(end - begin) / 1e12 for begin, end in self.bounds_ps]
