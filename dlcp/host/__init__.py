# SPDX-License-Identifier: Apache-2.0
"""The machine at hand: processes, network interfaces, emulated networks, clean-up at the end, and timelines."""

import platform
from pathlib import Path


def processor() -> str:
    """Return the name of the processor, from /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    from importlib import metadata  # takes as long to load as all else here

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
