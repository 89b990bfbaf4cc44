# SPDX-License-Identifier: Apache-2.0
"""``dlcp advise``: measure a training script, and recommend settings for it on this network, with reasons."""

import argparse
import json
from pathlib import Path
from typing import Any

from dlcp.commands.common import add, add_json, add_option, add_steps, check_writable, refuse, write_late
from dlcp.train import advice, headroom
from dlcp.train.launcher import TrainPlan, launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp advise``."""
    parser.usage = (
        "dlcp advise [--steps N] [--json] [--save FILE] [torchrun's options] script.py [the script's arguments]\n"
        "       dlcp advise [--json] --measured FILE"
    )
    parser.epilog = "The model is not trained properly while it is measured: discard what the script saves."
    add_steps(parser, headroom.MEASURED_STEPS, "training steps to measure")
    add_json(parser)
    add(parser, "--save", "FILE", Path, "also write the JSON document to a file")
    add(parser, "--measured", "FILE", Path, "advise on the figures of such a document, without measuring")
    add_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read a measurement, and advise; return the exit status, 2 for wrong use."""
    try:
        check_writable("--save", arguments.save)
        if not arguments.measured:
            return _measure(arguments)
        if arguments.script or arguments.torchrun:
            raise ValueError("--measured reads an earlier measurement: leave the script out")
        _print(advice.from_file(arguments.measured), arguments)
        return 0
    except ValueError as error:
        return refuse("advise", error)


def _measure(arguments: argparse.Namespace) -> int:
    plan = TrainPlan(measure_steps=headroom.checked_steps(arguments.steps), advise=True)
    status, reports = launch(arguments.torchrun, arguments.script, arguments.option, plan)
    try:
        found = advice.from_reports(reports)
    except advice.NothingMeasuredError as error:
        return refuse("advise", error, status or 1)
    _print(found, arguments)
    return status


def _print(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    text = json.dumps(found, indent=2)
    if arguments.save:
        write_late("advise", arguments.save, text + "\n")
    print(text if arguments.json else "\n".join(advice.as_lines(found)))
