# SPDX-License-Identifier: Apache-2.0
"""Profiles of one's own as files."""

from pathlib import Path

import msgspec
import yaml
from dlcp.sim.models.profile import StepProfile

from dlcp.document import Document


def read_profile(path: Path) -> StepProfile:
    """Return a profile that `write_profile` has written or somebody has typed.

    Raises
    ------
    dlcp.document.DocumentError
        It cannot be read, or says something that no profile says; the message names the line.
    """
    document = Document(path)
    profile = document.convert(StepProfile)
    if not profile.layers:
        raise document.error("a profile needs at least one layer", ("layers",))
    return profile


def write_profile(profile: StepProfile, path: Path) -> None:
    """Write a profile as YAML."""
    path.write_text(
        "# SPDX-License-Identifier: Apache-2.0\n" + yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False),
        encoding="utf-8",
    )
