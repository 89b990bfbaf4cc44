# SPDX-License-Identifier: Apache-2.0
"""Names and layout of the program's event counters, and sums of their counts.

A test compares the numbers with p4/shared/constants.p4.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

PORT_BITS: Final = 6
QUEUE_BITS: Final = 3
CLASS_BITS: Final = 3
EVENT_BITS: Final = 3
EVENT_COUNTERS: Final = 1 << (PORT_BITS + QUEUE_BITS + CLASS_BITS + EVENT_BITS)
"""Size of either counter array."""


class IngressEvent(IntEnum):
    """Events of the ``ingress_events`` counter."""

    NO_ROUTE = 0
    REFUSED = 1
    """A packet that a router must not forward: wrong version, options, wrong checksum or expired TTL."""
    UNTRUSTED = 2
    """Tags cleared."""
    OVER_SHARE = 3
    """Moved to the excess queue."""
    POLICY_DROP = 4
    BUDGET_SPENT = 5
    """Forwarded: the message has spent its drop budget at this switch."""
    SLOT_TAKEN = 6
    """Forwarded: another live message holds the budget slot."""
    TRIMMED = 7
    """Cut to its headers instead of dropped, and moved to the queue of control packets."""


class EgressEvent(IntEnum):
    """Events of the ``egress_events`` counter."""

    FORWARDED = 0
    MARKED = 1
    """ECN set to congestion experienced."""


class EventCount(NamedTuple):
    """Count of one event at one (port, queue, drop class); before routing the port is the ingress port."""

    event: str
    port: int
    queue: int
    drop_class: int
    packets: int
    bytes: int


def event_index(port: int, queue: int, drop_class: int, event: int) -> int:
    """Return the index of an event in its counter array: ``EVENT_INDEX`` of constants.p4."""
    return ((port << QUEUE_BITS | queue) << CLASS_BITS | drop_class) << EVENT_BITS | event


def decode_events(events: type[IntEnum], packets: ArrayLike, octets: ArrayLike) -> list[EventCount]:
    """Decode an event counter array into named counts.

    Parameters
    ----------
    events
        ``IngressEvent`` or ``EgressEvent``.
    packets, octets
        The array's packets and bytes, shape (EVENT_COUNTERS,).

    Returns
    -------
    One record for each nonzero index, ordered by port, queue, class and event.
    """
    counted: NDArray[np.int64] = np.asarray(packets, np.int64)
    sizes: NDArray[np.int64] = np.asarray(octets, np.int64)
    names = {int(event): event.name for event in events}
    found = []
    for index in map(int, np.flatnonzero(counted)):
        event = index & (1 << EVENT_BITS) - 1
        place = index >> EVENT_BITS
        found.append(
            EventCount(
                names.get(event, f"EVENT_{event}"),
                place >> CLASS_BITS + QUEUE_BITS,
                place >> CLASS_BITS & (1 << QUEUE_BITS) - 1,
                place & (1 << CLASS_BITS) - 1,
                int(counted[index]),
                int(sizes[index]),
            )
        )
    return found


def event_totals(events: Sequence[EventCount]) -> dict[str, int]:
    """Return packets by event, over all ports, queues and classes."""
    total: Counter[str] = Counter()
    for event in events:
        total[event.event] += event.packets
    return dict(total)


class Place(NamedTuple):
    """An event of the switch program, and where it happened."""

    event: str
    port: int
    queue: int
    drop_class: int


@dataclass(frozen=True)
class SwitchAccount:
    """The counters of one switch, in packets.

    Parameters
    ----------
    events
        Packets by event of the program and place.
    octets
        The same in bytes.
    tail_drops
        Packets dropped at a full queue, by port and queue; None if the switch does not count them.
    """

    events: Counter[Place]
    octets: Counter[Place] = field(default_factory=Counter)
    tail_drops: Counter[tuple[int, int]] | None = None

    @classmethod
    def of(cls, events: Iterable[EventCount], tail_drops: Mapping[tuple[int, int], int] | None) -> "SwitchAccount":
        """Return the account of decoded events."""
        packets: Counter[Place] = Counter()
        octets: Counter[Place] = Counter()
        for event in events:
            place = Place(event.event, event.port, event.queue, event.drop_class)
            packets[place] += event.packets
            octets[place] += event.bytes
        return cls(packets, octets, None if tail_drops is None else Counter(tail_drops))

    def since(self, before: "SwitchAccount") -> "SwitchAccount":
        """Return the counts since ``before``; all of them, if the switch has restarted since."""
        if any(count > self.events[place] for place, count in before.events.items()):
            return self
        tails = self.tail_drops
        if tails is not None and before.tail_drops is not None:
            tails = tails - before.tail_drops
        return SwitchAccount(self.events - before.events, self.octets - before.octets, tails)

    def count(self, event: str, *, ports: Collection[int] | None = None, queues: Collection[int] | None = None) -> int:
        """Return the packets of an event at these ports and queues; at all ports or queues if None."""
        return sum(
            packets
            for place, packets in self.events.items()
            if place.event == event
            and (ports is None or place.port in ports)
            and (queues is None or place.queue in queues)
        )

    def tails(self, *, ports: Collection[int] | None = None, queues: Collection[int] | None = None) -> int | None:
        """Return the tail drops of these queues; None if the switch does not count them."""
        if self.tail_drops is None:
            return None
        return sum(
            packets
            for (port, queue), packets in self.tail_drops.items()
            if (ports is None or port in ports) and (queues is None or queue in queues)
        )
