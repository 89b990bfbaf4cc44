# SPDX-License-Identifier: Apache-2.0
"""What a testbed needs on the machine, and which package brings what is missing."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Final, Literal

SwitchKind = Literal["builtin", "bmv2"]

MININET_FOLDERS: Final = (Path("/usr/lib/python3/dist-packages/mininet"), Path("/usr/local/lib/python3/mininet"))
"""Where Debian's and Ubuntu's package, or Mininet's own installer, put its Python package."""
_PROGRAMS: Final = {
    "ip": "Debian's package iproute2",
    "tc": "Debian's package iproute2",
    "mnexec": "Debian's package mininet",
    "ifconfig": "Debian's package net-tools",
}
_BMV2: Final = "p4lang's package p4lang-bmv2 (https://build.opensuse.org/package/show/home:p4lang/p4lang-bmv2)"


def mininet_folder() -> Path | None:
    """Return the folder of Mininet's Python package, None if there is none."""
    found = importlib.util.find_spec("mininet")
    places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    return next((place for place in (*places, *MININET_FOLDERS) if (place / "net.py").exists()), None)


def missing(switch: SwitchKind) -> list[str]:
    """Return what a testbed with this kind of switch lacks here, each with what brings it; empty if nothing."""
    if sys.platform != "linux":
        return [f"Linux: network namespaces are not a thing of {sys.platform}"]
    lacking = [] if os.geteuid() == 0 else ["root: it makes network namespaces and opens packet sockets"]
    lacking += [f"`{name}`: {source}" for name, source in _PROGRAMS.items() if shutil.which(name) is None]
    if mininet_folder() is None:
        lacking.append("Mininet's Python package: Debian's package mininet")
    elif sys.version_info >= (3, 12) and importlib.util.find_spec("distutils") is None:
        lacking.append("distutils, which Mininet 2.3 imports: pip install setuptools")
    if switch == "bmv2" and shutil.which("simple_switch_grpc") is None:
        lacking.append(f"`simple_switch_grpc`: {_BMV2}")
    if importlib.util.find_spec("finsy") is None:
        lacking.append("finsy, the P4Runtime client: pip install dlcp[fabric]")
    return lacking
