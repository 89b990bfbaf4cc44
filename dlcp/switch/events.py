# SPDX-License-Identifier: Apache-2.0
"""What the program's event counters mean; p4/shared/constants.p4 has the same numbers and a test compares the two."""

from collections import Counter
from collections.abc import Sequence
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
    """What ``ingress_events`` counts."""

    NO_ROUTE = 0
    REFUSED = 1
    """Not a packet a router may forward: version, options, checksum, TTL."""
    UNTRUSTED = 2
    """Tags cleared."""
    OVER_SHARE = 3
    """Moved to the excess queue."""
    POLICY_DROP = 4
    BUDGET_SPENT = 5
    """Forwarded: the message has no drop left at this switch."""
    SLOT_TAKEN = 6
    """Forwarded: another live message holds the budget slot."""


class EgressEvent(IntEnum):
    """What ``egress_events`` counts."""

    FORWARDED = 0
    MARKED = 1
    """ECN set to congestion experienced."""


class EventCount(NamedTuple):
    """How often one event happened at one (port, queue, drop class); the port is the egress port where it is known."""

    event: str
    port: int
    queue: int
    drop_class: int
    packets: int
    bytes: int


def event_index(port: int, queue: int, drop_class: int, event: int) -> int:
    """Return where an event stands in its counter array: ``EVENT_INDEX`` of constants.p4."""
    return ((port << QUEUE_BITS | queue) << CLASS_BITS | drop_class) << EVENT_BITS | event


def decode_events(events: type[IntEnum], packets: ArrayLike, octets: ArrayLike) -> list[EventCount]:
    """Name what an event counter array has counted.

    Parameters
    ----------
    events
        ``IngressEvent`` or ``EgressEvent``.
    packets, octets
        The array's packets and bytes, shape (EVENT_COUNTERS,).

    Returns
    -------
    One record for each index that is not zero, in the order of port, queue, class, event.
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
