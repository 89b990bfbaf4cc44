# SPDX-License-Identifier: Apache-2.0
"""``dlcp train``: torchrun, with DLCP switched on in every DistributedDataParallel model of an unchanged script."""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlcp import configuration
from dlcp.suggestion import closest
from dlcp.train import headroom, summary
from dlcp.train.plan import Plan
from dlcp.train.report import read_reports

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PASSES_ON = True
"""What this command does not know goes to torchrun, and what stands after ``--`` is the training script."""

LONE_MACHINE: Final = ("--standalone", "--local-addr", "127.0.0.1")
"""What is passed to torchrun when the user says nothing of a rendezvous: one machine, and a port that is free."""
_RENDEZVOUS: Final = ("nnodes", "node-rank", "rdzv", "master", "standalone", "local-addr")
_MODULE: Final = ("-m", "--module")
_REFUSED: Final = {
    "--no-python": "DLCP is switched on from within Python",
    "--run-path": "dlcp train runs the script that way already",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp train`` takes."""
    parser.usage = "dlcp train [options] [torchrun's options] -- script.py [the script's arguments]"
    parser.epilog = (
        "Whatever else stands before -- goes to torchrun: --nproc-per-node 4, --nnodes, --rdzv-endpoint, "
        "--max-restarts ... Instead of script.py, `-m module` runs a module."
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of DLCP, such as loss_bound=0.05 (dlcp doctor --all-options lists them)",
    )
    parser.add_argument(
        "--backend",
        action="store_true",
        help="let init_process_group use DLCP's backend, so that every collective goes over DLCP",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure what DLCP can win, and end; the model is trained wrongly meanwhile",
    )
    parser.add_argument(
        "--steps", type=int, default=headroom.STEPS, help="steps that --measure takes (default: %(default)s)"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the summary there, too, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train; return the exit status of the first process that failed, or 0."""
    if arguments.measure:
        return measure(arguments.torchrun, arguments.script, arguments.steps, options=arguments.option)
    try:
        plan = Plan(backend=arguments.backend)
        status, reports = launch(arguments.torchrun, arguments.script, arguments.option, plan)
    except UsageError as error:
        return _refuse(error)
    found = summary.summarize(reports)
    if arguments.summary:
        arguments.summary.write_text(json.dumps(found, indent=2) + "\n")
    _say(summary.as_lines(found))
    return status


def measure(
    torchrun: Sequence[str], script: Sequence[str], steps: int, *, options: Sequence[str] = (), as_json: bool = False
) -> int:
    """Measure what share of a script's steps is communication; return the exit status."""
    try:
        if steps < headroom.FEWEST_STEPS:
            raise UsageError(f"--steps must be at least {headroom.FEWEST_STEPS}, got {steps}")
        status, reports = launch(torchrun, script, options, Plan(measure_steps=steps))
    except UsageError as error:
        return _refuse(error)
    found = headroom.evaluate(reports)
    if found is None:
        _say([headroom.nothing_measured(reports)])
        return status or 1
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _say(headroom.as_lines(found))
    return status


class UsageError(ValueError):
    """The command was called wrongly; the message says how."""


def launch(
    torchrun: Sequence[str], script: Sequence[str], options: Sequence[str], plan: Plan
) -> tuple[int, list[dict[str, Any]]]:
    """Run the script under torchrun; return the exit status and what the ranks of this machine reported."""
    target = _target(torchrun, script)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("PyTorch is not installed; pip install 'dlcp[torch]'")
    _choose_options(options)
    passed = [word for word in torchrun if word not in _MODULE]
    if not _has_rendezvous(passed):
        passed = [*LONE_MACHINE, *passed]
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    status = 0
    with tempfile.TemporaryDirectory(prefix="dlcp-train-") as folder:
        os.environ.update(plan.as_environment(Path(folder)))
        try:
            main([*passed, "-m", "dlcp.train.worker", *target])
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            status = _status_of(error)
        except SignalException as signal:  # Ctrl-C, or a scheduler that wants its machine back
            status = 128 + signal.sigval
        return status, read_reports(Path(folder))


def _target(torchrun: Sequence[str], script: Sequence[str]) -> list[str]:
    """Return what the workers are to run: ``script.py arguments`` or ``-m module arguments``."""
    if not script:
        raise UsageError("no script: dlcp train [options] -- script.py [the script's arguments]")
    for word, why in _REFUSED.items():
        if word in torchrun or word.replace("-", "_").replace("__", "--", 1) in torchrun:
            raise UsageError(f"{word} cannot be used here: {why}")
    if any(word in torchrun for word in _MODULE):
        return ["-m", *script]
    if script[0] == "-m":
        if len(script) == 1:
            raise UsageError("-m without a module's name")
        return list(script)
    if not Path(script[0]).is_file():
        raise UsageError(f"there is no script {script[0]}")
    return list(script)


def _choose_options(words: Sequence[str]) -> None:
    """Hand ``NAME=VALUE`` words to the workers, and refuse here what they would refuse."""
    from dlcp.session.options import Options

    known = configuration.simple_options(Options)
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--option takes NAME=VALUE, got {word!r}")
        if name not in known:
            raise UsageError(f"there is no option {name!r}{closest(name, known)}")
        os.environ[configuration.PREFIX + name.upper()] = value
    try:
        configuration.build(Options)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _has_rendezvous(torchrun: Sequence[str]) -> bool:
    """Say whether the user chose how the machines meet, as an option or as torchrun's ``PET_*`` variables."""
    words = [word.lstrip("-").replace("_", "-") for word in torchrun if word.startswith("--")]
    words += [name[4:].lower().replace("_", "-") for name in os.environ if name.startswith("PET_")]
    return any(word.startswith(_RENDEZVOUS) for word in words)


def _status_of(error: "ChildFailedError") -> int:
    """Return the exit status of the first process that failed, as a shell would."""
    _, failure = error.get_first_failure()
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _refuse(error: UsageError) -> int:
    print(f"dlcp train: {error}", file=sys.stderr)
    return 2


def _say(lines: Sequence[str]) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)
