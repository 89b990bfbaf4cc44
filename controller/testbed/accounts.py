# SPDX-License-Identifier: Apache-2.0
"""What was counted: by the switch program, by the queues of the built-in switch, by the kernels of the hosts."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from dlcp.controller.testbed.errors import TestbedError
from dlcp.controller.testbed.layout import HOST_INTERFACE, HostPlan
from dlcp.controller.testbed.namespaces import NamedNamespace

from dlcp.switch.counters import EventCount

SETTLE_S: Final = 0.4
"""How long nothing may have been counted for everything to count as having arrived: longer than a full port takes to
drain (64 packets of 1514 bytes in eight queues, 0.2 s at 32 Mbit/s)."""
SETTLE_DEADLINE_S: Final = 15.0


class Place(NamedTuple):
    """Where an event of the switch program happened."""

    event: str
    port: int
    queue: int
    drop_class: int


class NicCount(NamedTuple):
    """What a host's interface has sent and received."""

    sent: int
    received: int
    received_bytes: int


@dataclass(frozen=True)
class SwitchAccount:
    """What one switch has counted, in packets.

    Parameters
    ----------
    events
        Packets by event of the program and place.
    octets
        The same in bytes.
    tail_drops
        Packets that found their queue full, by port and queue; None if the switch does not count them.
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
        """Return what was counted after ``before`` was taken; all of it, if the switch was started again since."""
        if any(count > self.events[place] for place, count in before.events.items()):
            return self
        tails = self.tail_drops
        if tails is not None and before.tail_drops is not None:
            tails = tails - before.tail_drops
        return SwitchAccount(self.events - before.events, self.octets - before.octets, tails)

    def count(self, event: str, *, ports: Iterable[int] | None = None, queues: Iterable[int] | None = None) -> int:
        """Return the packets of an event at these ports and queues; all ports or queues if none are given."""
        wanted_ports = None if ports is None else set(ports)
        wanted_queues = None if queues is None else set(queues)
        return sum(
            packets
            for place, packets in self.events.items()
            if place.event == event
            and (wanted_ports is None or place.port in wanted_ports)
            and (wanted_queues is None or place.queue in wanted_queues)
        )

    def tails(self, *, ports: Iterable[int] | None = None, queues: Iterable[int] | None = None) -> int | None:
        """Return the packets that found these queues full; None if the switch does not count them."""
        if self.tail_drops is None:
            return None
        wanted_ports = None if ports is None else set(ports)
        wanted_queues = None if queues is None else set(queues)
        return sum(
            packets
            for (port, queue), packets in self.tail_drops.items()
            if (wanted_ports is None or port in wanted_ports) and (wanted_queues is None or queue in wanted_queues)
        )


def nic_counts(host: HostPlan) -> NicCount:
    """Return what the kernel has counted at a host's interface."""
    # /proc/net is that of the process; a thread in another namespace has its own.
    text = NamedNamespace(host.namespace).call(lambda: Path("/proc/thread-self/net/dev").read_text(encoding="ascii"))
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == HOST_INTERFACE:
            values = [int(number) for number in numbers.split()]
            return NicCount(sent=values[9], received=values[1], received_bytes=values[0])
    raise TestbedError(f"host {host.name} has no interface {HOST_INTERFACE}")


def tail_drops(counters: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    """Return the packets that found a queue full, by port and queue, from the built-in switch's own counters."""
    return {
        (port["port"], queue["queue"]): queue["tail_drops"]
        for port in counters["ports"]
        for queue in port["queues"]
        if queue["tail_drops"]
    }


def settle(hosts: Iterable[HostPlan]) -> dict[str, NicCount]:
    """Wait until hosts receive nothing more, and return what they have counted then, by name.

    Raises
    ------
    TestbedError
        Something goes on sending.
    """
    deadline_s = time.monotonic() + SETTLE_DEADLINE_S
    chosen = list(hosts)
    before = {host.name: nic_counts(host) for host in chosen}
    while time.monotonic() < deadline_s:
        time.sleep(SETTLE_S)
        now = {host.name: nic_counts(host) for host in chosen}
        if now == before:
            return now
        before = now
    raise TestbedError(f"hosts still receive packets {SETTLE_DEADLINE_S:.0f} s after the run")
