# SPDX-License-Identifier: Apache-2.0
"""What an examination found."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"
    """It works, and could work better."""
    MISSING = "missing"
    """Needed, and not there: the exit status says so."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Parameters
    ----------
    subject
        What was looked at, in a few words.
    status
        How to take it.
    text
        What was found, in a line.
    fix
        What to do about it, or what would make it better; empty when there is nothing to do.
    data
        The same for programs, with units in the names.
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


@dataclass(frozen=True, slots=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: list[Finding]


def anything_missing(sections: Iterable[Section]) -> bool:
    """Say whether something that is needed is not there."""
    return any(finding.status is Status.MISSING for section in sections for finding in section.findings)
