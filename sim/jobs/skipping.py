# SPDX-License-Identifier: Apache-2.0
"""Skip steps of training once their mean duration is known.

A long training repeats its steps. When the mean durations of all jobs' steps are known well enough, all jobs skip the
same span of simulated time. The steps in it get the durations of the steps before, in turn. A span ends where something
begins or ends: a job, other traffic, or a failure. From there, steps are simulated and measured anew.

A mean is known within a share ``error`` if its confidence interval at 95 % is half of that to either side. The
interval is that of the means of :data:`BATCHES` consecutive batches, since neighbouring steps resemble each other. The
other half is for slower changes, which so few steps do not show.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import PS_PER_S, seconds_to_ps
from dlcp.sim.jobs.run_size import STEPS_PER_GRAPH
from dlcp.sim.jobs.training import PlacedJob
from dlcp.sim.limits import FOREVER_PS
from dlcp.sim.scenario import NetworkSetting
from dlcp.sim.simulation import Simulation

BATCHES: Final = 8
BATCH_STEPS_MIN: Final = 4
WINDOWS_MAX: Final = 40
"""A window is at least this part of a training. The longer it is, the slower are the changes that are seen."""
STUDENT_T: Final = 2.365
"""The quantile at 97.5 % of Student's distribution with one degree of freedom fewer than there are batches."""


class StepSkipper:
    """Decides, for all jobs of a simulation, when they skip steps, and how many.

    Parameters
    ----------
    error
        The largest share by which the mean of skipped steps' durations may be wrong.
    jobs
        All jobs of the simulation.
    """

    def __init__(self, simulation: Simulation, error: float, jobs: Sequence[PlacedJob]) -> None:
        self._simulation, self._error, self._jobs = simulation, error, jobs
        self._changes_ps = _changes_ps(simulation.scenario, jobs)
        self._passed = (0, 0)
        """Changes so far: those that are scheduled, and jobs that have ended."""
        self._first = {job.name: 0 for job in jobs}
        """Each job's first step after the latest change or skip."""
        self._to_skip: dict[str, tuple[int, int]] = {}
        """Of jobs that have not made the latest skip yet: how many steps, and how many known ones these repeat."""

    def skip_steps(self, job: PlacedJob) -> None:
        """Skip steps of a job between two of its graphs, if it is time."""
        self._note_changes()
        if not self._to_skip:
            self._begin_skip()
        count, known = self._to_skip.pop(job.name, (0, 0))
        if count:
            job.skip(min(count, job.steps - len(job.end_ps)), known)
            self._first[job.name] = len(job.end_ps)

    def _note_changes(self) -> None:
        passed = (
            bisect_right(self._changes_ps, self._simulation.now_ps),
            sum(len(job.end_ps) == job.steps for job in self._jobs),
        )
        if passed != self._passed:
            self._passed = passed
            self._first = {job.name: len(job.end_ps) for job in self._jobs}

    def _begin_skip(self) -> None:
        """Skip as far as all jobs train on and nothing changes, if the means of all running jobs are known."""
        running = [job for job in self._jobs if len(job.end_ps) < job.steps]
        means = {job.name: mean for job in running if (mean := self._mean_s(job)) is not None}
        if not running or len(means) < len(running):
            return
        left_s = [
            # Other jobs have begun up to a graph of steps that they have not ended.
            means[job.name] * (job.steps - len(job.end_ps) - (STEPS_PER_GRAPH if len(running) > 1 else 0))
            for job in running
        ]
        now_ps = self._simulation.now_ps
        change_ps = next((each for each in self._changes_ps if each > now_ps), FOREVER_PS)
        span_ps = min(seconds_to_ps(max(0.0, min(left_s))), change_ps - now_ps)
        if span_ps >= seconds_to_ps(STEPS_PER_GRAPH * max(means.values())):
            self._simulation.skip(span_ps)
            # A change right after the span begins new windows, so all that is needed of these is kept.
            self._to_skip = {
                job.name: (round(span_ps / PS_PER_S / means[job.name]), len(self._window(job))) for job in running
            }

    def _window(self, job: PlacedJob) -> NDArray[np.float64]:
        """Return the durations of the steps since the last change in whole batches, without the first quarter."""
        steps = np.diff([job.begin_ps, *job.end_ps][self._first[job.name] :]) / PS_PER_S
        batch = 3 * len(steps) // 4 // BATCHES
        return steps[len(steps) - batch * BATCHES :]

    def _mean_s(self, job: PlacedJob) -> float | None:
        """Return the mean duration of a job's steps; None while it is not known well enough."""
        window = self._window(job)
        if len(window) < max(BATCHES * BATCH_STEPS_MIN, job.steps // WINDOWS_MAX):
            return None
        means = window.reshape(BATCHES, -1).mean(1)
        mean = float(means.mean())
        half_width = STUDENT_T * float(means.std(ddof=1)) / math.sqrt(BATCHES)
        return mean if half_width <= self._error / 2 * mean else None


def _changes_ps(setting: NetworkSetting, jobs: Sequence[PlacedJob]) -> list[int]:
    """Return the moments at which something begins or ends that the setting schedules, in order."""
    moments = {job.start_s for job in jobs} | {pattern.start_s for pattern in setting.patterns}
    for traffic in setting.traffic:
        moments |= {traffic.start_s, traffic.stop_s}
    for failing in setting.failures:
        moments |= {failing.start_s, failing.start_s + failing.reroute_s, failing.stop_s}
    moments.add(setting.stop_s)
    return sorted(seconds_to_ps(moment) for moment in moments if math.isfinite(moment))
