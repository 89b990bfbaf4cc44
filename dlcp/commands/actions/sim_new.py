# SPDX-License-Identifier: Apache-2.0
"""The work of ``dlcp sim new``: ask what its options leave open, and write the file."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.prompt import InvalidResponse, PromptBase
from rich.text import Text

from dlcp.commands.common import check_writable
from dlcp.commands.sim_new import NEW_OPTIONS
from dlcp.inputs.document import DocumentError
from dlcp.sim.tools.guided import QUESTIONS, guided_experiment


def run_new(arguments: argparse.Namespace) -> int:
    """Ask what the options leave open, and write the file."""
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
    print(f"{path}: run it with `dlcp sim run {shlex.quote(str(path))}`")
    return 0


def _answers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return an answer to each question: its option's, that of the person at the terminal, or the default."""
    open_ones = [f"--{name.replace('_', '-')}" for name in NEW_OPTIONS if getattr(arguments, name) is None]
    if open_ones and not arguments.yes and not sys.stdin.isatty():
        raise DocumentError(f"this is not a terminal, so nothing can be asked; give {', '.join(open_ones)}, or --yes")
    console = Console(stderr=True)
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        default = question.default(answers)
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        given = getattr(arguments, question.name)
        if given is None:
            given = shown if arguments.yes else _ask(question, shown, answers, console)
        try:
            answers[question.name] = question.parse(given, answers)
        except ValueError as error:
            raise DocumentError(f"--{question.name.replace('_', '-')}: {error}") from None
    return answers


def _ask(question: Any, default: str, answers: dict[str, Any], console: Console) -> str:
    """Return the answer of the person at the terminal, who is asked again until it is right."""
    choices = question.choices(answers)
    known = f" ({', '.join(choices)})" if choices else ""
    prompt = _Prompt(Text.assemble((question.text, "bold"), known), console=console)
    prompt.check = lambda answer: question.parse(answer, answers)
    try:
        return prompt(default=default)
    except (EOFError, KeyboardInterrupt):
        raise DocumentError("no answer; nothing was written") from None


class _Prompt(PromptBase[str]):
    """A question at a terminal; ``check`` raises ValueError if the answer is wrong."""

    check: Callable[[str], Any]

    def process_response(self, value: str) -> str:
        """Return the answer."""
        answer = value.strip()
        try:
            self.check(answer)
        except ValueError as error:
            text = str(error)
            raise InvalidResponse(Text(f"{text[0].upper()}{text[1:]}", "red")) from None
        return answer
