# SPDX-License-Identifier: Apache-2.0
"""The traffic managers over lists and arrays against those with objects, and what no port may ever do."""

import itertools
import random

import numpy as np
import pytest

from dlcp.switch import PortQueueing, queues
from dlcp.switch.queues import NEVER_NS
from tests.switch.object_switch import ObjectQueues

SLOTS = 400


class ListPort:
    """One port over lists with the interface of `ObjectQueues`, as far as it is needed here."""

    table = list

    def __init__(self, queueing):
        self.port = self.table(queues.new_port(1, queueing))
        self.slots = self.table([[0] * queues.SLOT_CELLS for _ in range(SLOTS)])
        self.out = self.table([0] * SLOTS)
        self.free = list(range(SLOTS))
        self.packets = {}
        self.columns = queues.PortQueues(self.port, queueing)

    def enqueue(self, packet, queue, now_ns):
        slot = self.free.pop()
        self.slots[slot][queues.LENGTH] = len(packet)
        if not queues.enqueue(self.port, self.slots, slot, queue, now_ns):
            self.free.append(slot)
            return False
        self.packets[slot] = packet
        return True

    def dequeue(self, now_ns):
        if not self.port[queues.BUSY] or self.port[queues.FREE_NS] > now_ns:
            return None
        slot = queues.dequeue(self.port, self.slots)
        self.leaving = slot
        queue, enqueued_ns, depth = (
            int(self.slots[slot][column]) for column in (queues.QUEUE, queues.ENQUEUED_NS, queues.ENQ_DEPTH)
        )
        left_behind = int(self.port[queues.WAITING + queue])
        return self.packets[slot], queue, int(self.port[queues.FREE_NS]), enqueued_ns, depth, left_behind

    def transmit(self):
        if not queues.transmit(self.port, self.slots, self.leaving):
            self._forget(self.leaving)

    def discard(self):
        queues.discard(self.port, self.slots, self.leaving)
        self._forget(self.leaving)

    def arrivals(self, now_ns):
        queues.hand_over(self.port, self.slots, self.out, now_ns)
        arrived = [int(slot) for slot in self.out[: self.port[queues.OUT]]]
        self.port[queues.OUT] = 0
        return [self._forget(slot) for slot in arrived]

    def wake_ns(self):
        return queues.wake_ns(self.port, self.slots)

    def loses_arriving(self):
        if not self.port[queues.LOSS] or not queues.loses(self.port):
            return False
        self.port[queues.LOST_ARRIVING] += 1
        return True

    def _forget(self, slot):
        self.free.append(slot)
        return self.packets.pop(slot)


class ArrayPort(ListPort):
    table = np.array


QUEUEING = {
    "no rate": PortQueueing(depth_packets=5),
    "rate": PortQueueing(rate_bps=7_000_000, depth_packets=(1, 2, 3, 4, 5, 6, 7, 8)),
    "delay": PortQueueing(rate_bps=50_000_000, delay_s=0.0004, depth_packets=12),
    "shared packets": PortQueueing(rate_bps=30_000_000, limit_packets=9),
    "shared bytes": PortQueueing(rate_bps=30_000_000, limit_bytes=5000),
    "loss": PortQueueing(rate_bps=30_000_000, loss=0.2, seed=4),
}


@pytest.mark.parametrize("kind", [ListPort, ArrayPort])
@pytest.mark.parametrize("name", QUEUEING)
def test_tables_do_what_objects_do(name, kind):
    rng = random.Random(name)
    queueing = QUEUEING[name]
    plain, arrays = ObjectQueues(queueing), kind(queueing)
    now_ns = 0
    for number in range(4000):
        now_ns += rng.choice((0, 1, 7_000, 150_000, 600_000))
        if number == 2000:
            queueing = PortQueueing(rate_bps=9_000_000, depth_packets=6, delay_s=queueing.delay_s, loss=queueing.loss)
            plain.configure(queueing)
            arrays.columns.configure(queueing)
        while departure := plain.dequeue(now_ns):
            packet, _, queue, start_ns, enqueued_ns, enq_depth, deq_depth = departure
            assert arrays.dequeue(now_ns) == (packet, queue, start_ns, enqueued_ns, enq_depth, deq_depth)
            if rng.random() < 0.1:
                plain.discard(packet, queue)
                arrays.discard()
            else:
                plain.transmit(packet, queue)
                arrays.transmit()
        assert arrays.dequeue(now_ns) is None
        assert arrays.arrivals(now_ns) == plain.arrivals(now_ns)
        assert arrays.loses_arriving() == plain.loses_arriving()
        packet = bytearray(number.to_bytes(4, "big")) + bytes(rng.randrange(10, 1500))
        queue = rng.randrange(8)
        assert arrays.enqueue(packet, queue, now_ns) == plain.enqueue(packet, None, queue, now_ns)
        assert arrays.wake_ns() == plain.wake_ns()
    for counted in ("enqueued", "transmitted", "transmitted_bytes", "tail_drops", "egress_drops", "max_depth"):
        assert getattr(arrays.columns, counted) == getattr(plain, counted), counted
    assert (arrays.columns.lost, arrays.columns.lost_arriving) == (plain.lost, plain.lost_arriving)
    assert arrays.columns.depths == plain.depths
    assert sum(plain.egress_drops) > 0 < sum(plain.transmitted)
    assert sum(plain.tail_drops) > 0, "the queues never filled"
    assert plain.lost > 0 or not queueing.loss


MIXES = {
    "one queue": (3,),
    "two queues": (1, 6),
    "all queues": tuple(range(8)),
    "mostly urgent": (7, 7, 7, 7, 0),
}


@pytest.mark.parametrize("kind", [ObjectQueues, ListPort, ArrayPort])
@pytest.mark.parametrize("mix", MIXES)
def test_a_port_never_carries_more_than_its_rate(kind, mix):
    """Within any span of time at most rate x span and one frame leave, however many queues are busy."""
    rate_bps = 20_000_000
    queueing = PortQueueing(rate_bps=rate_bps, depth_packets=30)
    rng = random.Random(mix)
    port = kind(queueing)
    left = []
    now_ns = 0
    while now_ns < 300_000_000:
        now_ns = min(now_ns + rng.randrange(100_000), max(port.wake_ns(), now_ns)) if rng.random() < 0.5 else now_ns + 1
        while departure := port.dequeue(now_ns):
            packet, start_ns = departure[0], departure.start_ns if kind is ObjectQueues else departure[2]
            left.append((start_ns, len(packet)))
            if kind is ObjectQueues:
                port.transmit(packet, departure.queue)
            else:
                port.transmit()
        port.arrivals(now_ns)
        for _ in range(rng.choice((0, 0, 1, 12))):  # three times the rate on average
            packet, queue = bytearray(rng.randrange(60, 1500)), rng.choice(MIXES[mix])
            port.enqueue(packet, None, queue, now_ns) if kind is ObjectQueues else port.enqueue(packet, queue, now_ns)
    assert len(left) > 300
    for (start_ns, size), (next_ns, _) in itertools.pairwise(left):
        assert next_ns - start_ns >= size * 8_000_000_000 // rate_bps
    span_s = (left[-1][0] - left[0][0]) * 1e-9
    carried_bps = 8 * sum(size for _, size in left[:-1]) / span_s
    assert 0.9 * rate_bps < carried_bps <= rate_bps * 1.000001
    assert port.wake_ns() < NEVER_NS
