# SPDX-License-Identifier: Apache-2.0
"""The cost of loss and lower precision in accuracy, perplexity and steps: five small models, or a larger one by name.

Four emulated ranks average gradients (:mod:`tests.bench.emulated_training`). Every step loses as much as it may, or
every step but the first has the lower precision. That is the worst case: in real training only steps behind a congested
port do. Runs of one seed share data, initialisation and batches, so they differ only because of missing values. Each is
compared with the run of its seed that lacked nothing:

- *accuracy*: the share of test samples that are right after the last step;
- *perplexity*: e to the power of the test loss after the last step;
- *steps*: how many more steps it takes to the lowest test loss that the whole run has in the first third of its steps.
  It is a loss, since accuracy counts whole samples and moves in jumps; and an early one, so that runs of the same
  length have time to reach it.

Lower precision is compared with PyTorch's bfloat16 hook as well, which many already use. It is as good if it takes no
more steps than the hook, within limits for noise (:func:`beside_hook`).
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from operator import sub
from pathlib import Path
from typing import Any, Final

import numpy as np

from dlcp import convergence
from dlcp.bench import BenchError, BenchResult, result, say
from dlcp.examples.learning_tasks import SMALL_TASKS, TASKS, TEST_EVERY
from dlcp.inputs.configuration import Range
from dlcp.inputs.error_text import nearest
from dlcp.policies.arms import AUTO_BITS
from dlcp.values.planes import FULL_BITS
from tests.bench.emulated_training import (
    EMULATED_RANKS,
    Shortfall,
    TrainingRun,
    sources_digest,
    train,
)
from tests.bench.harness import Benchmark, floats_option, int_option

WHOLE: Final = Shortfall()
BF16_HOOK: Final = Shortfall(bf16_hook=True)
LOWER_LOST: Final = Shortfall(bits=AUTO_BITS, lost=0.2)
"""The precision that ``auto`` uses, while the network drops a fifth of the packets that it may drop."""
SMOOTH: Final = 3
"""How many tests in a row a loss is the mean of."""
TARGET_BY: Final = 1 / 3
"""In this share of the whole run's steps is the loss that others have to reach."""
_STEPS_ALLOWED: Final = 0.05
_STEPS_ALLOWED_WORST: Final = 0.10
_POINTS_ALLOWED: Final = 0.3
"""A precision is as good as PyTorch's bfloat16 hook within these limits: additional steps, relative to the whole run's,
on average and in the worst task, and points of accuracy. With five seeds, standard errors are up to 0.03, 0.12 and
0.1."""


class LossCurve:
    """The test loss of a run, step by step, as the mean of three tests in a row; one test every ``every`` steps."""

    def __init__(self, losses: Sequence[float], every: int = TEST_EVERY) -> None:
        self.steps, self._every = every * len(losses), every
        ends = range(SMOOTH, len(losses) + 1)
        self._points = [(every * end, statistics.fmean(losses[end - SMOOTH : end])) for end in ends]

    @property
    def last(self) -> float:
        """The loss after the last step."""
        return self._points[-1][1]

    @property
    def lowest(self) -> float:
        """The lowest loss."""
        return min(loss for _, loss in self._points)

    @property
    def target(self) -> float:
        """The loss that other runs of this seed have to reach."""
        return min(loss for step, loss in self._points if step <= TARGET_BY * self.steps)

    def steps_to(self, target: float) -> float | None:
        """Return the first step with a loss as low as that, interpolated between tests; None if there is none."""
        step, loss = self._points[0]
        if loss <= target:
            return float(step)
        for (step, before), (_, after) in pairwise(self._points):
            if after <= target:
                return step + self._every * (before - target) / (before - after)
        return None


