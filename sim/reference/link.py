# SPDX-License-Identifier: Apache-2.0
"""One direction of a link."""

from typing import TYPE_CHECKING

from dlcp.sim import counters as c
from dlcp.sim.arithmetic import MASK64, RATE_SHIFT, draw
from dlcp.sim.plan import LinkNumbers
from dlcp.sim.reference.parts import Kind, Packet

if TYPE_CHECKING:
    from dlcp.sim.reference.engine import ReferenceEngine


class Link:
    """Carries one packet after the other, and delivers each after a delay, unless it is lost."""

    def __init__(self, engine: "ReferenceEngine", number: int, numbers: LinkNumbers) -> None:
        self.engine, self.number, self.numbers = engine, number, numbers
        self.busy_ps = 0
        self.loss = numbers.loss
        self.sent_bytes = 0
        self._random = numbers.random & MASK64

    def draw(self) -> int:
        """Return 31 random bits."""
        self._random, value = draw(self._random)
        return value

    def send(self, packet: Packet) -> None:
        """Send a packet; the link has to be free."""
        engine = self.engine
        self.busy_ps = engine.now_ps + (packet.size * self.numbers.kibibyte_ps >> RATE_SHIFT)
        self.sent_bytes += packet.size
        engine.tally[c.HOPS_DATA if packet.kind is Kind.DATA else c.HOPS_CONTROL] += 1
        if self.loss and self.draw() < self.loss:
            engine.tally[c.DROPS_LINK] += 1
            engine.drop(packet)
        else:
            engine.at(self.busy_ps + self.numbers.delay_ps, lambda: engine.arrive(self.numbers.target, packet))
