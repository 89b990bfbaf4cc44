# SPDX-License-Identifier: Apache-2.0
"""Whether the machine had time to spare: if not, figures of a testbed are the processors' and not the network's."""

from pathlib import Path
from typing import Final, NamedTuple

IDLE_MIN: Final = 0.1
"""With less of its time idle, a machine was the limit. Chosen by us: BMv2 cannot use all cores, so a switch that is too
slow leaves some idle; one that has to wait for a core does not."""
_STAT: Final = Path("/proc/stat")
_IDLE, _WAITING, _FIELDS = 3, 4, 8


class ProcessorTime(NamedTuple):
    """Time of all processors since the machine started, in the kernel's ticks: idle, and in all."""

    idle: int
    total: int

    @classmethod
    def now(cls, stat: Path = _STAT) -> "ProcessorTime":
        """Read it."""
        ticks = [int(word) for word in stat.read_text(encoding="ascii").splitlines()[0].split()[1 : 1 + _FIELDS]]
        return cls(ticks[_IDLE] + ticks[_WAITING], sum(ticks))

    def idle_share_since(self, before: "ProcessorTime") -> float:
        """Return the share of the time since then in which processors were idle; 1 if no time has passed."""
        passed = self.total - before.total
        return (self.idle - before.idle) / passed if passed > 0 else 1.0
