# SPDX-License-Identifier: Apache-2.0
"""A flood from one host cannot starve the others: the entries of a fabric, the program, and a port's queues, in virtual
time. The port carries 1,000 frames a second; an honest host sends 500, and a flood four times what the port carries.
"""

from collections import Counter
from dataclasses import replace

import pytest

from dlcp.controller.entries import entries
from dlcp.controller.fabric import Job, star
from dlcp.switch import (
    PROGRAM_PATH,
    IngressEvent,
    PortQueueing,
    Program,
    apply_entries,
    decode_events,
    event_totals,
)
from dlcp.wire import Flag, PacketType
from tests.controller.traffic_of_a_host import frame
from tests.switch.object_switch import ObjectQueues

FRAME_BYTES = 1000
RATE_PPS, HONEST_PPS, FLOOD_PPS = 1000, 500, 4000
HONEST, FLOODING, RECEIVER = 1, 2, 3
SECONDS = 1
PADDING = bytes(FRAME_BYTES - len(frame(1, 3, payload=b"")))


@pytest.fixture(scope="module")
def program():
    return Program.load(PROGRAM_PATH)


def fabric(*, trusted=True, jobs=()):
    queueing = PortQueueing(rate_bps=RATE_PPS * FRAME_BYTES * 8, depth_packets=32)
    plain = star(3, queueing=queueing, jobs=jobs)
    hosts = (plain.hosts[0], replace(plain.hosts[1], trusted=trusted), plain.hosts[2])
    return replace(plain, hosts=hosts, mtu_bytes=1500)


def share_delivered(program, described, honest, flood):
    """Run the flood next to the honest traffic, and return which part of each arrives, and the events counted."""
    apply_entries(entries(described, "switch"), program)
    for counter in program.counters.values():
        counter.reset()
    queues = ObjectQueues(described.queueing)
    sent, arrived = Counter(), Counter()
    due = sorted(
        [(int(k * 1e9 / HONEST_PPS), HONEST, k) for k in range(HONEST_PPS * SECONDS)]
        + [(int(k * 1e9 / FLOOD_PPS) + 7, FLOODING, k) for k in range(FLOOD_PPS * SECONDS)]
    )
    for now_ns, port, number in due:
        serve(program, queues, now_ns)
        packet = bytearray(honest(number) if port == HONEST else flood(number))
        sent[port] += 1
        out, queue, carry = program.ingress(packet, port, now_ns // 1000)
        if out == RECEIVER:
            queues.enqueue(packet, (port, carry), queue, now_ns)
        for delivered in queues.arrivals(now_ns):
            arrived[sender_of(delivered)] += 1
    serve(program, queues, end := (SECONDS + 1) * 10**9)
    for delivered in queues.arrivals(end):
        arrived[sender_of(delivered)] += 1
    counted = program.counters["ingress_events"].values()
    events = event_totals(decode_events(IngressEvent, counted[:, 0], counted[:, 1]))
    return arrived[HONEST] / sent[HONEST], arrived[FLOODING] / sent[FLOODING], events


def serve(program, queues, now_ns):
    while departure := queues.dequeue(now_ns):
        _, carry = departure.carry
        waited_us = (departure.start_ns - departure.enqueued_ns) // 1000
        enqueued_us = departure.enqueued_ns // 1000
        depths = departure.enq_depth, departure.deq_depth
        program.egress(departure.packet, carry, RECEIVER, enqueued_us, waited_us, *depths, departure.start_ns // 1000)
        queues.transmit(departure.packet, departure.queue)


def sender_of(packet):
    return packet[29]  # the last octet of the source address


def gradients(number):
    return frame(HONEST, RECEIVER, queue=4, drop_class=3, index=number, payload=PADDING)


def plain_udp(number):
    packet = bytearray(frame(HONEST, RECEIVER, index=number, payload=PADDING))
    packet[36:38] = (9).to_bytes(2, "big")  # to another UDP port: ordinary traffic
    return packet


def flood_of(**tags):
    return lambda number: frame(FLOODING, RECEIVER, index=number, payload=PADDING, **{"job": 2, **tags})


FORGED = {
    "queue 7": {"queue": 7},
    "protected": {"queue": 6, "flags": Flag.PROTECTED},
    "control": {"queue": 7, "kind": PacketType.STOP},
    "retransmission": {"queue": 7, "flags": Flag.RETRANSMISSION, "drop_class": 7},
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_flood_from_an_untrusted_port_costs_nobody_a_gradient(program, forged):
    honest, flood, events = share_delivered(program, fabric(trusted=False), gradients, flood_of(**FORGED[forged]))
    assert honest == 1
    assert 0.1 < flood < 0.14, "what the port has left: half of its rate, an eighth of the flood, and a queue full"
    assert events["UNTRUSTED"] == FLOOD_PPS * SECONDS


def test_the_same_flood_from_a_trusted_port_would_starve_the_others(program):
    """So it is trust that the test above shows, and nothing else."""
    honest, _, events = share_delivered(program, fabric(), gradients, flood_of(queue=7))
    assert honest < 0.1
    assert "UNTRUSTED" not in events


@pytest.mark.parametrize("honest_traffic", [gradients, plain_udp])
@pytest.mark.parametrize("forged", FORGED)
def test_a_job_over_its_share_starves_neither_another_job_nor_ordinary_traffic(program, forged, honest_traffic):
    jobs = (Job(1, share=0.5, control_share=0.05), Job(2, share=0.3, control_share=0.05))
    honest, flood, events = share_delivered(program, fabric(jobs=jobs), honest_traffic, flood_of(**FORGED[forged]))
    assert honest == 1
    assert events["OVER_SHARE"] > 0.8 * FLOOD_PPS * SECONDS
    assert 0.1 < flood < 0.14


def test_without_a_share_the_same_job_would_starve_them(program):
    honest, _, events = share_delivered(program, fabric(), plain_udp, flood_of(queue=6, flags=Flag.PROTECTED))
    assert honest < 0.1
    assert "OVER_SHARE" not in events


@pytest.mark.parametrize("forged", FORGED)
def test_a_job_that_the_fabric_does_not_name_starves_nobody(program, forged):
    """It has no share, and so no limit; where jobs are named it comes after all others instead."""
    described = fabric(jobs=(Job(1, share=0.5, control_share=0.05),))
    honest, flood, _ = share_delivered(program, described, gradients, flood_of(job=99, **FORGED[forged]))
    assert honest == 1
    assert 0.1 < flood < 0.14
