# SPDX-License-Identifier: Apache-2.0
"""Mininet, wherever it is installed, without the rest of the system's Python packages.

Debian installs Mininet for the system's Python only. It is plain Python that imports nothing but the standard library,
so it is loaded from there by itself: adding that folder to the path would let every other package of the system in.
"""

import importlib
import importlib.util
import logging
import sys
from typing import Any

from dlcp.controller.testbed.errors import TestbedError
from dlcp.controller.testbed.requirements import mininet_folder


def load(module: str) -> Any:
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
        logging.setLoggerClass(loggers)  # Mininet's, which it sets for all of the process, end no lines


def network() -> Any:
    """Return an empty ``mininet.net.Mininet`` without controllers.

    Mininet would raise the machine's own limits (buffers, file handles, neighbour tables) for networks of hundreds of
    nodes, and leave them so. Ours is small, and the machine stays as it is.
    """
    mininet = load("net").Mininet
    mininet.inited = True
    return mininet(controller=None, waitConnected=False, autoSetMacs=False)


def _load_package() -> None:
    folder = mininet_folder()
    if folder is None:
        raise TestbedError("Mininet's Python package is missing: install Debian's package mininet")
    if sys.version_info >= (3, 12):
        importlib.import_module("setuptools")  # brings distutils, which Mininet 2.3 compares versions with
    spec = importlib.util.spec_from_file_location(
        "mininet", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["mininet"] = package
    spec.loader.exec_module(package)
