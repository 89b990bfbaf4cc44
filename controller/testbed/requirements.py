# SPDX-License-Identifier: Apache-2.0
"""Check a testbed's requirements, name the packages that provide missing ones, and load Mininet.

Debian installs Mininet for the system's Python only. It is pure Python that imports only the standard library, so it is
loaded directly from its folder: adding the parent folder to ``sys.path`` would expose all other system packages.
"""

import importlib
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dlcp.controller.fabric import SwitchKind
from dlcp.controller.testbed import TestbedError

MININET_FOLDERS: Final = (Path("/usr/lib/python3/dist-packages/mininet"), Path("/usr/local/lib/python3/mininet"))
"""Mininet's Python package, as installed by Debian's or Ubuntu's package, or by Mininet's own installer."""
_PROGRAMS: Final = {
    "ip": "Debian's package iproute2",
    "tc": "Debian's package iproute2",
    "mnexec": "Debian's package mininet",
    "ifconfig": "Debian's package net-tools",
}
_BMV2: Final = "p4lang's package p4lang-bmv2 (https://build.opensuse.org/package/show/home:p4lang/p4lang-bmv2)"


_CAPABILITIES: Final = {"NET_ADMIN": 12, "NET_RAW": 13, "SYS_ADMIN": 21}
"""Numbers of the capabilities that root needs, which a container may lack (linux/capability.h)."""
_BMV2_CAPABILITIES: Final = {"SYS_PTRACE": 19}
"""Without it, Docker's seccomp profile refuses pidfd_getfd, by which the keeper shrinks BMv2's send buffers."""


def mininet_folder() -> Path | None:
    """Return the folder of Mininet's Python package; None if it is not installed."""
    found = importlib.util.find_spec("mininet")
    places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    return next((place for place in (*places, *MININET_FOLDERS) if (place / "net.py").exists()), None)


def missing(switch: SwitchKind) -> list[str]:
    """Return the missing requirements of a testbed with this kind of switch, each with the package that provides it."""
    if sys.platform != "linux":
        return [f"Linux: {sys.platform} has no network namespaces"]
    needed = _CAPABILITIES | (_BMV2_CAPABILITIES if switch == "bmv2" else {})
    lacking = [
        f"CAP_{name}: start the container with --privileged, or --cap-add {name}" for name in _not_permitted(needed)
    ]
    if os.geteuid() != 0:
        lacking = ["root: it creates network namespaces and opens packet sockets"]
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


def _not_permitted(needed: Mapping[str, int]) -> list[str]:
    """Return those of the needed capabilities that this process does not have."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    effective = int(status.partition("CapEff:")[2].split(maxsplit=1)[0], 16)
    return [name for name, number in needed.items() if not effective >> number & 1]


def load_mininet(module: str) -> Any:
    """Return a module of Mininet, such as ``net`` or ``node``.

    Raises
    ------
    TestbedError
        Mininet is not installed.
    """
    if "mininet" not in sys.modules:
        _load_package()
    loggers = logging.getLoggerClass()
    try:
        return importlib.import_module(f"mininet.{module}")
    finally:
        logging.setLoggerClass(loggers)  # Mininet sets its own for the whole process, whose loggers end no lines


def mininet_network() -> Any:
    """Return an empty ``mininet.net.Mininet`` without controllers.

    By default, Mininet raises the machine's limits (buffers, file handles, neighbour tables) for networks of hundreds
    of nodes, and does not restore them. A testbed is small, so the limits are left unchanged.
    """
    mininet = load_mininet("net").Mininet
    mininet.inited = True
    return mininet(controller=None, waitConnected=False, autoSetMacs=False)


def _load_package() -> None:
    folder = mininet_folder()
    if folder is None:
        raise TestbedError("Mininet's Python package is missing: install Debian's package mininet")
    if sys.version_info >= (3, 12):
        importlib.import_module("setuptools")  # provides distutils, which Mininet 2.3 imports
    spec = importlib.util.spec_from_file_location(
        "mininet", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["mininet"] = package
    spec.loader.exec_module(package)
