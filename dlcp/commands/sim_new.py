# SPDX-License-Identifier: Apache-2.0
"""``dlcp sim new``: ask for a job and its network, and write the experiment."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcp.commands.common import add, check_writable

if TYPE_CHECKING:
    from rich.console import Console

NEW_OPTIONS = {
    "model": ("NAME", "network to train: resnet50, vgg16, transformer, bert_large and others"),
    "gpu": ("NAME", "GPU with a published throughput of the model: p100, v100, a100 or h100"),
    "workers": ("N", "number of workers, one GPU each"),
    "collective": ("NAME", "how gradients are reduced: direct, ring, parameter_server and others"),
    "fabric": ("NAME", "star, leaf_spine, fat_tree, dragonfly or rail_optimised"),
    "rate_gbps": ("RATE", "rate of each host's link in Gbit/s"),
    "transport": ("NAME", "dlcp, dctcp, cubic, swift, ndp, nscc, rccc and others"),
    "discipline": ("NAME", "how switches queue and drop (default: what the transport was made for)"),
}
"""The questions of `dlcp.sim.tools.guided`, whose names and defaults take a while to load."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp sim new``."""
    parser.epilog = "Each option answers a question; the others are asked."
    use = "YAML file to write (default: %(default)s)"
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, default=Path("experiment.yaml"), help=use)
    for name, (metavar, use) in NEW_OPTIONS.items():
        add(parser, f"--{name.replace('_', '-')}", metavar, str, use)
    parser.add_argument(
        "--yes", action="store_true", help="ask nothing: take the default of each option that is left out"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def run(arguments: argparse.Namespace) -> int:
    """Ask what the options leave open, and write the file."""
    from dlcp.inputs.document import DocumentError
    from dlcp.sim.tools.guided import PACKETS_UP_TO, guided_experiment, guided_setting

    path: Path = arguments.file
    if path.suffix not in (".yaml", ".yml"):
        raise DocumentError(f"{path}: experiments are YAML; give a name that ends in .yaml")
    if path.exists() and not arguments.force:
        raise DocumentError(f"{path} exists; give another name, or --force to replace it")
    answers = _answers(arguments)
    try:
        text = guided_experiment(answers, path)
        check_writable("FILE", path)
    except ValueError as error:
        raise DocumentError(str(error)) from None
    path.write_text(text, encoding="utf-8")
    if guided_setting(answers).engine == "flows":
        print(
            f"More than {PACKETS_UP_TO} workers: simulated as flows, which leave out most queues and drops, with "
            f"{answers['collective']} all-reduces; `engine` and `collective` in the file change that"
        )
    print(f"{path}: run it with `dlcp sim run {shlex.quote(str(path))}`")
    return 0


def _answers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return an answer to each question: from its option, from the terminal, or the default."""
    from rich.console import Console

    from dlcp.inputs.document import DocumentError
    from dlcp.sim.tools.guided import QUESTIONS

    open_ones = [f"--{name.replace('_', '-')}" for name in NEW_OPTIONS if getattr(arguments, name) is None]
    if open_ones and not arguments.yes and not sys.stdin.isatty():
        raise DocumentError(f"this is not a terminal, so nothing can be asked; give {', '.join(open_ones)}, or --yes")
    console = Console(stderr=True)
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        default = question.default(answers)
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        given = getattr(arguments, question.name)
        try:
            if given is None:
                given = shown if arguments.yes else _ask(question, shown, answers, console)
            answers[question.name] = question.parse(given, answers)
        except (EOFError, KeyboardInterrupt):
            raise DocumentError("no answer; nothing was written") from None
        except ValueError as error:
            raise DocumentError(f"--{question.name.replace('_', '-')}: {error}") from None
    return answers


def _ask(question: Any, default: str, answers: dict[str, Any], console: "Console") -> str:
    """Ask at the terminal until the answer is valid, and return it."""
    from rich.text import Text

    choices = question.choices(answers)
    known = f" ({', '.join(choices)})" if choices else ""
    prompt = Text.assemble((question.text, "bold"), known, " ", (f"({default})", "prompt.default"), ": ")
    while answer := console.input(prompt):
        try:
            question.parse(answer.strip(), answers)
        except ValueError as error:
            text = str(error)
            console.print(Text(f"{text[0].upper()}{text[1:]}", "red"))
        else:
            return answer.strip()
    return default