@dataclass(frozen=True, slots=True)
class PairedRuns:
    """Runs of a task with an optimizer, one for each seed, and those that lacked nothing.

    Parameters
    ----------
    runs, whole
        Of the same seeds, in the same order.
    """

    runs: Sequence[TrainingRun]
    whole: Sequence[TrainingRun]

    def points(self) -> list[float]:
        """Return by how many points the accuracy of each run is above the whole run's."""
        return [100 * (run.accuracy - whole.accuracy) for run, whole in zip(self.runs, self.whole, strict=True)]

    def steps(self) -> list[tuple[float | None, float]]:
        """Return how many steps each run took to its target, None if it never got there, and the whole run's."""
        found = []
        for run, whole in zip(_curves(self.runs), _curves(self.whole), strict=True):
            usual = whole.steps_to(whole.target)
            assert usual is not None
            found.append((run.steps_to(whole.target), usual))
        return found

    def factors(self) -> list[float]:
        """Return how many times the whole run's steps each run took; its length counts if it never got there."""
        length = _curves(self.runs)[0].steps
        return [(taken or length) / usual for taken, usual in self.steps()]

    def result(self) -> BenchResult:
        """Return the accuracy and the whole runs'; with means, errors, perplexity and steps in the details."""
        first, points, factors = self.runs[0], self.points(), self.factors()
        ours, others = ([run.accuracy for run in side] for side in (self.runs, self.whole))
        loss = statistics.fmean(curve.last for curve in _curves(self.runs))
        with np.errstate(all="ignore"):  # runs that diverged
            perplexity, whole = (np.exp([run.losses[-1] for run in side]) for side in (self.runs, self.whole))
            ratios = perplexity / whole
        details = {
            "peer": WHOLE.name,
            "task": TASKS[first.task].words,
            "accuracy_mean": round(statistics.fmean(ours), 4),
            "accuracy_deviation": round(_deviation(ours), 4),
            "points_above_whole": round(statistics.fmean(points), 2),
            "points_error": round(standard_error(points), 2),
            "steps_factor": round(statistics.fmean(factors), 3),
            "steps_factor_error": round(standard_error(factors), 3),
            "reached_target": sum(taken is not None for taken, _ in self.steps()),
            "loss_mean": _finite(loss),
            "perplexity_mean": _finite(perplexity.mean()),
            "perplexity_ratio": _finite(ratios.mean()),
        }
        name = f"convergence.{first.task}.{first.optimizer}.{first.shortfall}"
        return result(name, "accuracy", ours, others, smaller_is_better=False, details=details)


def beside_hook(pairs: Sequence[tuple[PairedRuns, PairedRuns]]) -> BenchResult:
    """Return the steps relative to the whole runs', and those of PyTorch's bfloat16 hook.

    Parameters
    ----------
    pairs
        Of every task and optimizer: runs at lower precision, and the hook's of the same seeds.
    """
    steps, points = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for ours, hook in pairs:
        task = ours.runs[0].task
        steps[task] += map(sub, ours.factors(), hook.factors())
        points[task] += map(sub, ours.points(), hook.points())
    worst = max(steps, key=lambda task: statistics.fmean(steps[task]))
    least = min(points, key=lambda task: statistics.fmean(points[task]))
    all_steps, all_points = (list(chain.from_iterable(by_task.values())) for by_task in (steps, points))
    as_good = (
        statistics.fmean(all_steps) <= _STEPS_ALLOWED
        and statistics.fmean(steps[worst]) <= _STEPS_ALLOWED_WORST
        and statistics.fmean(all_points) >= -_POINTS_ALLOWED
    )
    details = {
        "peer": BF16_HOOK.name,
        "additional_steps": _with_error(all_steps),
        "additional_steps_worst": {worst: _with_error(steps[worst])},
        "points_above": _with_error(all_points),
        "points_above_worst": {least: _with_error(points[least])},
        "as_good": as_good,
    }
    ours, theirs = ([factor for pair in pairs for factor in pair[side].factors()] for side in (0, 1))
    return result(f"convergence.{pairs[0][0].runs[0].shortfall}", "steps factor", ours, theirs, details=details)


def _curves(runs: Sequence[TrainingRun]) -> list[LossCurve]:
    return [LossCurve(run.losses, TASKS[run.task].test_every) for run in runs]


def _with_error(values: Sequence[float]) -> list[float]:
    """Return the mean and its standard error, rounded."""
    return [round(statistics.fmean(values), 3), round(standard_error(values), 3)]


