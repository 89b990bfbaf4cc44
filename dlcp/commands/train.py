# SPDX-License-Identifier: Apache-2.0
"""``dlcp train``: torchrun, with DLCP switched on in every DistributedDataParallel model of an unchanged script."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from dlcp.commands import launch as launch_command
from dlcp.commands import trace
from dlcp.commands.common import add, add_option, add_steps, check_writable, refuse, write_late
from dlcp.host.processes import JobLayout
from dlcp.inputs.error_text import short
from dlcp.train import headroom, summary
from dlcp.train.launcher import (
    Report,
    UsageError,
    WorkerTask,
    failures,
    launch,
    set_options,
    target_of,
    temporary_folder,
)

ELASTIC_MAX: Final = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp train``."""
    parser.usage = "dlcp train [options] [torchrun's options] script.py [the script's arguments]"
    parser.epilog = (
        "All other options before the script go to torchrun: --nproc-per-node 4, --nnodes, --rdzv-endpoint, "
        "--max-restarts ... Instead of script.py, `-m module` runs a module."
    )
    add_option(parser)
    elastic = "train with MIN to MAX processes of this machine, which come and go; the script uses dlcp.torch.Elastic"
    add(parser, "--elastic", "MIN:MAX", str, elastic)
    parser.add_argument(
        "--backend",
        action="store_true",
        help="make init_process_group use DLCP's backend, so that every collective goes over DLCP",
    )
    parser.add_argument(
        "--watch-only",
        action="store_true",
        help="leave averaging to Gloo, NCCL or whatever there is, and report which rank or link is slow, and why",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure what DLCP can gain, then exit; the model is not trained properly meanwhile",
    )
    add_steps(parser, headroom.MEASURED_STEPS, "training steps of --measure")
    traced = "write what the ranks of this machine did and when, as Chrome trace events, which Perfetto opens"
    add(parser, "--trace", "FILE", Path, traced)
    live = "serve a live page and Prometheus metrics for the ranks of this machine (default host: loopback)"
    add(parser, "--live", "[HOST:]PORT", str, live)
    add(parser, "--summary", "FILE", Path, "also write the summary to a file, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train; return the exit status of the first process that failed, or 0."""
    if arguments.watch_only and (why := _needs_dlcp(arguments)):
        return refuse("train", f"{why}, and with --watch-only it does nothing but watch: leave out one of the two")
    if arguments.measure:
        if arguments.live:
            return refuse("train", "--live shows training, and --measure does not train: leave out one of the two")
        return measure(arguments.torchrun, arguments.script, arguments.steps, options=arguments.option)
    try:
        check_writable("--trace", arguments.trace)
        check_writable("--summary", arguments.summary)
        elastic = _elastic(arguments)
    except ValueError as error:
        return refuse("train", error)
    with ExitStack() as stack:
        options = list(arguments.option)
        try:
            if arguments.trace:
                folder = stack.enter_context(temporary_folder("dlcp-trace-"))
                options.append(f"trace={folder}")
            if arguments.live:
                options.append(f"live={_serve(arguments.live, stack)}")
            if elastic:
                set_options(options)
                command = [sys.executable, "-u", *target_of(arguments.script)]
                return launch_command.run_elastic(JobLayout.local(elastic[1]), command, elastic[0], restart=True)
            task = WorkerTask(backend=arguments.backend, watch_only=arguments.watch_only)
            status, reports = launch(arguments.torchrun, arguments.script, options, task)
        except UsageError as error:
            return refuse("train", error)
        if arguments.trace:
            _write_trace(arguments.trace, Path(folder))
    found = summary.summarize(reports)
    _keep_log(found, reports)
    if arguments.summary:
        write_late("train", arguments.summary, json.dumps(found, indent=2) + "\n")
    _print(summary.as_lines(found))
    return status


def _elastic(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """Return the least and the most processes of an elastic job; None if the job is not elastic.

    Raises
    ------
    ValueError
        They make no sense, or another option does not go with them.
    """
    if arguments.elastic is None:
        return None
    least, _, most = arguments.elastic.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) and 2 <= int(most) <= ELASTIC_MAX):
        raise ValueError(f"--elastic takes MIN:MAX, such as 2:4, got {short(arguments.elastic)}")
    with_it = ("backend", "watch_only", "measure", "trace", "summary")
    unsupported = [f"--{name.replace('_', '-')}" for name in with_it if getattr(arguments, name)]
    if unsupported := unsupported + list(arguments.torchrun):
        raise ValueError(
            f"--elastic starts the processes itself, on this machine, and does not know {' '.join(unsupported)}: omit "
            "that; on several machines use `dlcp launch --elastic`"
        )
    return int(least), int(most)


def _keep_log(found: dict[str, Any], reports: Sequence[Report]) -> None:
    """If torchrun keeps no log of the rank that failed first, write its traceback to a file that stays."""
    first = next(iter(failures(reports)), None)
    if not first or first["log"] or not first["traceback"]:
        return
    with (
        suppress(OSError),
        tempfile.NamedTemporaryFile("w", prefix=f"dlcp-rank{first['rank']}-", suffix=".log", delete=False) as file,
    ):
        file.write(first["traceback"])
        found["first_failure"]["log"] = file.name


def _needs_dlcp(arguments: argparse.Namespace) -> str:
    """Return which other option of the command line is about averaging with DLCP, and why; ``""`` if none is."""
    reasons = {
        "measure": "--measure averages with DLCP in turn",
        "backend": "--backend makes DLCP carry all collectives",
        "trace": "--trace records what DLCP sends",
        "option": "--option configures DLCP's averaging",
    }
    return next((why for name, why in reasons.items() if getattr(arguments, name)), "")


def measure(
    torchrun: Sequence[str],
    script: Sequence[str],
    steps: int,
    *,
    command: str = "train",
    options: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Measure the share of communication in a script's steps for a command; return the exit status."""
    try:
        task = WorkerTask(measure_steps=headroom.checked_steps(steps))
        status, reports = launch(torchrun, script, options, task)
    except ValueError as error:
        return refuse(command, error)
    found = headroom.evaluate(reports)
    if found is None:
        return refuse(command, headroom.nothing_measured(reports), status or 1)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(headroom.as_lines(found))
    return status


def _serve(address: str, stack: ExitStack) -> str:
    """Serve the live page until the stack is closed; return the folder for the ranks' snapshots.

    Raises
    ------
    UsageError
        The page cannot be served.
    """
    try:
        from dlcp.commands.live import say_where
        from dlcp.live.http_server import AddressError, LiveServer
    except ModuleNotFoundError as error:
        raise UsageError(f"--live: {error.name} is missing: pip install 'dlcp[live]'") from None
    folder = stack.enter_context(temporary_folder("dlcp-live-"))
    try:
        server = stack.enter_context(LiveServer([Path(folder)], address))
    except AddressError as error:
        raise UsageError(f"--live {error}") from None
    stack.callback(server.training_is_over)
    say_where(server)
    return folder


def _write_trace(file: Path, folder: Path) -> None:
    """Write the trace, or print why there is none; the exit status stays the script's."""
    try:
        trace.write(file, [folder])
    except (OSError, ValueError) as error:
        refuse("train", f"no trace: {error}")


def _print(lines: Sequence[str]) -> None:
    """Print to standard error: standard output belongs to the script."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)
