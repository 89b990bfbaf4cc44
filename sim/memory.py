# SPDX-License-Identifier: Apache-2.0
"""How much memory a process may still take."""

from pathlib import Path
from typing import Final

_CGROUPS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Limit and usage of a container's memory, in versions 2 and 1 of control groups."""


def available_bytes() -> int:
    """Return the memory that can still be taken without swapping, also within a container's limit."""
    about = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(about["MemAvailable"].split()[0]) * 1024
    for limit, used in _CGROUPS:
        try:
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):
            continue  # there is no such group, or no limit ("max")
    return max(0, free)
