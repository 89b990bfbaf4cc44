# SPDX-License-Identifier: Apache-2.0
import json
import random
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dlcp.switch import (
    EVENT_COUNTERS,
    EgressEvent,
    IngressEvent,
    LoopbackHost,
    LoopbackPorts,
    PortQueueing,
    Switch,
    decode_events,
    event_index,
    event_totals,
)
from dlcp.switch.event_counters import CLASS_BITS, EVENT_BITS, PORT_BITS, QUEUE_BITS
from tests.switch.fake_program import FakePorts, FakeProgram, frame

MBIT = PortQueueing(rate_bps=8_000_000, depth_packets=50)  # a frame of 1000 bytes takes 1 ms


class Clock:
    def __init__(self):
        self.now_ns = 10**12  # the switch counts from its own start

    def __call__(self):
        return self.now_ns


@pytest.fixture
def rig():
    """A switch over fake ports 1 and 2 under a clock that the test moves."""
    clock, ports, program = Clock(), FakePorts(1, 2), FakeProgram()
    switch = Switch(program, [ports], {1: MBIT, 2: MBIT}, clock=clock)

    def advance(us):
        clock.now_ns += us * 1000
        switch.turn(0)

    yield SimpleNamespace(switch=switch, ports=ports, program=program, advance=advance)
    switch.close()


def test_packets_leave_at_the_rate_of_their_port(rig):
    ports, advance = rig.ports, rig.advance
    ports.come_in(1, [frame(2) for _ in range(10)])
    advance(0)
    sent_by_ms = []
    for _ in range(11):
        advance(1000)
        sent_by_ms.append(len(ports.sent))
    assert sent_by_ms == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]


def test_late_loop_loses_no_rate(rig):
    ports, advance = rig.ports, rig.advance
    ports.come_in(1, [frame(2) for _ in range(20)])
    advance(0)
    advance(7500)
    assert len(ports.sent) == 7
    advance(500)
    assert len(ports.sent) == 8


def test_urgent_queue_overtakes(rig):
    ports, advance = rig.ports, rig.advance
    ports.come_in(1, [frame(2, queue=1) for _ in range(3)] + [frame(2, queue=6) for _ in range(3)])
    for _ in range(9):
        advance(1000)
    assert [packet[15] >> 5 for _, packet in ports.sent] == [6, 6, 6, 1, 1, 1]


def test_egress_is_told_what_bmv2_tells(rig):
    ports, advance = rig.ports, rig.advance
    advance(5)
    ports.come_in(1, [frame(2) for _ in range(3)])
    advance(0)
    for _ in range(4):
        advance(1000)
    carries, *_ = zip(*rig.program.seen, strict=True)
    assert set(carries) == {("carry", 1, 5)}
    assert [record[1:] for record in rig.program.seen] == [
        (2, 5, 0, 0, 2, 5),
        (2, 5, 1000, 1, 1, 1005),
        (2, 5, 2000, 2, 0, 2005),
    ]


def test_tail_drops_and_everything_else_add_up(rig):
    ports, advance = rig.ports, rig.advance
    rig.program.drop_in_egress = lambda packet: packet[15] >> 5 == 3
    ports.come_in(1, [frame(2, queue=number % 4) for number in range(400)])
    ports.come_in(2, [bytearray(60)] * 5 + [frame(9)] * 4)
    for _ in range(1000):
        advance(1000)
    snapshot = rig.switch.snapshot()
    queues = {queue["queue"]: queue for queue in snapshot["ports"][1]["queues"]}
    assert json.loads(json.dumps(snapshot)) == snapshot
    for queue in range(4):
        counters = queues[queue]
        assert counters["enqueued"] + counters["tail_drops"] == 100
        assert counters["enqueued"] == counters["transmitted"] + counters["egress_drops"]
        assert counters["tail_drops"] > 0
        assert counters["transmitted_bytes"] == 1000 * counters["transmitted"]
    assert queues[3]["transmitted"] == 0 < queues[3]["egress_drops"]
    assert len(ports.sent) == sum(counters["transmitted"] for counters in queues.values())
    assert snapshot["ports"][1]["ingress_drops"] == 5
    assert snapshot["no_port"] == 4


def test_line_that_fails_loses_both_ways():
    clock, ports = Clock(), FakePorts(1, 2)
    switch = Switch(FakeProgram(), [ports], {1: PortQueueing(loss=0.2, seed=3, depth_packets=2000)}, clock=clock)
    ports.come_in(1, [frame(2) for _ in range(1000)])
    ports.come_in(2, [frame(1) for _ in range(1000)])
    for _ in range(80):
        clock.now_ns += 1000
        switch.turn(0)
    one, two = switch.snapshot()["ports"]
    assert 120 < one["lost"] < 280
    assert 120 < one["lost_arriving"] < 280
    assert two["lost"] == two["lost_arriving"] == 0
    assert len(ports.sent) == 2000 - one["lost"] - one["lost_arriving"]
    switch.close()


