# SPDX-License-Identifier: Apache-2.0
"""``dlcp doctor``: examine this machine, the options in force and the paths to others, and suggest fixes.

Here are findings, and their output: in colour if rich is installed, else as plain lines.
"""

import importlib.util
import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TextIO

from dlcp.inputs.configuration import Setting


class Status(Enum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """It works, and could work better."""
    MISSING = "missing"
    """Something required is missing; the exit status is 1."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding.

    Parameters
    ----------
    subject
        The thing examined, in a few words.
    status
        Its severity.
    text
        The finding, in one line.
    fix
        The remedy; empty if none is needed.
    data
        The finding for programs, with units in the names.
    """

    subject: str
    status: Status
    text: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return {
            "subject": self.subject,
            "status": self.status.value,
            "text": self.text,
            **({"fix": self.fix} if self.fix else {}),
            **self.data,
        }


def ok(subject: str, text: str, fix: str = "", /, **data: Any) -> Diagnosis:
    """Return a finding about something that works."""
    return Diagnosis(subject, Status.OK, text, fix, data)


def note(subject: str, text: str, fix: str = "", /, **data: Any) -> Diagnosis:
    """Return a finding about something that works, and could work better."""
    return Diagnosis(subject, Status.NOTE, text, fix, data)


def missing(subject: str, text: str, fix: str = "", /, **data: Any) -> Diagnosis:
    """Return a finding about something required that is missing."""
    return Diagnosis(subject, Status.MISSING, text, fix, data)


@dataclass(frozen=True, slots=True)
class Section:
    """A titled group of findings."""

    title: str
    findings: list[Diagnosis]


def anything_missing(sections: Iterable[Section]) -> bool:
    """Return whether something required is missing."""
    return any(finding.status is Status.MISSING for section in sections for finding in section.findings)


_COLOURS = {Status.OK: "green", Status.NOTE: "yellow", Status.MISSING: "bold red"}
_INDENT = 2


def show(sections: Sequence[Section], settings: Sequence[Setting], *, every_option: bool, to: TextIO) -> None:
    """Print sections and options; only options not at their default, unless ``every_option``."""
    text = as_text(sections, settings, every_option=every_option)
    if importlib.util.find_spec("rich"):
        _print_coloured(text, to)
    else:
        to.write(text)


def verdict(sections: Sequence[Section]) -> str:
    """Return a summary in one line."""
    counts = dict.fromkeys(Status, 0)
    for section in sections:
        for finding in section.findings:
            counts[finding.status] += 1
    missing, notes = counts[Status.MISSING], counts[Status.NOTE]
    if missing:
        what = "thing that DLCP needs is" if missing == 1 else "things that DLCP needs are"
        return f"{missing} {what} missing: see the lines marked ->."
    if notes:
        return f"DLCP works here; {notes} thing{'s' * (notes != 1)} could be better."
    return "DLCP works here; nothing to improve."


def as_text(sections: Sequence[Section], settings: Sequence[Setting], *, every_option: bool, width: int = 0) -> str:
    """Return findings and options as plain lines of at most ``width`` characters; by default the terminal's."""
    width = width or min(120, shutil.get_terminal_size((100, 24)).columns)
    lines = []
    for section in sections:
        if section.findings:
            lines += ["", section.title]
            lines += [line for finding in section.findings for line in _lines(finding, width)]
        if section.title == "Options":
            names = max((len(setting.name) for setting in settings), default=0)
            for setting in settings:
                if every_option or not setting.is_default:
                    value = json.dumps(setting.value)
                    lines.append(f"{' ' * (_INDENT + 9)}{setting.name:<{names}} = {value:<14} {setting.origin}")
    return "\n".join([*lines[1:], "", verdict(sections), ""])


def _lines(finding: Diagnosis, width: int) -> list[str]:
    head = f"{' ' * _INDENT}{finding.status.value:<9}{finding.subject + ':':<18} "
    hang = " " * len(head)
    lines = textwrap.wrap(finding.text, width, initial_indent=head, subsequent_indent=hang, break_long_words=False)
    if finding.fix:
        lines += textwrap.wrap("-> " + finding.fix, width, initial_indent=hang, subsequent_indent=hang + "   ")
    return lines


def _print_coloured(page: str, to: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=to, highlight=False)
    for line in page.splitlines():
        text = Text(line)
        for status, colour in _COLOURS.items():
            text.highlight_regex(f"^  {status.value} ", colour)
        text.highlight_regex("^ +-> .*", "cyan")
        text.highlight_regex("^[^ ].*", "bold")
        console.print(text, soft_wrap=True)
