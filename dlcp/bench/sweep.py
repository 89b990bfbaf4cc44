# SPDX-License-Identifier: Apache-2.0
"""Sweeps: the same benchmark over sizes and numbers of ranks, so that no size goes unmeasured.

A cell of a sweep is one size with one number of ranks in one setting. A cell that fails is reported by name, and the
others go on. In the end there is a table of ratios, with the best and the worst of them marked.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean, median
from typing import Any, Final, NamedTuple, TextIO

from dlcp.bench.results import LEAST_ROUNDS, BenchError, BenchResult, say

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
    """How a cell ended: DLCP beside the best of all of Gloo's settings.

    ``ratio`` is the median of the rounds' ratios; ``mean_ratio`` is that of the means, each of the best setting by it.
    """

    name: str
    cell: SweepCell
    ratio: float
    mean_ratio: float
    value_ms: float
    gloo_ms: float


class FailedCellsError(BenchError):
    """Some cells of a sweep have failed; the message names them.

    Attributes
    ----------
    results
        Of the other cells.
    failed
        Why each of these cells failed, by name.
    """

    def __init__(self, results: Sequence[BenchResult], failed: Mapping[str, str]) -> None:
        super().__init__(f"failed in this sweep: {', '.join(failed)}")
        self.results, self.failed = results, failed


def suffix(ranks: int | None, megabytes: float, default: tuple[int, float]) -> str:
    """Return what tells a cell's results from those of the default ranks and size, as ``.n4.mb0.6``.

    ``ranks`` are None where a name has them in any case.
    """
    words = f".n{ranks}" if ranks not in (None, default[0]) else ""
    return words + (f".mb{megabytes:g}" if megabytes != default[1] else "")


def line_seconds(ranks: int, megabytes: float, rate_bps: float) -> float:
    """Return how long an all-reduce keeps a port of this rate busy at least."""
    return 2 * (ranks - 1) / ranks * megabytes * 8e6 / rate_bps


def has_time(ranks: int, megabytes: float, runs_a_round: int, warm_up: int, rate_bps: float, budget_s: float) -> bool:
    """Return whether the fewest rounds fit the budget of a cell twice over, at the rate of the slowest port."""
    runs = runs_a_round * (LEAST_ROUNDS + warm_up)
    return runs * line_seconds(ranks, megabytes, rate_bps) <= _OVERRUN * budget_s


def has_memory(ranks: int, megabytes: float) -> bool:
    """Return whether two cores can do the cell within minutes where the path has no rate."""
    return ranks * megabytes <= _ALL_RANKS_MB


class Sweep:
    """Runs cells one after the other and keeps their results.

    Parameters
    ----------
    several
        Whether there is more than one cell. Of one, results are as they come, and errors are raised at once.
    """

    def __init__(self, several: bool) -> None:
        self._several = several
        self._results: list[BenchResult] = []
        self._failed: dict[str, str] = {}

    def measure(self, name: str, cell: SweepCell, run: Callable[[], Sequence[BenchResult]]) -> None:
        """Measure a cell; what fails is said and kept, so that the other cells are measured."""
        if not self._several:
            self._results += run()
            return
        try:
            found = run()
        except (RuntimeError, OSError) as error:
            say(f"{name}: failed: {error}")
            self._failed[name] = str(error)
            return
        for entry in found:
            wanted = entry.details.get("ratio_wanted")  # of the tail: each cell has three
            of = cell if wanted is None else replace(cell, setting=f"{cell.setting}, tail ratio {wanted:g}")
            self._results.append(replace(entry, details={**entry.details, "cell": asdict(of)}))

    def finish(self) -> list[BenchResult]:
        """Print the table, and return the results of all cells.

        Raises
        ------
        FailedCellsError
            Some cells failed.
        """
        found = ratios([entry.as_json() for entry in self._results])
        if found:
            print_table(found)
        if self._failed:
            raise FailedCellsError(self._results, self._failed)
        return self._results


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
    ranks = sorted({each.cell.ranks for each in found})
    rows: dict[tuple[str, float], dict[int, SweptRatio]] = {}
    for each in found:
        rows.setdefault((each.cell.setting, each.cell.megabytes), {})[each.cell.ranks] = each
    worst, best = (choose(found, key=lambda each: each.ratio).name for choose in (min, max))
    extremes = {worst: "worst", best: "best"} if worst != best else {}
    head = ["setting", "size", *(f"{count} ranks" for count in ranks)]
    body = [
        [setting, size_words(megabytes), *(_words(row[count], extremes) if count in row else "" for count in ranks)]
        for (setting, megabytes), row in rows.items()
    ]
    print("Gloo's time over DLCP's, of medians / of means: above 1, DLCP is faster. Gloo's best time in ms", file=to)
    if importlib.util.find_spec("rich"):
        _print_rich(head, body, to)
    else:
        widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
        for line in (head, *body):
            print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)), file=to)
    print(summary(found), file=to, flush=True)


def _words(each: SweptRatio, extremes: Mapping[str, str]) -> str:
    mark = f" {extremes[each.name]}" if each.name in extremes else ""
    return f"{each.ratio:.2f} / {each.mean_ratio:.2f}{mark}, {time_words(each.gloo_ms)}"


def _print_rich(head: Sequence[str], body: Sequence[Sequence[str]], to: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for number, word in enumerate(head):
        table.add_column(word, justify="left" if not number else "right", no_wrap=True)
    for line in body:
        cells = [Text(word) for word in line]
        for cell in cells[2:]:
            cell.highlight_words(["best"], "bold green")
            cell.highlight_words(["worst"], "bold red")
        table.add_row(*cells)
    Console(file=to, width=max(Console(file=to).width, _TABLE_WIDTH)).print(table)
