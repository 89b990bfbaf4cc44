# SPDX-License-Identifier: Apache-2.0
"""All-reduces as a table: rows are paths and measurements over them, cells are sizes and numbers of ranks.

A sweep goes over many cells, so that no size goes unmeasured. A cell that fails is reported by name, and the others go
on. In the end there is a table of ratios, with the best and the worst of them marked.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean, median
from typing import Any, Final, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlcp.bench import BenchResult, say
from dlcp.commands.common import DURATIONS, real, whole
from tests.bench.harness import LEAST_ROUNDS, MEGABYTES, FailedError, Options, Turns, floats_option
from tests.bench.paths import BenchPath

SWEPT_SIZES_MB: Final = (0.004, 0.06, 0.6, 4.0, 25.0, 100.0)
"""From one bias vector through one layer and DDP's bucket of 25 MB to a whole model."""
SWEPT_RANKS: Final = (2, 4, 8)
CELL_S: Final = 60.0
"""Time budget of a cell: the default of ``--sweep``."""
_OVERRUN: Final = 2.0
"""How many budgets the fewest rounds of a cell may take at the rate of the path."""
_TABLE_WIDTH: Final = 120
"""Columns that three numbers of ranks need; more where the terminal has them."""
_ALL_RANKS_MB: Final = 200.0
"""Size times ranks that is measured where the path has no rate: more takes two cores minutes."""


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One point of a sweep.

    Parameters
    ----------
    setting
        What the cell shares with others but for size and ranks, in words; for the table.
    ranks, megabytes
        Number of ranks, and size of the buffer in MB.
    loss_percent, rtt_ms
        Of the path; 0 where the benchmark does not set them.
    """

    setting: str
    ranks: int
    megabytes: float
    loss_percent: float = 0.0
    rtt_ms: float = 0.0


class SweptRatio(NamedTuple):
    """The result of a cell: DLCP against the best of all of Gloo's settings.

    ``ratio`` is the median of the rounds' ratios; ``mean_ratio`` is that of the means, each of the best setting by it.
    """

    name: str
    cell: SweepCell
    ratio: float
    mean_ratio: float
    value_ms: float
    gloo_ms: float


Measure = Callable[[Any, str, float, Turns], Sequence[BenchResult]]
"""Measures over a path that is up; takes the path, the name of the first result, the MB, and the turns."""


@dataclass(frozen=True, slots=True)
class Row:
    """A path, and the measurement over it.

    Parameters
    ----------
    name
        Of the first result, with ``{ranks}``, ``{size}`` (nothing for the default) and ``{cell}`` (size and ranks).
    setting
        The path in words, for the table.
    path
        Makes a path between so many ranks.
    measure
        See :data:`Measure`.
    loss_percent, rtt_ms
        Of the path.
    """

    name: str
    setting: str
    path: Callable[[int], BenchPath]
    measure: Measure
    loss_percent: float = 0.0
    rtt_ms: float = 0.0


def sweep_options(megabytes: str, ranks: str | None) -> Options:
    """Return the options for sizes, numbers of ranks, and sweeps; their help shows the defaults."""
    sizes = " ".join(f"{size:g}" for size in SWEPT_SIZES_MB)
    counts = f", and {' '.join(map(str, SWEPT_RANKS))} ranks" if ranks else ""
    options: dict[str, Any] = {
        "--megabytes": floats_option(None, f"of float32 (default: {megabytes})", MEGABYTES, "MB"),
        "--sweep": {
            "action": "store_true",
            "help": f"{sizes} MB{counts}, where not given and the path allows; prints a table of all ratios",
        },
        "--cell-seconds": {
            "type": real(DURATIONS),
            "metavar": "S",
            "help": "time for the rounds of one size, number of ranks and setting, but not fewer than "
            f"{LEAST_ROUNDS} rounds (default: unlimited; of a sweep {CELL_S:g})",
        },
    }
    if ranks:
        options["--ranks"] = several_ranks(ranks)
    return options


def several_ranks(default: str) -> dict[str, Any]:
    """Return an option that takes numbers of ranks."""
    return {"type": whole(2, 10_000), "nargs": "+", "metavar": "N", "help": f"(default: {default})"}


class Cells:
    """The sizes and numbers of ranks of a command: those given, those of a sweep, or the defaults.

    Parameters
    ----------
    arguments
        Of a command with :func:`sweep_options`.
    ranks, megabytes
        The defaults.
    swept_ranks
        Whether a sweep goes over numbers of ranks.

    Attributes
    ----------
    turns
        Of each cell.
    several
        Whether there is more than one cell. Of one, results are as they come, and errors are raised at once.
    """

    def __init__(
        self, arguments: argparse.Namespace, ranks: Sequence[int], megabytes: float, *, swept_ranks: bool = True
    ) -> None:
        given: list[int] | None = getattr(arguments, "ranks", None)
        swept = arguments.sweep
        self._sizes: Sequence[float] = arguments.megabytes or (SWEPT_SIZES_MB if swept else [megabytes])
        self._ranks: Sequence[int] = given or (SWEPT_RANKS if swept and swept_ranks else ranks)
        self._default, self._swept = (ranks[0], megabytes), swept
        self.turns: Turns = replace(arguments.turns, budget_s=arguments.cell_seconds or (CELL_S if swept else None))
        self.several = swept or len(self._sizes) > 1 or len(given or ()) > 1

    def fitting(self, fits: Callable[[int, float], bool]) -> list[tuple[int, float]]:
        """Return the ranks and MB of the cells, without those of a sweep that do not fit, of which it tells."""
        found = []
        for megabytes in self._sizes:
            for ranks in self._ranks:
                if not self._swept or fits(ranks, megabytes):
                    found.append((ranks, megabytes))
                else:
                    say(f"left out: {ranks} ranks, {size_words(megabytes)}, which would take too long here")
        return found

    def has_time(self, runs_a_round: int, rate_bps: float) -> Callable[[int, float], bool]:
        """Return whether the fewest rounds fit the budget of a cell twice over, at the rate of the slowest port."""
        runs = runs_a_round * (LEAST_ROUNDS + self.turns.warm_up)
        budget_s = self.turns.budget_s or CELL_S
        return lambda ranks, megabytes: runs * line_seconds(ranks, megabytes, rate_bps) <= _OVERRUN * budget_s

    def measure(self, rows: Iterable[Row], fits: Callable[[int, float], bool] | None = None) -> Sequence[BenchResult]:
        """Measure all cells of all rows, and print the table of ratios.

        Raises
        ------
        FailedError
            Some of several cells have failed.
        """
        results: list[BenchResult] = []
        failed: dict[str, str] = {}
        cells = self.fitting(fits or has_memory)
        for row in rows:
            for ranks, megabytes in cells:
                name = self._name(row, ranks, megabytes)
                try:
                    found = measure_cell(row, name, ranks, megabytes, self.turns)
                except (RuntimeError, OSError) as error:
                    if not self.several:
                        raise
                    say(f"{name}: failed: {error}")
                    failed[name] = str(error)
                    continue
                cell = SweepCell(row.setting, ranks, megabytes, row.loss_percent, row.rtt_ms)
                results += [_with_cell(entry, cell) for entry in found] if self.several else found
        if swept := ratios([entry.as_json() for entry in results]):
            print_table(swept)
        if failed:
            raise FailedError(results, failed)
        return results

    def _name(self, row: Row, ranks: int, megabytes: float) -> str:
        size = f".mb{megabytes:g}" if self.several and megabytes != self._default[1] else ""
        count = f".n{ranks}" if self.several and ranks != self._default[0] else ""
        return row.name.format(ranks=ranks, size=size, cell=count + size)


def measure_cell(row: Row, name: str, ranks: int, megabytes: float, turns: Turns) -> Sequence[BenchResult]:
    """Bring a path up and measure over it."""
    path = row.path(ranks)
    with path:
        say(f"{name}: {path.words}, {megabytes:g} MB, times in ms")
        return row.measure(path, name, megabytes, turns)


def _with_cell(entry: BenchResult, cell: SweepCell) -> BenchResult:
    wanted = entry.details.get("ratio_wanted")  # of the tail: each cell has three
    of = cell if wanted is None else replace(cell, setting=f"{cell.setting}, tail ratio {wanted:g}")
    return replace(entry, details={**entry.details, "cell": asdict(of)})


def line_seconds(ranks: int, megabytes: float, rate_bps: float) -> float:
    """Return how long an all-reduce keeps a port of this rate busy at least."""
    return 2 * (ranks - 1) / ranks * megabytes * 8e6 / rate_bps


def has_memory(ranks: int, megabytes: float) -> bool:
    """Return whether two cores can do the cell within minutes where the path has no rate."""
    return ranks * megabytes <= _ALL_RANKS_MB


def ratios(results: Sequence[Mapping[str, Any]]) -> list[SweptRatio]:
    """Return DLCP's ratio to the best of Gloo's settings for each cell, from the results of a document.

    Parameters
    ----------
    results
        Those of several cells; of each, DLCP is as in the cell's first result. Results without a cell are left out.
    """
    found: dict[SweepCell, SweptRatio] = {}
    first: dict[SweepCell, str | None] = {}
    for entry in results:
        details = entry.get("details", {})
        if "cell" not in details or entry["unit"] != "ms":
            continue
        cell = SweepCell(**details["cell"])
        best_ms = _gloo_ms(entry)
        if details.get("ours") != first.setdefault(cell, details.get("ours")) or best_ms is None:
            continue
        ratio = entry["ratio"] if best_ms == entry["peer"] else best_ms / entry["value"]
        mean_ratio = float(details.get("ratio_of_means", ratio))
        known = found.get(cell)
        if known:
            mean_ratio = min(mean_ratio, known.mean_ratio)
        if known is None or best_ms < known.gloo_ms:
            known = SweptRatio(entry["name"], cell, ratio, mean_ratio, entry["value"], best_ms)
        found[cell] = known._replace(mean_ratio=mean_ratio)
    return list(found.values())


def _gloo_ms(entry: Mapping[str, Any]) -> float | None:
    """Return the time of Gloo's best setting; None where the result is no comparison with Gloo."""
    details = entry["details"]
    if "gloo_best" in details:
        return float(details["means"][details["gloo_best"]])
    return float(entry["peer"]) if str(details.get("peer")).startswith("gloo") else None


