# SPDX-License-Identifier: Apache-2.0
"""How findings are shown: with rich where it is installed, and as plain lines elsewhere."""

import importlib.util
import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import TextIO

from dlcp.configuration import Setting
from dlcp.doctor.finding import Finding, Section, Status

_COLOURS = {Status.OK: "green", Status.NOTE: "yellow", Status.MISSING: "bold red"}
_INDENT = 2


def show(sections: Sequence[Section], settings: Sequence[Setting], *, every_option: bool, to: TextIO) -> None:
    """Show findings, and the options in force; of these only the chosen ones unless ``every_option``."""
    if importlib.util.find_spec("rich"):
        _show_coloured(as_text(sections, settings, every_option=every_option), to)
    else:
        to.write(as_text(sections, settings, every_option=every_option))


def verdict(sections: Sequence[Section]) -> str:
    """Say in one line how things stand."""
    counts = dict.fromkeys(Status, 0)
    for section in sections:
        for finding in section.findings:
            counts[finding.status] += 1
    missing, notes = counts[Status.MISSING], counts[Status.NOTE]
    if missing:
        return f"{missing} thing{'s' * (missing != 1)} needed and missing: see above what to do."
    if notes:
        return f"DLCP works here; {notes} thing{'s' * (notes != 1)} could be better."
    return "DLCP works here, and nothing could be better."


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
            lines += [
                f"{' ' * (_INDENT + 9)}{setting.name:<{names}} = {_value(setting):<14} {setting.origin}"
                for setting in _shown(settings, every_option)
            ]
    return "\n".join([*lines[1:], "", verdict(sections), ""])


def _lines(finding: Finding, width: int) -> list[str]:
    head = f"{' ' * _INDENT}{finding.status.value:<9}{finding.subject + ':':<18} "
    hang = " " * len(head)
    lines = textwrap.wrap(finding.text, width, initial_indent=head, subsequent_indent=hang, break_long_words=False)
    if finding.fix:
        lines += textwrap.wrap("-> " + finding.fix, width, initial_indent=hang, subsequent_indent=hang + "   ")
    return lines


def _show_coloured(page: str, to: TextIO) -> None:
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


def _shown(settings: Sequence[Setting], every_option: bool) -> list[Setting]:
    return [setting for setting in settings if every_option or not setting.is_default]


def _value(setting: Setting) -> str:
    """Return a value as one would write it into the file; a token is a secret."""
    if setting.name == "token" and setting.value:
        return "(set)"
    return json.dumps(setting.value)