def _finite(value: float) -> float | None:
    """Return a value rounded; None if it is infinite or NaN, which JSON does not have."""
    return round(float(value), 4) if math.isfinite(value) else None


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 of a single value."""
    return _deviation(values) / math.sqrt(len(values))


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(
    *,
    runs: Path,
    tasks: Sequence[str],
    seeds: int,
    first_seed: int = 0,
    losses: Sequence[float],
    bits: Sequence[int] = (),
    length: int = 1,
    curves: Path | None = None,
    progress: Callable[[str], object] = say,
) -> list[BenchResult]:
    """Make the runs that are not in the file yet, and compare.

    Parameters
    ----------
    runs
        File of finished runs, each a line of JSON. A run is written as it ends; one that is there is not repeated,
        unless something changed that it depends on.
    tasks
        Names of ``TASKS``.
    seeds, first_seed
        How many, and the first of them.
    losses
        Shares to lose, above 0 and below 1.
    bits
        Precisions, from 2 to 31 bits per value. PyTorch's bfloat16 hook and ``LOWER_LOST`` are run, too.
    length
        Train for so many times as many steps.
    curves
        Where to write curves for :mod:`dlcp.convergence`, which are means over these tasks and seeds. Curves of other
        names in the file are kept.
    progress
        Called with a line about every run.

    Returns
    -------
    ``convergence.TASK.OPTIMIZER.SHORTFALL``: final accuracies, next to those of the whole runs. And for lower precision
    ``convergence.SHORTFALL``, see :func:`beside_hook`.

    Raises
    ------
    BenchError
        There is no such task, or nothing to measure; the message says which.
    """
    for name in tasks:
        if name not in TASKS:
            raise BenchError(f"there is no task {name!r}{nearest(name, TASKS)}")
    if min(seeds, length) < 1 or not all(0 < share < 1 for share in losses):
        raise BenchError("--seeds and --length must be 1 or more, and shares above 0 and below 1")
    if not all(2 <= each < FULL_BITS for each in bits):
        raise BenchError(f"--bits must be from 2 to {FULL_BITS - 1}")
    families = {
        "loss": [Shortfall(lost=share) for share in losses],
        "loss_for_good": [Shortfall(lost=share, at_random=True, feedback=False) for share in losses],
        "precision": [Shortfall(bits=each) for each in bits],
    }
    shortfalls = [WHOLE, *chain.from_iterable(families.values())]
    if bits:
        shortfalls += [LOWER_LOST, BF16_HOOK]
    finished = _FinishedRuns(runs, length, progress)
    found: dict[tuple[str, str, Shortfall], PairedRuns] = {}
    cells = [(task, optimizer) for task in tasks for optimizer in TASKS[task].rates]
    for task, optimizer in cells:
        numbers = range(first_seed, first_seed + seeds)
        made = [[finished.get(task, optimizer, each, seed) for each in shortfalls] for seed in numbers]
        for shortfall, column in zip(shortfalls, zip(*made, strict=True), strict=True):
            found[task, optimizer, shortfall] = PairedRuns(column, [row[0] for row in made])
    if curves:
        entries = [
            _curve(
                family,
                optimizer,
                {each: [found[task, by, each] for task, by in cells if by == optimizer] for each in members},
            )
            for family, members in families.items()
            if members
            for optimizer in dict.fromkeys(optimizer for _, optimizer in cells)
        ]
        written = {entry["name"] for entry in entries}
        known = json.loads(curves.read_text(encoding="utf-8"))["curves"] if curves.exists() else []
        convergence.write(curves, [*(entry for entry in known if entry["name"] not in written), *entries])
    lower = [each for each in shortfalls if each.bits < FULL_BITS]
    return [
        *(comparison.result() for comparison in found.values()),
        *(beside_hook([(found[(*cell, each)], found[(*cell, BF16_HOOK)]) for cell in cells]) for each in lower),
    ]


class _FinishedRuns:
    """The file of runs."""

    def __init__(self, path: Path, length: int, progress: Callable[[str], object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._path, self._length, self._progress = path, length, progress
        lines = path.read_text(encoding="utf-8").splitlines()
        self._runs = {run.key: run for run in (TrainingRun(**json.loads(line)) for line in lines)}

    def get(self, task: str, optimizer: str, shortfall: Shortfall, seed: int) -> TrainingRun:
        """Return a run, made now if it was not made before."""
        known = self._runs.get((sources_digest(), task, optimizer, shortfall.name, seed, self._length))
        if known:
            return known
        run = train(task, optimizer, shortfall, seed, self._length)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        self._progress(f"{task}, {optimizer}, {shortfall.name}, seed {seed}: {run.accuracy:.2%}")
        return run


_WORDS: Final = {
    "loss": "the least valuable packets of contributions lost, sent with the next step instead (error feedback)",
    "loss_for_good": "packets of contributions lost at random, sums divided by how many ranks' packets came, nothing "
    "sent again later",
    "precision": "fewer bits in contributions and averages (shares are of the 32 bits left out), rounding errors sent "
    "with the next step (error feedback)",
}
"""Missing parts of the curves, by name."""


def _curve(family: str, optimizer: str, comparisons: Mapping[Shortfall, Sequence[PairedRuns]]) -> dict[str, Any]:
    """Return a curve: shares, the mean factor of steps over tasks and seeds, and where it ends.

    It ends before the first share of which a run never reached its target.
    """
    points, errors, failed = [[0.0, 1.0]], [], []
    for shortfall, of_tasks in comparisons.items():
        factors = [factor for comparison in of_tasks for factor in comparison.factors()]
        points.append([shortfall.share, round(statistics.fmean(factors), 3)])
        taken = [steps for comparison in of_tasks for steps, _ in comparison.steps()]
        errors.append(
            f"{shortfall.share:.0%} {standard_error(factors):.3f} ({taken.count(None)} of {len(taken)} runs never)"
        )
        if None in taken:
            failed.append(shortfall.share)
    first = next(iter(comparisons.values()))
    seeds = [run.seed for run in first[0].runs]
    source = (
        f"Measured with python -m tests.bench convergence: {', '.join(each.runs[0].task for each in first)}; "
        f"{optimizer}, {EMULATED_RANKS} ranks, {_WORDS[family]}, in every step. Mean ratio of the steps to the test "
        "loss that the run of the same seed without shortfall has after a third of its steps, "
        f"seeds {seeds[0]} to {seeds[-1]}; what never reached it counts with all its steps, three times as many. "
        f"Standard errors: {', '.join(errors)}."
    )
    reached = max(share for share, _ in points if share < min(failed, default=1.0))
    name = f"{family}_{optimizer}"
    return {"name": name, "measured": True, "source": source, "points": points, "reached": reached}


_SHARES: Final = Range(0.0, 1, below=True)
BENCHMARK: Final = Benchmark(
    lambda arguments: measure(
        **{
            name: getattr(arguments, name)
            for name in ("runs", "tasks", "seeds", "first_seed", "losses", "bits", "length", "curves")
        }
    ),
    {
        "--tasks": {
            "nargs": "+",
            "metavar": "TASK",
            "default": list(SMALL_TASKS),
            "help": f"of {' '.join(TASKS)} (default: all but gpt)",
        },
        "--seeds": int_option(5, "runs of each", most=10_000),
        "--first-seed": int_option(0, "seed of the first run", least=0),
        "--losses": floats_option((0.1, 0.3), "to lose", _SHARES, "SHARE", nargs="*"),
        "--bits": {
            "type": int,
            "nargs": "*",
            "metavar": "BITS",
            "default": [16, 8, 4, 3],
            "help": "of each value, beside PyTorch's bfloat16 hook (default: 16 8 4 3)",
        },
        "--length": int_option(1, "times as many steps", most=10_000),
        "--runs": {
            "type": Path,
            "default": Path("out/convergence.jsonl"),
            "metavar": "FILE",
            "help": "of finished runs, which are kept (default: %(default)s)",
        },
        "--curves": {
            "type": Path,
            "metavar": "FILE",
            "help": "where to write curves, as dlcp/convergence has them; other curves in it are kept",
        },
    },
)
