# SPDX-License-Identifier: Apache-2.0
"""What results depend on besides their setting: the simulator itself, and the switch program."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import dlcp
from dlcp.switch import PROGRAM_PATH

_SIMULATOR: Final = Path(__file__).resolve().parent
_DLCP: Final = Path(dlcp.__file__).resolve().parent
_INDIFFERENT: Final = ("report/", "experiments/", "sweep.py", "sources.py")
"""Parts of the simulator that only start runs, show their results, or say what is to be run."""
_SHARED: Final = ("tags.py", "wire/__init__.py", "wire/header.py")
"""What packets and their tags are, which DLCP itself says."""


@cache
def sources_digest() -> str:
    """Return a hash of everything whose change may change a run's numbers: the same on every machine."""
    found = hashlib.sha256()
    own = (path.relative_to(_SIMULATOR).as_posix() for path in _SIMULATOR.rglob("*") if path.suffix in (".py", ".yaml"))
    for folder, names in ((_SIMULATOR, sorted(own)), (_DLCP, _SHARED)):
        for name in names:
            if folder is _DLCP or not name.startswith(_INDIFFERENT):
                found.update(f"{name}\0".encode() + (folder / name).read_bytes() + b"\0")
    found.update(PROGRAM_PATH.read_bytes())
    return found.hexdigest()[:16]
