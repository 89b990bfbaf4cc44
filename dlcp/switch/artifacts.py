# SPDX-License-Identifier: Apache-2.0
"""Where the compiled switch program lies: in ``dlcp/switch/p4`` once installed, in ``p4/build`` of a checkout."""

from pathlib import Path
from typing import Final

_INSTALLED: Final = Path(__file__).with_name("p4")
PROGRAM_FOLDER: Final = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "p4" / "build"
"""Holds ``dlcp.json`` and ``dlcp.p4info.txtpb``."""
PROGRAM_PATH: Final = PROGRAM_FOLDER / "dlcp.json"
"""The program as BMv2 and the built-in switch run it."""