def summary(found: Sequence[SweptRatio]) -> str:
    """Return the middle and the extremes of the ratios, and how many are below 1, in words."""
    of_medians, of_means = [each.ratio for each in found], [each.mean_ratio for each in found]
    cells = "1 cell" if len(found) == 1 else f"{len(found)} cells"
    parts = [
        f"{name}: geometric mean {geometric_mean(every):.2f}x, median {median(every):.2f}x, worst {min(every):.2f}x, "
        f"best {max(every):.2f}x, slower than Gloo in {sum(ratio < 1 for ratio in every)}"
        for name, every in (("ratios of medians", of_medians), ("ratios of means", of_means))
    ]
    return "\n".join([cells, *parts])


def size_words(megabytes: float) -> str:
    """Return a size as ``4 kB`` or ``25 MB``."""
    return f"{1e3 * megabytes:g} kB" if megabytes < 1 else f"{megabytes:g} MB"


def time_words(milliseconds: float) -> str:
    """Return a time as ``0.646 ms`` or ``1480 ms``."""
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def print_table(found: Sequence[SweptRatio], to: TextIO | None = None) -> None:
    """Print ratios by setting, size and ranks, each with the time of Gloo's best setting; by default to stderr."""
    to = to or sys.stderr
    rows: dict[tuple[str, float], dict[int, SweptRatio]] = {}
    for each in found:
        rows.setdefault((each.cell.setting, each.cell.megabytes), {})[each.cell.ranks] = each
    worst, best = (choose(found, key=lambda each: each.ratio).name for choose in (min, max))
    extremes = {worst: "worst", best: "best"} if worst != best else {}
    counts = sorted({each.cell.ranks for each in found})
    table = Table("setting", "size")
    for count in counts:
        table.add_column(f"{count} ranks", justify="right", no_wrap=True)
    for (setting, megabytes), row in rows.items():
        cells = [Text(_words(row[count], extremes) if count in row else "") for count in counts]
        for cell in cells:
            cell.highlight_words(["best"], "bold green")
            cell.highlight_words(["worst"], "bold red")
        table.add_row(setting, size_words(megabytes), *cells)
    print("Gloo's time over DLCP's, of medians / of means: above 1, DLCP is faster. Gloo's best time in ms", file=to)
    Console(file=to, width=max(Console(file=to).width, _TABLE_WIDTH)).print(table)
    print(summary(found), file=to, flush=True)


def _words(each: SweptRatio, extremes: Mapping[str, str]) -> str:
    mark = f" {extremes[each.name]}" if each.name in extremes else ""
    return f"{each.ratio:.2f} / {each.mean_ratio:.2f}{mark}, {time_words(each.gloo_ms)}"
