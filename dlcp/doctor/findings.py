# SPDX-License-Identifier: Apache-2.0
"""What an examination found, and how it is printed: in colour where rich is installed, as plain lines elsewhere."""

import importlib.util
import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TextIO

from dlcp.configuration import Setting


class Status(Enum):
    """How serious it is."""

    OK = "ok"
    NOTE = "note"
    """It works, and could work better."""
    MISSING = "missing"
    """Something that is needed is not there; the exit status is 1."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that was examined.

    Parameters
    ----------
    subject
        What it is, in a few words.
    status
        How serious it is.
    text
        What was found, in a line.
    fix
        What to do about it; empty if there is nothing to do.
    data
        The same for programs, with units in the names.
    """

    subject: str
    status: Status
    text: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "subject": self.subject,
            "status": self.status.value,
            "text": self.text,
            **({"fix": self.fix} if self.fix else {}),
            **self.data,
        }


@dataclass(frozen=True, slots=True)
class Section:
    """Diagnoses that belong together."""

    title: str
    findings: list[Diagnosis]


def anything_missing(sections: Iterable[Section]) -> bool:
    """Return whether something that is needed is not there."""
    return any(finding.status is Status.MISSING for section in sections for finding in section.findings)


_COLOURS = {Status.OK: "green", Status.NOTE: "yellow", Status.MISSING: "bold red"}
_INDENT = 2


def show(sections: Sequence[Section], settings: Sequence[Setting], *, every_option: bool, to: TextIO) -> None:
    """Print sections and the options in force: only the chosen options unless ``every_option``."""
    text = as_text(sections, settings, every_option=every_option)
    if importlib.util.find_spec("rich"):
        _print_coloured(text, to)
    else:
        to.write(text)


def is_secret(setting: Setting) -> bool:
    """Return whether only that an option is set may be printed, not its value."""
    return setting.name == "token" and bool(setting.value)


def verdict(sections: Sequence[Section]) -> str:
    """Return a summary in one line."""
    counts = dict.fromkeys(Status, 0)
    for section in sections:
        for finding in section.findings:
            counts[finding.status] += 1
    missing, notes = counts[Status.MISSING], counts[Status.NOTE]
    if missing:
        what = "thing that DLCP needs is" if missing == 1 else "things that DLCP needs are"
        return f"{missing} {what} missing: the lines marked -> say what to do."
    if notes:
        return f"DLCP works here; {notes} thing{'s' * (notes != 1)} could be better."
    return "DLCP works here, as well as it can."


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
                    value = "(set)" if is_secret(setting) else json.dumps(setting.value)
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
