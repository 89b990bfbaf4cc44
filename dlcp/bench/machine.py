# SPDX-License-Identifier: Apache-2.0
"""The machine that a benchmark ran on, as far as it bears on the figures."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from dlcp import __version__, native

_LIMITS = {
    "rmem_max_bytes": "net/core/rmem_max",
    "wmem_max_bytes": "net/core/wmem_max",
    "tcp_congestion_control": "net/ipv4/tcp_congestion_control",
}
_LOAD_BEFORE = round(os.getloadavg()[0], 2)
"""Of the last minute before this program measured anything: what others do at the same time."""


def describe() -> dict[str, Any]:
    """Return processor, kernel, versions, network buffers, whether the compiled library is in use, and the load."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "dlcp": __version__,
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "native": native.library() is not None,
        **{name: _kernel_setting(path) for name, path in _LIMITS.items()},
        "load_before": _LOAD_BEFORE,
    }


def processor() -> str:
    """Return the name of the processor, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel_setting(path: str) -> int | str | None:
    """Return what a file below /proc/sys holds; None where there is no such file."""
    try:
        text = Path("/proc/sys", path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else text
