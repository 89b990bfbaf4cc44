# SPDX-License-Identifier: Apache-2.0
"""The limits of all numbers that users give: what the engines' integers can hold.

Both engines count picoseconds in 64 bits and packets in 32, so a larger number would silently wrap around. The types
below state the limits of fields in files; `dlcp.inputs.document` checks them, and names the field and the limit. Values
that follow from several fields, such as the time of a layer on a slow worker, are checked where they are computed.
"""

from pathlib import Path
from typing import Annotated, Final

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from dlcp.sim.arithmetic import PS_PER_S

FOREVER_PS: Final = 1 << 62
"""A time that never comes. The sum of two moments before it still fits in 64 bits."""
TIME_MAX_PS: Final = 1 << 61
"""The longest duration, and the latest end of a run: the sum of the two is before `FOREVER_PS`."""
SECONDS_MAX: Final = TIME_MAX_PS // PS_PER_S
"""27 days."""
TIMER_MAX_PS: Final = TIME_MAX_PS >> 12
"""Longest timer before it backs off: both it and its probes double it up to six times. It is nine minutes."""
TIMER_US_MAX: Final = 1e8
"""Longest time of a transport's setting in microseconds, below `TIMER_MAX_PS`."""
RATE_MIN_GBPS: Final = 0.004
"""Slowest link: the time for 1,024 bytes is stored in picoseconds in 32 bits
(`dlcp.sim.arithmetic.RATE_SHIFT`)."""
RATE_MAX_GBPS: Final = 10_000.0
"""Fastest link: times are whole picoseconds, and those of a kibibyte are then exact to 1 in 800."""
PACKETS_PER_MESSAGE_MAX: Final = (1 << 31) - 1
"""Most packets of a message: engines number them in 32 bits."""
PACKETS_WAITING_MAX: Final = 1 << 30
"""Most packets that one graph has for a packet engine, which keeps a byte for each: a gigabyte."""
SIZE_BYTES_MAX: Final = 1 << 44
"""Most bytes of a message or a model, 17.6 TB: in the largest packets, at most `PACKETS_PER_MESSAGE_MAX` of them."""
VALUES_MAX: Final = SIZE_BYTES_MAX // 4
"""Most values of a model in single precision."""
PACKETS_MAX: Final = 1 << 24
"""Most packets of a queue or a window: 25 GB of 1,500 bytes."""
PACKET_BYTES_MAX: Final = 9216
"""Largest packet: the jumbo frame that most switches take."""
HOSTS_MAX: Final = 1 << 16
"""Most hosts: the keys of streams have 16 bits for each."""
NODES_MAX: Final = 1 << 17
"""Most hosts and switches of a network: twice the hosts, more than any usual fabric has."""
LINKS_MAX: Final = 1 << 20
"""Most links: a fat tree of 65,536 hosts has a fifth of them."""
FACTOR_MAX: Final = 1e6
"""Largest factor on a duration or a size: from a microsecond to a second."""
FLOPS_MAX: Final = 1e30
"""Most operations per second; no machine reaches 1e20."""
STEPS_MAX: Final = 100_000
"""Most steps or repetitions of a job: the durations of all are kept."""
PIECES_MAX: Final = 100_000
"""Most pieces of a model's gradients: each is an all-reduce of its own in the graph of a step, with many messages."""
GRAPH_NODES_MAX: Final = 1 << 27
"""Most messages and computations of a graph: 13 GB of memory. A ring of 4,096 ranks has 2^25 of them."""
SEED_MAX: Final = (1 << 46) - 1
"""Largest seed: engines multiply it by 65,537 in 63 bits."""
MAGNITUDE_MAX: Final = 1e12
"""Largest value of a setting of another package, whose meaning is unknown here."""

_CGROUPS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Limit and usage of a container's memory, in versions 2 and 1 of control groups."""

Count = Annotated[int, Meta(ge=1, le=STEPS_MAX)]
Hosts = Annotated[int, Meta(ge=1, le=HOSTS_MAX)]
HostNumber = Annotated[int, Meta(ge=0, lt=HOSTS_MAX)]
Packets = Annotated[int, Meta(ge=1, le=PACKETS_MAX)]
Window = Annotated[float, Meta(ge=1, le=PACKETS_MAX)]
Bytes = Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]
BytesOrNone = Annotated[int, Meta(ge=0, le=SIZE_BYTES_MAX)]
"""Bytes, where 0 has a meaning of its own."""
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Moment = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
"""Seconds after the beginning."""
Microseconds = Annotated[float, Meta(gt=0, le=TIMER_US_MAX)]
MicrosecondsOrNone = Annotated[float, Meta(ge=0, le=TIMER_US_MAX)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
QueueNumber = Annotated[int, Meta(ge=0, le=7)]
Seed = Annotated[int, Meta(ge=0, le=SEED_MAX)]
Gain = Annotated[float, Meta(gt=0, le=1000)]
"""A coefficient of a congestion control or an optimizer; published ones are below 10."""


class SimulatorError(ValueError):
    """Something that a user can change; the message says what, and how."""


class LimitError(SimulatorError):
    """A number is beyond what an engine can hold; the message names it and the limit."""


def check_within(what: str, value: float, most: float, advice: str) -> None:
    """Raise `LimitError` if a number is negative, above a limit, or NaN.

    Parameters
    ----------
    what
        The quantity, and what it belongs to.
    advice
        What to change.
    """
    if not 0 <= value <= most:
        raise LimitError(f"{what} is {value:.6g}; at most {most:,} can be simulated: {advice}")


def check_packets(size_bytes: int, payload: int) -> None:
    """Raise `LimitError` if a message of ``size_bytes`` has too many packets of ``payload`` bytes."""
    what = f"the number of packets of a message of {size_bytes:,} bytes, {payload:,} in each,"
    check_within(what, -(-size_bytes // payload), PACKETS_PER_MESSAGE_MAX, "send less, or set a larger packet_bytes")


def picoseconds(seconds: ArrayLike) -> NDArray[np.int64]:
    """Convert seconds to whole picoseconds, int64 of the same shape.

    Raises
    ------
    LimitError
        A duration is negative, or longer than `SECONDS_MAX`.
    """
    times = np.asarray(seconds, float)
    if times.size:
        worst = times.max() if times.min() >= 0 else times.min()
        check_within("a duration in seconds", float(worst), SECONDS_MAX, "compute less, or on faster workers")
    whole: NDArray[np.int64] = np.rint(times * PS_PER_S).astype(np.int64)
    return whole


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
