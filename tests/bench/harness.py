# SPDX-License-Identifier: Apache-2.0
"""How every benchmark declares itself, lets its contenders take turns, and compares them.

Contenders take turns, so that other load on the machine affects all of them alike. The document has one ``machine``,
and ``results`` whose ratios are better the higher they are.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dlcp.bench import BenchError, BenchResult, document, median, result, say, significant, spread
from dlcp.commands.common import MBPS, real, refuse, whole
from dlcp.host.netlab import NamespaceError, become_root
from dlcp.inputs.configuration import Range

Samples = dict[str, list[float]]
"""The measurements by contender: one value a round, round by round."""
LEAST_ROUNDS: Final = 5
"""Rounds that a time budget leaves in any case: with fewer, quartiles say nothing."""
_HOPELESS: Final = 3.0
"""How many times another's slowest run a contender's fastest must take before it leaves."""
_HOPELESS_RUNS: Final = 2
MEGABYTES: Final = Range(0.001, 100_000)
SEED: Final = 1
VALUE_BYTES: Final = 4

# Turns ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turns:
    """How contenders take turns: each once a round, in an order that is drawn anew for each round.

    Parameters
    ----------
    rounds, warm_up
        Rounds that count, and rounds before them that do not.
    seed
        Of the orders.
    budget_s
        Stop once the next round would exceed it, warm-ups included, but not before :data:`LEAST_ROUNDS` rounds. None:
        unlimited.
    progress
        Called with a line about every round.
    """

    rounds: int
    warm_up: int = 2
    seed: int = SEED
    budget_s: float | None = None
    progress: Callable[[str], object] = say

    def share(self, part: float) -> "Turns":
        """Return the same turns with a part of the budget."""
        return self if self.budget_s is None else replace(self, budget_s=self.budget_s * part)

    def take(self, contenders: Mapping[str, Callable[[], float]], may_leave: Sequence[str] = ()) -> Samples:
        """Run every contender once a round; what each returns is its value in that round.

        Parameters
        ----------
        may_leave
            Contenders of which only the fastest counts. With a budget, one leaves when its fastest run takes three
            times the slowest run of another of them; it then has fewer samples.

        Raises
        ------
        ValueError
            There is nothing to run.
        """
        if not contenders or self.rounds < 1 or self.warm_up < 0:
            raise ValueError(
                f"{len(contenders)} contenders, {self.rounds} rounds and {self.warm_up} before them: nothing to measure"
            )
        samples: Samples = {name: [] for name in contenders}
        runs: Samples = {name: [] for name in contenders}
        draw = random.Random(self.seed)
        began_s = time.monotonic()
        staying = list(contenders)
        for number in range(-self.warm_up, self.rounds):
            order = list(staying)
            draw.shuffle(order)
            values = {name: contenders[name]() for name in order}
            for name, value in values.items():
                runs[name].append(value)
                if number >= 0:
                    samples[name].append(value)
            figures = ", ".join(f"{name} {values[name]:.4g}" for name in staying)
            self.progress(f"{'warm-up' if number < 0 else f'round {number + 1} of {self.rounds}'}: {figures}")
            if self.budget_s is None or number < 0:
                continue
            left = hopeless({name: runs[name] for name in may_leave if name in staying})
            staying = [name for name in staying if name not in left]
            per_round_s = (time.monotonic() - began_s) / (number + 1 + self.warm_up)
            if number + 1 >= LEAST_ROUNDS and per_round_s * (number + 2 + self.warm_up) > self.budget_s:
                break
        return samples


def hopeless(runs: Samples) -> set[str]:
    """Return the contenders whose fastest of two runs or more takes three times another's slowest, or longer."""
    enough = {name: times for name, times in runs.items() if len(times) >= _HOPELESS_RUNS}
    if not enough:
        return set()
    limit = _HOPELESS * min(max(times) for times in enough.values())
    return {name for name, times in enough.items() if min(times) >= limit}


# Comparisons ----------------------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return statistics.fmean(values)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, 1 to 99, interpolated between values."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def against_best(
    name: str, unit: str, samples: Samples, ours: str, peers: Sequence[str], details: Mapping[str, Any] | None = None
) -> BenchResult:
    """Compare times of ours with that of the peers' settings whose median is best; ``details`` name it.

    A peer that left early (see :meth:`Turns.take`) is compared over the rounds that it took part in.
    """
    best = min(peers, key=lambda peer: median(samples[peer]))
    tried = {peer: significant(median(samples[peer])) for peer in peers}
    mine = samples[ours][: len(samples[best])]
    ratios = [theirs / own for theirs, own in zip(samples[best], mine, strict=True)]
    more = {
        "peer": best,
        "peers_tried": tried,
        "ratio_quartiles": [significant(percentile(ratios, percent)) for percent in (25, 75)],
        # Medians hide what happens to fewer than half of the runs, as the loss of a small message's only packet.
        "ratio_of_means": significant(min(mean(samples[peer]) for peer in peers) / mean(samples[ours])),
        **(details or {}),
    }
    return result(name, unit, mine, samples[best], details=more)


