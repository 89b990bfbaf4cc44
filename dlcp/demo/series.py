# SPDX-License-Identifier: Apache-2.0
"""A series of runs: their files, progress bars on the terminal, and the report on all of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dlcp.demo.run import DemoError
from dlcp.demo.setup import Variant
from dlcp.report.runs import RUN_NAMES, Run, RunFileError, load_runs, summarize, write_summary


def run_series(
    console: Console, folder: Path, variants: Sequence[Variant], steps: int, run: Callable[..., dict[str, Any]]
) -> None:
    """Run each variant and write its record to ``folder/runs/NAME.json``.

    Parameters
    ----------
    run
        Called with a variant and ``progress``; returns the record. See :func:`dlcp.demo.run.execute`.

    Raises
    ------
    DemoError
        A run failed; the message names it.
    """
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description:<58}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        for number, variant in enumerate(variants, 1):
            bar = bars.add_task(variant.title, total=steps)
            if not console.is_terminal:  # rich then draws bars only at the end
                console.print(f"run {number} of {len(variants)}, {steps} steps: {variant.title}")
            try:
                record = run(variant, progress=lambda done, bar=bar: bars.update(bar, completed=done))
            except DemoError as error:
                raise DemoError(f"{variant.title} failed\n{error}") from error
            (folder / "runs" / f"{variant.name}.json").write_text(json.dumps(record))


def select(variants: Sequence[Variant], only: Sequence[str] | None, folder: Path) -> list[Variant]:
    """Return the variants named in ``only``. Without it, return all, and remove earlier runs from the folder.

    Raises
    ------
    ValueError
        No variant has that name.
    """
    if only:
        unknown = set(only) - {variant.name for variant in variants}
        if unknown:
            raise ValueError(f"--only: unknown run {min(unknown)!r}; choose from {', '.join(v.name for v in variants)}")
        return [variant for variant in variants if variant.name in only]
    for old in (folder / "runs").glob("*.json"):
        old.unlink()
    return list(variants)


def report(console: Console, folder: Path, *, complete: bool) -> dict[str, Run]:
    """Write summary and report page of the runs in a folder, print a short result, and return the runs.

    Parameters
    ----------
    complete
        Whether all runs must be there. Otherwise a missing run means no page yet.

    Raises
    ------
    RunFileError
        A run is missing, or the runs cannot be compared.
    """
    from dlcp.report.page import write_report  # Matplotlib takes a second to load

    try:
        runs = load_runs(folder)
    except RunFileError as error:
        if complete:
            raise
        console.print(f"no page yet: {error}")
        return {}
    summary = summarize(runs)
    write_summary(summary, folder)
    page = write_report(runs, summary, folder)
    _print_summary(console, summary)
    console.print(f"  report: {page}")
    return runs


def _print_summary(console: Console, summary: dict[str, Any]) -> None:
    accuracy = summary["target_accuracy"]
    if accuracy is None:
        console.print("  The runs have no accuracy in common that each one held: train longer (--steps).")
        return
    for name in RUN_NAMES:
        if result := summary.get(name):
            console.print(
                f"  {name:<14} {result['seconds_to_target']:6.1f} s to {accuracy:.1%}, "
                f"{result['step_seconds']['mean']:.2f} s per step, final accuracy {result['final_accuracy']:.1%}"
            )
    console.print()
    peers = [(peer, summary[f"speedup_over_{peer}"]) for peer in ("gloo", "plain")]
    ratios = [f"{ratio:.2f} times as fast as {peer}" for peer, ratio in peers if ratio is not None]
    loss = summary["dlcp"]["loss"]
    kept = f"exceeded {loss['violations']} times" if loss["violations"] else "never exceeded"
    console.print(f"  dlcp was {', '.join(ratios) or 'the only run'}, to {accuracy:.1%}")
    console.print(f"  a message lost at most {loss['max_message_ratio']:.1%}; the bound is {loss['bound']:.0%}, {kept}")
    deferral = summary["dlcp"]["deferral"]
    console.print(
        f"  {deferral['share']:.1%} of the packets were deferred to a later step, at most "
        f"{deferral['max_message_ratio']:.1%} of a message; the bound is {deferral['bound']:.0%}"
    )
    console.print(f"  replicas are {'bit-identical' if summary['replicas_identical'] else 'NOT identical'}")
