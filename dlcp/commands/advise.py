# SPDX-License-Identifier: Apache-2.0
"""``dlcp advise``: measure a training script, and say which settings suit it and this network, and why."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dlcp import configuration
from dlcp.advise import page
from dlcp.commands.train import UsageError, launch
from dlcp.train import headroom
from dlcp.train.plan import Plan
from dlcp.tuning.rules import Figures, Settings, decide

PASSES_ON = True
"""What this command does not know goes to torchrun, and what stands after ``--`` is the training script."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp advise`` takes."""
    parser.usage = (
        "dlcp advise [--steps N] [--json] [--save FILE] [torchrun's options] -- script.py [the script's arguments]\n"
        "       dlcp advise [--json] --measured FILE"
    )
    parser.epilog = "The model is trained wrongly while it is measured: throw away what the script saves."
    parser.add_argument("--steps", type=int, default=headroom.STEPS, help="steps to measure (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write that document there, too")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="advise by the figures of such a document")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of DLCP to begin with"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read what has been measured, and advise; return the exit status: 2 for wrong use."""
    try:
        if arguments.measured:
            if arguments.script or arguments.torchrun:
                raise UsageError("--measured takes no script: its figures are there already")
            return _tell(_from_file(arguments.measured), arguments)
        return _measure(arguments)
    except UsageError as error:
        print(f"dlcp advise: {error}", file=sys.stderr)
        return 2


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.steps < headroom.FEWEST_STEPS:
        raise UsageError(f"--steps must be at least {headroom.FEWEST_STEPS}, got {arguments.steps}")
    plan = Plan(measure_steps=arguments.steps, advise=True)
    status, reports = launch(arguments.torchrun, arguments.script, arguments.option, plan)
    measured: list[dict[str, Any]] = [report["measured"] for report in reports if report["measured"]]
    if headroom.evaluate(reports) is None:
        print(headroom.nothing_measured(reports), file=sys.stderr)
        return status or 1
    advice = measured[0]["advice"]
    if advice is None:
        print(f"dlcp advise: DLCP was not measured: {measured[0]['why_not']}", file=sys.stderr)
        return status or 1
    figures = Figures.of_json(advice["figures"])
    given = Settings(**{choice["option"]: choice["was"] for choice in advice["choices"]})
    steps = headroom.slowest_steps(reports)
    advised_s = steps[headroom.ADVISED]
    default_s = steps[headroom.DLCP][-len(advised_s) :] if advised_s else []
    return _tell(page.judge(decide(figures, given), default_s, advised_s), arguments) or status


def _from_file(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
        figures = Figures.of_json(document.get("figures", document))
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{file}: {error}") from None
    return page.judge(decide(figures, _in_force()))


def _in_force() -> Settings:
    """Return the settings of the environment and the file, or the defaults; PyTorch is not needed for that."""
    from dlcp.session.options import Options

    options = configuration.build(Options)
    return Settings(options.loss_bound, options.protected_share, options.compression, options.collective)


def _tell(found: dict[str, Any], arguments: argparse.Namespace) -> int:
    text = json.dumps(found, indent=2)
    if arguments.save:
        arguments.save.write_text(text + "\n")
    print(text if arguments.json else "\n".join(page.as_lines(found)))
    return 0
