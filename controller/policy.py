# SPDX-License-Identifier: Apache-2.0
"""An operator's policy for queues and drop classes."""

from dataclasses import dataclass, field
from typing import Final

from dlcp.document import PlaceError
from dlcp.switch import QUEUES
from dlcp.wire import DROP_CLASSES, Queue

_DROP_AT: Final = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_EXCESS_AT: Final = (0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55)
_ECN_AT: Final = 0.27


class PolicyError(PlaceError):
    """A policy that contradicts itself; the message says how."""


@dataclass(frozen=True)
class Thresholds:
    """Queue fill levels above which packets are dropped or marked.

    Parameters
    ----------
    drop_at
        For drop classes 1 to 7, the fraction of the queue's depth above which the class is dropped. Class 7 is the
        least valuable and is dropped first. The defaults are evenly spaced, so that dropping one class relieves the
        queue before the next class is affected, and leave room above class 1 for class 0, which is never dropped.
    ecn_at
        Fraction of the queue's depth above which ECN-capable packets are marked. The default follows DCTCP's 65 packets
        in queues of 240.
    """

    drop_at: tuple[float, ...] = _DROP_AT
    ecn_at: float = _ECN_AT

    def __post_init__(self) -> None:
        """Refuse thresholds that would drop a more valuable class first."""
        if len(self.drop_at) != DROP_CLASSES - 1:
            raise PolicyError(f"drop_at has {len(self.drop_at)} values; it needs 7, for classes 1 to 7", "drop_at")
        if not all(0 <= share <= 1 for share in (*self.drop_at, self.ecn_at)):
            raise PolicyError("drop_at and ecn_at are fractions of a queue's depth and must be in 0..1")
        for drop_class in range(1, DROP_CLASSES - 1):
            if self.drop_at[drop_class] > self.drop_at[drop_class - 1]:
                raise PolicyError(
                    f"drop_at puts class {drop_class + 1} at {self.drop_at[drop_class]} and class {drop_class} at "
                    f"{self.drop_at[drop_class - 1]}: the more valuable class {drop_class} would be dropped first",
                    "drop_at",
                )

    def drop_above(self, drop_class: int, depth_packets: int) -> int:
        """Return the fill level in packets above which a class is dropped in a queue of ``depth_packets``."""
        return int(self.drop_at[drop_class - 1] * depth_packets)

    def mark_above(self, depth_packets: int) -> int:
        """Return the fill level in packets above which packets are marked in a queue of ``depth_packets``."""
        return int(self.ecn_at * depth_packets)


@dataclass(frozen=True)
class Remap:
    """Overrides the queue or drop class in which a host has tagged gradient packets.

    Control packets are not remapped. If several remaps match a packet, the first applies.

    Parameters
    ----------
    job, queue, drop_class
        Match packets of this job, with this queue or class in their header; None matches any. If the fabric names jobs,
        only their packets match.
    to_queue, to_drop_class
        The new queue and class; None keeps the one in the header.
    """

    job: int | None = None
    queue: int | None = None
    drop_class: int | None = None
    to_queue: int | None = None
    to_drop_class: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers out of range, and a remap that changes nothing."""
        if self.to_queue is None and self.to_drop_class is None:
            raise PolicyError("a remap without to_queue and to_drop_class changes nothing; give one of them")
        for name, limit in (("job", 1 << 16), *((name, 8) for name in ("queue", "drop_class"))):
            for field_name in (name, f"to_{name}"):
                value = getattr(self, field_name, None)
                if value is not None and not 0 <= value < limit:
                    raise PolicyError(f"{field_name} must be in 0..{limit - 1}, not {value}", field_name)


@dataclass(frozen=True)
class Policy(Thresholds):
    """The queue that packets take, and the fill levels above which they are dropped or marked.

    Parameters
    ----------
    drop_at, ecn_at
        As in :class:`Thresholds`, for the queues that ``by_queue`` does not name; ``drop_at`` not for queue 0.
    by_queue
        Thresholds of single queues. Queue 0 holds the packets beyond a job's share. It drops packets even if their
        message's drop budget is spent, so its default thresholds are higher: in the upper half of the queue, with some
        room above class 1 for class 0, which is never dropped. They are not tuned.
    remap
        Overrides of the tags' queue or drop class, in decreasing precedence.
    """

    by_queue: dict[int, Thresholds] = field(default_factory=dict)
    remap: tuple[Remap, ...] = ()

    def __post_init__(self) -> None:
        """Refuse queue numbers out of range."""
        super().__post_init__()
        for queue in self.by_queue:
            if not 0 <= queue < QUEUES:
                raise PolicyError(f"a queue must be in 0..{QUEUES - 1}, not {queue}", "by_queue", str(queue))

    def of_queue(self, queue: int) -> Thresholds:
        """Return the thresholds of a queue."""
        usual = Thresholds(_EXCESS_AT, self.ecn_at) if queue == Queue.EXCESS else self
        return self.by_queue.get(queue, usual)
