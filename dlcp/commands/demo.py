# SPDX-License-Identifier: Apache-2.0
"""``dlcp demo``: train over a congested switch, with and without DLCP, and write a report page."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dlcp.demo.run import DemoError, Setup, execute, variants
from dlcp.demo.summary import summarize, write_summary
from dlcp.report.page import write_report
from dlcp.switch import namespace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp demo`` takes."""
    default = Setup()
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of everything (default: %(default)s)")
    parser.add_argument(
        "--collective", choices=["direct", "ps"], default="direct", help="all-reduce, or parameter server"
    )
    parser.add_argument("--steps", type=int, default=default.steps, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--rate-mbps", type=float, default=default.rate_bps / 1e6, help="rate of each port (default: %(default)s)"
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=default.depth_packets,
        help="depth of each queue, in packets (default: %(default)s)",
    )
    parser.add_argument(
        "--loss-bound", type=float, default=default.loss_bound, help="share of a message that may be lost"
    )
    parser.add_argument("--only", nargs="+", metavar="RUN", help="only these runs: gloo plain dlcp dlcp_priority")
    parser.add_argument("--loopback", action="store_true", help="do without network namespaces (and so without Gloo)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where to write (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    console = Console()
    possible, reason = (False, "--loopback") if arguments.loopback else _namespaces()
    if not possible:
        console.print(f"No network namespaces ({reason}): runs on loopback, without Gloo and without real TCP.")
    setup = Setup(
        seed=arguments.seed,
        steps=arguments.steps,
        rate_bps=round(arguments.rate_mbps * 1e6),
        depth_packets=arguments.depth,
        loss_bound=arguments.loss_bound,
        collective="server" if arguments.collective == "ps" else "direct",
    )
    folder = arguments.out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    runs: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description:<58}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        for variant in variants(setup):
            if (variant.mode == "gloo" and not possible) or (arguments.only and variant.name not in arguments.only):
                continue
            bar = bars.add_task(variant.title, total=setup.steps)
            try:
                record = execute(setup, variant, namespaces=possible, progress=partial(_advance, bars, bar))
            except DemoError as error:
                console.print(f"[bold]{variant.title} failed[/]", str(error), sep="\n", markup=True)
                return 1
            runs[variant.name] = record
            (folder / f"{variant.name}.json").write_text(json.dumps(record))
    if arguments.only:
        return 0
    summary = summarize(runs)
    write_summary(summary, arguments.out)
    page = write_report(runs, summary, arguments.out)
    tell(console, summary, page)
    return 0


def _namespaces() -> tuple[bool, str]:
    """Say whether there are network namespaces, and why not. May run this program again, as root of its own."""
    try:
        namespace.become_root()
    except namespace.NamespaceError as error:
        return False, str(error)
    return namespace.available()


def _advance(bars: Progress, bar: TaskID, steps: int) -> None:
    bars.update(bar, completed=steps)


def tell(console: Console, summary: dict[str, Any], page: Path) -> None:
    """Say in a few lines what came out."""
    accuracy = summary["target_accuracy"]
    if accuracy is None:
        console.print("  The runs hold no common accuracy; train longer (--steps).")
        return
    target = f"{accuracy:.1%}"
    for name in ("gloo", "plain", "dlcp", "dlcp_priority"):
        result = summary.get(name)
        if result:
            console.print(
                f"  {name:<14} {result['seconds_to_target']:6.1f} s to {target}, "
                f"{result['step_seconds']['mean']:.2f} s a step, final accuracy {result['final_accuracy']:.1%}"
            )
    for peer in ("gloo", "plain"):
        ratio = summary[f"speedup_over_{peer}"]
        if ratio is not None:
            console.print(f"  DLCP against {peer}: {ratio:.2f}x")
    loss = summary["dlcp"]["loss"]
    console.print(
        f"  most lost of a message: {loss['max_message_ratio']:.1%} of at most {loss['bound']:.0%}, "
        f"bound exceeded {loss['violations']} times; replicas identical: {summary['replicas_identical']}"
    )
    console.print(f"  report: {page}")