def test_runs_until_stopped_and_writes_its_counters(tmp_path):
    ports = FakePorts(1, 2)
    switch = Switch(FakeProgram(), [ports])
    path = tmp_path / "counters.json"
    thread = threading.Thread(target=switch.run, args=(path, 0.01))
    thread.start()
    ports.come_in(1, [frame(2)])
    while not path.exists() or not json.loads(path.read_text())["ports"][1]["queues"][1]["transmitted"]:
        pass  # every reading is a whole document
    switch.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert list(tmp_path.iterdir()) == [path]
    switch.close()


def test_loopback_hosts_talk_through_the_switch_and_see_its_marks():
    hosts = [LoopbackHost.numbered(index) for index in range(2)]
    udp_port = 41697
    program = FakeProgram(mark_depth=0)
    ports = LoopbackPorts(hosts, (udp_port,))
    switch = Switch(program, [ports], {2: PortQueueing(rate_bps=200_000_000)})
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as two,
        switch.running(),
    ):
        for host, sock in zip(hosts, (one, two), strict=True):
            sock.bind((host.real, udp_port))
            sock.settimeout(10)
            sock.setsockopt(socket.IPPROTO_IP, 13, 1)  # IP_RECVTOS
        one.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 2 << 5 | 2)  # ECT(0)
        for number in range(20):
            one.sendto(bytes([number]) * 1400, (hosts[1].alias, udp_port))
        answers = [two.recvmsg(2000, 64) for _ in range(20)]
        two.sendto(b"back", answers[0][3])
        assert one.recvfrom(100) == (b"back", (hosts[1].alias, udp_port))
    switch.close()
    assert [data for data, *_ in answers] == [bytes([number]) * 1400 for number in range(20)]
    assert {sender for *_, sender in answers} == {(hosts[0].alias, udp_port)}
    assert {ancillary[0][2][0] & ~3 for _, ancillary, *_ in answers} == {2 << 5}
    # The program marks what leaves packets behind in its queue, and the mark is seen by the receiver.
    marks = [ancillary[0][2][0] & 3 == 3 for _, ancillary, *_ in answers]
    assert marks == [record[5] > 0 for record in program.seen[:20]]


@pytest.mark.parametrize(
    ("groups", "queueing", "says"),
    [
        ([(1, 2), (2, 3)], {}, "port 2 is given twice"),
        ([(1,)], {7: PortQueueing()}, "port 7, but the ports are"),
        ([(511,)], {}, "port 511 is outside"),
    ],
)
def test_impossible_switches_are_refused(groups, queueing, says):
    fakes = [FakePorts(*group) for group in groups]
    with pytest.raises(ValueError, match=says):
        Switch(FakeProgram(), fakes, queueing)
    for fake in fakes:
        fake.close()


def test_event_numbers_are_those_of_the_program():
    text = (Path(__file__).parents[2] / "p4/shared/constants.p4").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"EVENT_([A-Z_]+) = (\d+);", text)}
    assert numbers == {event.name: event.value for event in (*IngressEvent, *EgressEvent)}
    widths = {name: int(value) for name, value in re.findall(r"#define (\w+)_WIDTH (\d+)", text)}
    assert (widths["PORT_INDEX"], widths["QUEUE"], widths["EVENT_INDEX"]) == (
        PORT_BITS,
        QUEUE_BITS,
        PORT_BITS + QUEUE_BITS + CLASS_BITS + EVENT_BITS,
    )


def test_events_are_decoded_into_names():
    packets, octets = np.zeros(EVENT_COUNTERS, np.int64), np.zeros(EVENT_COUNTERS, np.int64)
    rng = random.Random(5)
    expected = {}
    for _ in range(50):
        place = (rng.randrange(64), rng.randrange(8), rng.randrange(8), rng.choice(list(IngressEvent)))
        expected[place] = rng.randrange(1, 1000)
        packets[event_index(*place)] = expected[place]
        octets[event_index(*place)] = 3 * expected[place]
    events = decode_events(IngressEvent, packets, octets)
    assert {(e.port, e.queue, e.drop_class, IngressEvent[e.event]): e.packets for e in events} == expected
    assert all(e.bytes == 3 * e.packets for e in events)
    assert sum(event_totals(events).values()) == sum(expected.values())
