# SPDX-License-Identifier: Apache-2.0
"""What results depend on besides their setting: the simulator itself, and the switch program."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from dlcp.switch.command import PROGRAM_PATH

_ROOT: Final = Path(__file__).resolve().parent.parent
_INDIFFERENT: Final = ("sim/report/", "sim/experiments/", "sim/bench.py", "sim/command.py", "sim/sweep.py")
"""Parts of the simulator that only start runs, show their results, or say what is to be run."""
_SHARED: Final = ("dlcp/tags.py", "dlcp/wire/__init__.py", "dlcp/wire/header.py")
"""What packets and their tags are, which DLCP itself says."""


@cache
def sources_digest() -> str:
    """Return a hash of everything whose change may change a run's numbers: the same on every machine."""
    found = hashlib.sha256()
    own = (path for path in (_ROOT / "sim").rglob("*") if path.suffix in (".py", ".yaml"))
    names = sorted([path.relative_to(_ROOT).as_posix() for path in own] + list(_SHARED))
    for name in names:
        if not name.startswith(_INDIFFERENT):
            found.update(f"{name}\0".encode() + (_ROOT / name).read_bytes() + b"\0")
    found.update(PROGRAM_PATH.read_bytes())
    return found.hexdigest()[:16]
