# SPDX-License-Identifier: Apache-2.0
"""The compiled switch, the one in plain Python, and one with objects: same packets, same times, same counters."""

import json
import random
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from dlcp.switch import (
    Action,
    GroupRef,
    MemberRef,
    PacketPort,
    PortQueueing,
    Program,
    Switch,
    SwitchProcess,
    forwarding,
)
from dlcp.wire import Header, PacketType
from tests.switch import leaf_traffic
from tests.switch.fake_program import FakePorts, FakeProgram, frame
from tests.switch.object_switch import ObjectSwitch
from tests.waiting import DEADLINE_S

JSON = Path(__file__).parents[2] / "p4" / "build" / "dlcp.json"
PORTS = tuple(range(1, leaf_traffic.PORTS + 1))
ETH_P_ALL = 3
QUEUEING = {
    1: PortQueueing(rate_bps=30_000_000, depth_packets=20),
    2: PortQueueing(rate_bps=9_000_000, depth_packets=(4, 8, 50, 50, 50, 50, 50, 8), delay_s=0.002),
    3: PortQueueing(rate_bps=50_000_000, loss=0.1, seed=3),
    4: PortQueueing(rate_bps=20_000_000, limit_packets=40),
    5: PortQueueing(rate_bps=12_000_000, limit_bytes=30_000),
    6: PortQueueing(),
}


class Clock:
    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


class Rig:
    """A switch over fake ports under a clock that the test moves."""

    def __init__(self, backend, queueing=QUEUEING, kind=Switch):
        if backend == "numba":
            pytest.importorskip("numba")
        self.program = Program.load(JSON, backend=backend)
        leaf_traffic.populate(self.program)
        self.clock, self.ports = Clock(), FakePorts(*PORTS)
        self.switch = kind(self.program, [self.ports], queueing, clock=self.clock)

    def advance(self, us):
        self.clock.now_ns += us * 1000
        self.switch.turn(0)

    def sent(self):
        sent, self.ports.sent = self.ports.sent, []
        return sent

    def counted(self):
        snapshot = self.switch.snapshot()
        return {name: snapshot[name] for name in ("ports", "no_port", "late_max_s")}


@pytest.fixture
def rigs():
    made = [Rig("python", kind=ObjectSwitch), Rig("python"), Rig("numba")]
    yield made
    for rig in made:
        rig.switch.close()


def alike(rigs):
    objects, *others = rigs
    for rig in others:
        assert rig.counted() == objects.counted()
        for name, values in objects.program.snapshot().counters.items():
            assert np.array_equal(rig.program.counters[name].values(), values), name
        for name, values in objects.program.snapshot().registers.items():
            assert np.array_equal(rig.program.registers[name].values(), values), name


def test_batches_do_what_single_packets_do(rigs):
    """Valid and malformed packets into ports of every kind, in bursts, with the loop coming late at times."""
    rng = random.Random(7)
    packets = leaf_traffic.packets(3000, 5)
    sent = 0
    while packets:
        count = rng.choice((0, 1, 1, 2, 7, 30))
        burst, packets = packets[:count], packets[count:]
        pause_us = rng.choice((0, 1, 50, 300, 2000))
        ports = [rng.choice(PORTS) for _ in burst]
        for rig in rigs:
            for port, packet in zip(ports, burst, strict=True):
                rig.ports.come_in(port, [bytearray(packet)])
            rig.advance(pause_us)
        one, *others = (rig.sent() for rig in rigs)
        assert others == [one, one]
        sent += len(one)
    alike(rigs)
    snapshot = rigs[0].counted()
    assert sent > 500
    for counted in ("lost", "lost_arriving", "ingress_drops"):
        assert any(port[counted] for port in snapshot["ports"]), counted
    assert any(queue["tail_drops"] for port in snapshot["ports"] for queue in port["queues"])


def test_changes_of_entries_and_queues_are_seen_by_the_next_batch(rigs):
    packets = leaf_traffic.packets(600, 8)
    for number, packet in enumerate(packets):
        for rig in rigs:
            if number == 200:
                rig.program.tables["ipv4_route"].modify({"ipv4_dst": (0x0A000001, 32)}, MemberRef(6))
                rig.program.tables["drop_threshold"].delete({"queue": 2, "drop_class": 7})
                rig.switch.queues[3].configure(PortQueueing(rate_bps=1_000_000, depth_packets=3))
            if number == 400:
                rig.program.tables["ipv4_route"].delete({"ipv4_dst": (0x0A010000, 16)})
                rig.program.tables["ecn_threshold"].insert({"queue": 5}, Action("mark_above", {"depth": 0}))
                rig.program.profiles["route_selector"].modify_group(2, [2])
            rig.ports.come_in(1 + number % 6, [bytearray(packet)])
            rig.advance(40)
        one, *others = (rig.sent() for rig in rigs)
        assert others == [one, one]
    alike(rigs)


def test_another_program_goes_on_counting(rigs):
    packets = leaf_traffic.packets(300, 9)
    for rig in rigs:
        for start in range(0, len(packets), 25):
            rig.ports.come_in(1, [bytearray(packet) for packet in packets[start : start + 25]])
            rig.advance(100)
    before = rigs[0].counted()
    for rig in rigs:
        rig.switch.replace(Program.load(JSON, backend=rig.program.backend))
    one, *others = (rig.sent() for rig in rigs)
    assert others == [one, one]
    after, *others = (rig.counted() for rig in rigs)
    assert others == [after, after]
    waited = [queue["depth"] for port in before["ports"] for queue in port["queues"]]
    dropped = [
        now["egress_drops"] - then["egress_drops"]
        for ports in zip(after["ports"], before["ports"], strict=True)
        for now, then in zip(ports[0]["queues"], ports[1]["queues"], strict=True)
    ]
    assert dropped == waited
    assert sum(waited) > 0
    rigs[2].switch.replace(FakeProgram())
    assert rigs[2].counted() == after