def mean_against(
    name: str, unit: str, samples: Samples, ours: str, peer: str, details: Mapping[str, Any] | None = None
) -> BenchResult:
    """Compare means, where it is rare runs that count; ``details`` have everybody's mean and 99th percentile."""
    means = {contender: mean(values) for contender, values in samples.items()}
    more = {
        "peer": peer,
        "means": {contender: significant(value) for contender, value in means.items()},
        "p99": {contender: significant(percentile(values, 99)) for contender, values in samples.items()},
        **(details or {}),
    }
    mine = samples[ours]
    return BenchResult(name, means[ours], unit, means[peer], means[peer] / means[ours], len(mine), spread(mine), more)


# Declarations ---------------------------------------------------------------------------------------------------------


class FailedError(BenchError):
    """Something has failed, and the rest was measured; the message names it.

    Attributes
    ----------
    results
        Of the rest.
    failed
        What went wrong, by name.
    """

    def __init__(self, results: Sequence[BenchResult], failed: Mapping[str, str]) -> None:
        super().__init__(f"failed: {', '.join(failed)}")
        self.results, self.failed = results, failed


Options = Mapping[str, Mapping[str, Any]]
"""Options of a command line, with what argparse takes of each."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark of the table in ``__main__``.

    Parameters
    ----------
    measure
        Measures; ``arguments.turns`` are a :class:`Turns` with the rounds that were asked for.
    options
        Its own options.
    rounds, warm_up
        How many rounds there are by default; None for one that has no such choice.
    root
        It makes network namespaces, and so needs to be root, at least of a user namespace.
    """

    measure: Callable[[argparse.Namespace], Iterable[BenchResult]]
    options: Options = field(default_factory=dict)
    rounds: int | None = None
    warm_up: int | None = 2
    root: bool = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its options."""
        options = dict(self.options)
        if self.rounds:
            options["--rounds"] = int_option(self.rounds, "that count")
            if self.warm_up is not None:
                swept = "; of a sweep 1" if "--sweep" in options else ""
                options["--warm-up"] = {
                    "type": whole(0, 100_000),
                    "metavar": "N",
                    "help": f"rounds before them (default: {self.warm_up}{swept})",
                }
        for flag, settings in options.items():
            parser.add_argument(flag, **settings)

    def turns(self, arguments: argparse.Namespace) -> Turns:
        """Return the turns that a command line asks for."""
        sweep = getattr(arguments, "sweep", False)
        warm_up = getattr(arguments, "warm_up", None)
        if warm_up is None:
            warm_up = 1 if sweep else self.warm_up or 0
        return Turns(getattr(arguments, "rounds", 1), warm_up)

    def run(self, name: str, arguments: argparse.Namespace) -> int:
        """Measure as the command line says, print the document and return the exit status."""
        results: Sequence[BenchResult] = ()
        failed: Mapping[str, str] = {}
        status = 0
        try:
            if self.root:
                become_root()
            arguments.turns = self.turns(arguments)
            results = list(self.measure(arguments))
        except FailedError as error:
            results, failed = error.results, error.failed
            status = refuse(f"bench {name}", error, 1)
        except (BenchError, NamespaceError) as error:
            status = refuse(f"bench {name}", error, 1)
        found = document(results, getattr(arguments, "seed", SEED))
        print(json.dumps(found | {"failed": dict(failed)} if failed else found, indent=2))
        return status


def int_option(default: int | None, words: str, least: int = 1, most: int = 1 << 40) -> dict[str, Any]:
    """Return an option that takes a whole number."""
    return {"type": whole(least, most), "default": default, "metavar": "N", "help": f"{words} (default: {default})"}


def float_option(default: float, words: str, allowed: Range, metavar: str) -> dict[str, Any]:
    """Return an option that takes a number."""
    return {"type": real(allowed), "default": default, "metavar": metavar, "help": f"{words} (default: {default:g})"}


def floats_option(
    default: Sequence[float] | None, words: str, allowed: Range, metavar: str, nargs: str = "+"
) -> dict[str, Any]:
    """Return an option that takes numbers."""
    told = "" if default is None else f" (default: {' '.join(f'{each:g}' for each in default)})"
    return {
        "type": real(allowed),
        "nargs": nargs,
        "default": None if default is None else list(default),
        "metavar": metavar,
        "help": words + told,
    }


def rate_option(default: float, words: str = "of a port") -> dict[str, Any]:
    """Return an option that takes a rate in Mbit/s."""
    return float_option(default, words, MBPS, "RATE")


MTU: Final = {"--mtu": int_option(1500, "MTU of the path in bytes", least=576, most=65_535)}


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for a measurement's files, and remove it."""
    with tempfile.TemporaryDirectory(prefix="dlcp-bench-") as folder:
        yield Path(folder)
