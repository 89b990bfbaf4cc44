# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from dlcp.switch import PortQueueing
from dlcp.switch.queues import NEVER_NS
from tests.switch.object_switch import ObjectQueues


def drain(queues, now_ns):
    """Take everything that departs by now; returns (packet, queue, start, enq_depth, deq_depth)."""
    out = []
    while departure := queues.dequeue(now_ns):
        queues.transmit(departure.packet, departure.queue)
        out.append((departure.packet, departure.queue, departure.start_ns, departure.enq_depth, departure.deq_depth))
    return out


def test_rate_is_exact_however_late_the_caller_comes():
    rate_bps = 7_000_000  # does not divide 8e9 * size: fractions of nanoseconds must not be lost
    rng = random.Random(1)
    queues = ObjectQueues(PortQueueing(rate_bps=rate_bps, depth_packets=100_000))
    sizes = [rng.randrange(60, 1500) for _ in range(5000)]
    for size in sizes:
        assert queues.enqueue(bytearray(size), None, 3, 1_000)
    now_ns, arrived = 1_000, 0
    while arrived < len(sizes):
        now_ns = queues.wake_ns() + rng.randrange(0, 5_000_000)
        drain(queues, now_ns)
        arrived += len(queues.arrivals(now_ns))
    # The line's clock is where the last bit left.
    assert queues.enqueue(bytearray(100), None, 3, 0)
    assert queues.wake_ns() - 1_000 == sum(sizes) * 8_000_000_000 // rate_bps
    assert queues.transmitted_bytes[3] == sum(sizes)


def test_idle_line_saves_nothing_up():
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000))  # 1 byte per microsecond
    queues.enqueue(bytearray(1000), None, 1, 0)
    drain(queues, 0)
    for _ in range(3):
        queues.enqueue(bytearray(1000), None, 1, 50_000_000)
    assert [start for _, _, start, _, _ in drain(queues, 60_000_000)] == [50_000_000, 51_000_000, 52_000_000]


def test_packet_to_a_busy_line_waits_for_it():
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000))
    queues.enqueue(bytearray(1000), None, 1, 0)
    drain(queues, 0)
    queues.enqueue(bytearray(1000), None, 1, 400_000)
    assert queues.dequeue(999_999) is None
    assert queues.wake_ns() == 1_000_000
    assert drain(queues, 1_000_000)[0][2] == 1_000_000


def test_most_urgent_queue_first_and_in_order_within():
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000))
    for number in range(24):
        queues.enqueue(bytearray([number]) * 100, None, number % 8, 0)
    order = [(queue, packet[0]) for packet, queue, *_ in drain(queues, NEVER_NS)]
    assert order == [(queue, round_ * 8 + queue) for queue in range(7, -1, -1) for round_ in range(3)]


def test_urgent_packet_overtakes_what_waits_but_not_what_is_being_sent():
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000))
    for _ in range(3):
        queues.enqueue(bytearray(1000), None, 0, 0)
    assert [queue for _, queue, *_ in drain(queues, 1_500_000)] == [0, 0]
    queues.enqueue(bytearray(1000), None, 7, 1_500_000)
    assert [(queue, start) for _, queue, start, *_ in drain(queues, 9_000_000)] == [(7, 2_000_000), (0, 3_000_000)]


def test_tail_drop_is_per_queue_and_counted():
    queues = ObjectQueues(PortQueueing(rate_bps=8, depth_packets=(1, 2, 3, 4, 5, 6, 7, 8)))
    for queue in range(8):
        accepted = [queues.enqueue(bytearray(10), None, queue, 0) for _ in range(10)]
        assert accepted == [True] * (queue + 1) + [False] * (9 - queue)
    assert queues.tail_drops == [9 - queue for queue in range(8)]
    assert queues.enqueued == [queue + 1 for queue in range(8)] == queues.max_depth


@pytest.mark.parametrize("limit", [{"limit_packets": 10}, {"limit_bytes": 1000}])
def test_shared_buffer_of_a_port(limit):
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000, **limit))
    for number in range(20):
        queues.enqueue(bytearray(100), None, number % 8, 0)
    assert sum(queues.enqueued) == 10
    assert sum(queues.tail_drops) == 10
    drain(queues, 150_000)  # two have left
    assert [queues.enqueue(bytearray(100), None, 7, 150_000) for _ in range(3)] == [True, True, False]


def test_depths_are_those_of_bmv2():
    # enq_qdepth is read before the push, deq_qdepth after the pop (simple_switch.cpp); other queues do not count.
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000))
    for _ in range(4):
        queues.enqueue(bytearray(100), None, 5, 0)
    queues.enqueue(bytearray(100), None, 6, 0)
    depths = [(queue, enq, deq) for _, queue, _, enq, deq in drain(queues, NEVER_NS)]
    assert depths == [(6, 0, 0), (5, 0, 3), (5, 1, 2), (5, 2, 1), (5, 3, 0)]


def test_carry_and_time_of_enqueueing_come_back():
    queues = ObjectQueues()
    carry = object()
    queues.enqueue(bytearray(b"x"), carry, 2, 77)
    departure = queues.dequeue(99)
    assert departure.carry is carry
    assert (departure.enqueued_ns, departure.start_ns) == (77, 77)


def test_last_bit_and_propagation_delay():
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000, delay_s=0.002))
    queues.enqueue(bytearray(1000), None, 1, 0)
    drain(queues, 0)
    assert queues.wake_ns() == 3_000_000
    assert queues.arrivals(2_999_999) == []
    assert queues.arrivals(3_000_000) == [bytearray(1000)]
    assert queues.wake_ns() == NEVER_NS


def test_egress_drop_uses_its_turn():
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000))
    for _ in range(2):
        queues.enqueue(bytearray(1000), None, 1, 0)
    queues.discard(queues.dequeue(0).packet, 1)
    assert queues.egress_drops[1] == 1
    assert queues.dequeue(999_999) is None
    assert queues.dequeue(1_000_000) is not None
    assert queues.arrivals(NEVER_NS) == []


def test_loss_is_random_seeded_and_counted():
    def survivors(seed):
        queues = ObjectQueues(PortQueueing(depth_packets=1, loss=0.3, seed=seed))
        arrived = []
        for number in range(1000):
            queues.enqueue(bytearray(number.to_bytes(2, "big")), None, 1, number)
            drain(queues, number)
            arrived += [int.from_bytes(packet, "big") for packet in queues.arrivals(number)]
        assert queues.lost == 1000 - len(arrived)
        return arrived

    assert survivors(1) == survivors(1) != survivors(2)
    assert 620 < len(survivors(1)) < 780


def test_reconfigured_depth_and_rate_hold_from_then_on():
    queues = ObjectQueues(PortQueueing(rate_bps=8_000_000, depth_packets=4))
    for _ in range(4):
        queues.enqueue(bytearray(1000), None, 1, 0)
    queues.configure(PortQueueing(rate_bps=16_000_000, depth_packets=2))
    assert not queues.enqueue(bytearray(1000), None, 1, 0)
    assert [start for *_, start, _, _ in drain(queues, NEVER_NS)] == [0, 500_000, 1_000_000, 1_500_000]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rate_bps": -1}, "rate_bps is -1"),
        ({"depth_packets": (1, 2)}, "2 numbers"),
        ({"depth_packets": -4}, "depth_packets is -4"),
        ({"loss": 1.5}, "loss is 1.5"),
        ({"delay_s": -1.0}, "delay_s is -1"),
        ({"limit_bytes": -1}, "limit_bytes is -1"),
    ],
)
def test_impossible_ports_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        PortQueueing(**wrong)