def test_room_grows_with_what_waits():
    pytest.importorskip("numba")
    rig = Rig("numba", {port: PortQueueing(rate_bps=1_000, depth_packets=3000) for port in PORTS})
    rig.program.tables["drop_threshold"].clear()
    data = bytearray(frame(1, size=9000))
    data[5] = 1
    for _ in range(20):
        rig.ports.come_in(1, [bytearray(data) for _ in range(200)])
        rig.advance(1)
    two = rig.counted()["ports"][0]
    assert sum(queue["depth"] for queue in two["queues"]) == 3000 > forwarding.SLOTS
    assert sum(queue["tail_drops"] for queue in two["queues"]) == 1000 - 1
    rig.clock.now_ns += 10**18
    rig.switch.turn(0)
    assert len({packet for _, packet in rig.sent()}) == 1
    rig.switch.close()


@pytest.fixture
def network(namespaces):
    pytest.importorskip("numba")
    with namespaces.StarNetwork(3) as star:
        yield star


def test_interfaces_carry_their_rate_and_no_more_whatever_the_queues(network):
    """Two hosts overload the third's port with every queue: no frame is early, and the line is never idle."""
    rate_bps, size, sent = 8_000_000, 1000, 1200
    program = Program.load(JSON, backend="numba")
    profile = program.profiles["route_selector"]
    profile.add_member(3, Action("to_next_hop", {"port": 3, "mac": 0x020000000103}))
    profile.add_group(3, [3])
    program.tables["ipv4_route"].insert({"ipv4_dst": (0x0A000003, 32)}, GroupRef(3))
    for port in (1, 2):
        program.tables["port_trust"].insert({"ig_port": port}, Action("trust"))
    ports = network.switch.call(lambda: [PacketPort(host.port, host.switch_interface) for host in network.hosts])
    switch = Switch(program, ports, {3: PortQueueing(rate_bps=rate_bps, depth_packets=20)})
    receiver = network.hosts[2].namespace.call(lambda: PacketPort(3, "eth0"))
    senders = [host.namespace.call(lambda: raw_socket("eth0")) for host in network.hosts[:2]]
    rows, lengths = np.zeros((256, 1514), np.uint8), np.zeros(256, np.int64)
    stamps, arrived = np.zeros(256, np.int64), []
    data = [dlcp_frame(number % 8, size, 1 + number % 2, number) for number in range(sent)]
    with switch.running():
        began_ns = time.time_ns()
        for number, packet in enumerate(data):
            senders[number % 2].send(packet)
        deadline = time.monotonic() + DEADLINE_S
        expected = None
        while expected is None or len(arrived) < expected:
            taken = receiver.take(rows, np.arange(256), lengths, stamps)
            arrived += zip(stamps[:taken].tolist(), lengths[:taken].tolist(), strict=True)
            assert time.monotonic() < deadline, f"{len(arrived)} of {expected} frames"
            three = switch.snapshot()["ports"][2]
            ended = sum(q["transmitted"] + q["tail_drops"] for q in three["queues"])
            ended += sum(port["ingress_drops"] for port in switch.snapshot()["ports"])
            expected = sum(q["transmitted"] for q in three["queues"]) if ended == sent else None
            time.sleep(0.001)  # the switch is to work meanwhile; the frames are taken as they come
    for sock in senders:
        sock.close()
    receiver.close()
    switch.close()
    assert len(arrived) == expected
    assert sum(q["tail_drops"] for q in three["queues"]) > 100, "the port was not overloaded"
    assert sum(q["transmitted"] > 0 for q in three["queues"]) == 8
    carried = 0
    for stamp_ns, length in arrived:
        carried += length
        assert stamp_ns - began_ns >= carried * 8_000_000_000 // rate_bps


@pytest.mark.parametrize("backend", ["python", "numba"])
def test_command_line_chooses_the_back_end(network, backend, tmp_path):
    entries = {"entries": [{"table": "ethernet_route", "match": {"ethernet_dst": "02:00:00:00:00:02"}}]}
    entries["entries"][0] |= {"action": "to_port", "params": {"port": 2}}
    path = tmp_path / "entries.json"
    path.write_text(json.dumps(entries))
    ports = [f"--port={host.port}=packet:{host.switch_interface}" for host in network.hosts]
    # What is chosen for interfaces by itself is the compiled back end.
    chosen = ["--backend", "python"] if backend == "python" else []
    data = bytes.fromhex("020000000002020000000001") + b"\x88\xb5" + bytes(range(100))
    with (
        SwitchProcess([*ports, "--entries", str(path), *chosen], namespace=network.switch) as process,
        network.hosts[1].namespace.call(lambda: raw_socket("eth0", ETH_P_ALL)) as inside,
        network.hosts[0].namespace.call(lambda: raw_socket("eth0")) as outside,
    ):
        inside.settimeout(10)
        outside.send(data)
        assert inside.recv(2000) == data
        snapshot = process.stop()
    assert snapshot["program"]["backend"] == backend
    assert [port["received"] for port in snapshot["ports"]] == [1, 0, 0]
    assert [port["sent"] for port in snapshot["ports"]] == [0, 1, 0]


def raw_socket(interface, protocol=0):
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.bind((interface, protocol))
    return sock


def dlcp_frame(queue, size, source, index):
    """Return a gradient packet of never dropped class to host 3."""
    packet = frame(3, size=size - 42, source=source)
    packet[42:74] = Header(PacketType.DATA, 0, queue, 0, 0, 9, 0, 1, 1, source, index, 1 << 20, 7).encode()
    return packet
