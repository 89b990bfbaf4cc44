# SPDX-License-Identifier: Apache-2.0
"""What a switch has counted, and how deep its queues are, read over P4Runtime."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import Final

import numpy as np
from dlcp.controller.session import ControlError, Session
from finsy import GRPCStatusCode
from finsy.proto import p4r

from dlcp.switch import EVENT_COUNTERS, QUEUES, EgressEvent, EventCount, IngressEvent, decode_events, event_index
from dlcp.wire import DROP_CLASSES

COUNTERS: Final[dict[str, type[IntEnum]]] = {"ingress_events": IngressEvent, "egress_events": EgressEvent}
"""The program's counters and what they count."""
_PORTS_ASKED_SINGLY: Final = 32
"""Up to so many ports, only their counters are asked for; beyond, all. Chosen by us: half of what there are."""


@dataclass(frozen=True)
class Readings:
    """What one switch told.

    Parameters
    ----------
    events
        All events that have happened at all.
    depths
        Packets in each queue when its last packet left, by port and queue; None if the switch cannot tell.
    """

    events: tuple[EventCount, ...]
    depths: dict[tuple[int, int], int] | None

    def packets(self, *events: str, port: int | None = None) -> int:
        """Return how many packets these events concern, at one port or at all."""
        return sum(
            count.packets for count in self.events if count.event in events and (port is None or count.port == port)
        )


async def read(session: Session, ports: Iterable[int]) -> Readings:
    """Read the counters and the queue depths of the ports that are in use.

    Raises
    ------
    ControlError
        The switch does not answer, or does not run the program.
    """
    used = sorted(ports)
    events: list[EventCount] = []
    for name, kinds in COUNTERS.items():
        events += await _events(session, name, kinds, used)
    return Readings(tuple(events), await _depths(session, used))


async def _events(session: Session, name: str, kinds: type[IntEnum], ports: list[int]) -> list[EventCount]:
    counter_id = session.pipeline.counters[name].preamble.id
    if len(ports) > _PORTS_ASKED_SINGLY:
        asked = [p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=counter_id))]
    else:
        indices = [
            event_index(port, queue, drop_class, event)
            for port, queue, drop_class, event in product(ports, range(QUEUES), range(DROP_CLASSES), kinds)
        ]
        asked = [
            p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=counter_id, index=p4r.Index(index=index)))
            for index in indices
        ]
    packets, octets = np.zeros((2, EVENT_COUNTERS), np.int64)
    for entity in await session.read(asked):
        entry = entity.counter_entry
        packets[entry.index.index] = entry.data.packet_count
        octets[entry.index.index] = entry.data.byte_count
    return decode_events(kinds, packets, octets)


async def _depths(session: Session, ports: list[int]) -> dict[tuple[int, int], int] | None:
    """Return the depths; BMv2 does not answer for registers."""
    register_id = session.pipeline.registers["queue_depth"].preamble.id
    places = {port * QUEUES + queue: (port, queue) for port, queue in product(ports, range(QUEUES))}
    asked = [
        p4r.Entity(register_entry=p4r.RegisterEntry(register_id=register_id, index=p4r.Index(index=index)))
        for index in places
    ]
    try:
        found = await session.read(asked)
    except ControlError as error:
        if error.code == GRPCStatusCode.UNIMPLEMENTED:
            return None
        raise
    return {
        places[entity.register_entry.index.index]: int.from_bytes(entity.register_entry.data.bitstring, "big")
        for entity in found
    }
