# SPDX-License-Identifier: Apache-2.0
import random
import select
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from dlcp.switch import PacketPort, PortQueueing, Switch
from tests.switch.fake_program import FakeProgram, frame
from tests.waiting import until

ETH_P_ALL = 3


@pytest.fixture
def network(namespaces):
    with namespaces.StarNetwork(2) as star:
        yield star


@pytest.fixture
def ports(network):
    opened = network.switch.call(lambda: [PacketPort(host.port, host.switch_interface) for host in network.hosts])
    yield opened
    for port in opened:
        port.close()


def raw_socket(host):
    def make():
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        sock.bind(("eth0", ETH_P_ALL))
        sock.settimeout(5)
        return sock

    return host.namespace.call(make)


def fetch(port, count):
    found = []
    while len(found) < count and select.select(port.filenos(), [], [], 0.3)[0]:
        found += port.receive(port.filenos()[0], 64).packets
    return found


def test_frames_are_carried_as_they_are(network, ports):
    with raw_socket(network.hosts[0]) as outside:
        for size in (60, 1000, 1514):
            sent = random.Random(size).randbytes(size)
            outside.send(sent)
            assert fetch(ports[0], 1) == [bytearray(sent)]
            ports[0].send(1, [bytearray(sent[::-1])])
            assert outside.recv(2000) == sent[::-1]
    counters = ports[0].counters[1]
    assert (counters.received, counters.received_bytes, counters.sent, counters.sent_bytes) == (3, 2574, 3, 2574)


@pytest.mark.parametrize("tag", [b"\x81\x00\xe0\x07", b"\x88\xa8\x00\x07", b"\x81\x00\x00\x07\x81\x00\x00\x08"])
def test_tags_stay_in_frames(network, ports, tag):
    longest = 1518 if tag.startswith(b"\x81\x00") else 1514  # Linux leaves room for an 802.1Q tag
    for size in (60, longest):
        tagged = random.Random(size).randbytes(12) + tag + b"\x08\x06"
        tagged += bytes(size - len(tagged))
        with raw_socket(network.hosts[0]) as outside:
            outside.send(tagged)
            assert fetch(ports[0], 1) == [bytearray(tagged)]
            ports[0].send(1, [bytearray(tagged)])
            assert outside.recv(2000)[12:] in (tagged[12:], tagged[16:])  # the kernel keeps a tag apart
    assert ports[0].counters[1].sent == 2


def test_oversize_frames_are_counted_and_kept_out(network, ports):
    plain = bytes(frame(2))
    ports[0].send(1, [bytearray(1600), bytearray(plain)])
    assert (ports[0].counters[1].oversize, ports[0].counters[1].sent) == (1, 1)


def test_bursts_that_a_host_leaves_to_the_interface_are_dropped_with_one_warning(namespaces, caplog):
    with namespaces.StarNetwork(1) as network:
        (host,) = network.hosts
        network.switch.link(host.switch_interface + "b", host.namespace, "eth1", offloads=True)
        port = network.switch.call(lambda: PacketPort(1, host.switch_interface + "b"))
        host.namespace.run(["ip", "address", "add", "10.9.0.1/24", "dev", "eth1"])
        host.namespace.run(["ip", "link", "set", "eth1", "up"])
        host.namespace.run(["ip", "neigh", "add", "10.9.0.2", "lladdr", "02:00:00:00:00:02", "dev", "eth1"])
        with host.namespace.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
            sock.setsockopt(17, 103, 1000)  # UDP_SEGMENT
            for _ in range(2):
                sock.sendto(bytes(40_000), ("10.9.0.2", 5000))
                fetch(port, 1)
        assert port.counters[1].oversize == 2
        (warning,) = [record.getMessage() for record in caplog.records]
        assert f"ethtool --offload {port.interface} tx off tx-udp-segmentation off gso off gro off" in warning
        port.close()


def test_segmented_sends_of_a_host_come_as_single_frames_with_checksums(network, ports):
    """A host's kernel must not leave segmentation or checksums to a link that has no hardware."""
    with network.hosts[0].namespace.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.setsockopt(17, 103, 1000)  # UDP_SEGMENT
        sock.sendto(bytes(range(250)) * 40, ("10.0.0.2", 5000))
    packets = fetch(ports[0], 10)
    assert [len(packet) for packet in packets] == [1042] * 10
    for packet in packets:
        pseudo = packet[26:34] + b"\0\x11" + packet[38:40]
        total = sum(
            int.from_bytes(data[i : i + 2], "big") for data in (pseudo, packet[34:]) for i in range(0, len(data), 2)
        )
        assert total % 0xFFFF == 0


def test_interface_that_goes_away_is_counted(network, ports):
    network.switch.run(["ip", "link", "del", ports[0].interface])
    ports[0].send(1, [frame(2)])
    assert fetch(ports[0], 1) == []
    counters = ports[0].counters[1]
    assert counters.sent == 0
    assert counters.unreachable + counters.send_errors == 1
    assert counters.receive_errors <= 1
    assert not select.select(ports[0].filenos(), [], [], 0)[0], "the loop would spin"
    ports[0].refresh()


def test_garbage_ends_in_counters(network, ports):
    rng = random.Random(11)
    switch = Switch(FakeProgram(), ports)
    sent = 10_000
    with raw_socket(network.hosts[0]) as outside, switch.running():
        good = bytes(frame(2, size=40))
        for number in range(sent):
            junk = bytearray(rng.randbytes(rng.randrange(15, 1514))) if number % 2 else bytearray(good)
            for _ in range(rng.randrange(4)):
                junk[rng.randrange(len(junk))] = rng.randrange(256)
            outside.send(junk)
        until(lambda: came_in(switch.snapshot()["ports"][0]) == sent)
    # Host 2 answers some of it (ICMP), so the sums are over both ports.
    snapshot = switch.snapshot()
    ended = snapshot["no_port"]
    for port in snapshot["ports"]:
        ended += port["ingress_drops"] + sum(queue["transmitted"] + queue["tail_drops"] for queue in port["queues"])
    assert ended == sum(port["received"] for port in snapshot["ports"])
    assert snapshot["ports"][1]["sent"] > sent / 10
    switch.close()


def came_in(port):
    return sum(port[name] for name in ("received", "refused", "malformed", "oversize", "overrun"))


def test_tcp_crosses_the_switch_at_the_rate_of_the_port(network, ports):
    """Real TCP, both ways at once, over a bottleneck; every byte arrives and the bottleneck's queue is what drops."""
    rate_bps, size = 40_000_000, 2_000_000
    switch = Switch(FakeProgram(), ports, {2: PortQueueing(rate_bps=rate_bps, depth_packets=32)})
    payload = random.Random(2).randbytes(size)
    received = bytearray()
    with ExitStack() as stack:
        stack.enter_context(switch.running())
        server = stack.enter_context(network.hosts[1].namespace.call(socket.socket))
        client = stack.enter_context(network.hosts[0].namespace.call(socket.socket))
        server.bind(("10.0.0.2", 5001))
        server.listen()
        client.settimeout(30)
        client.connect(("10.0.0.2", 5001))
        accepted = stack.enter_context(server.accept()[0])
        accepted.settimeout(30)
        started = time.monotonic()
        sender = threading.Thread(target=client.sendall, args=(payload,))
        sender.start()
        while len(received) < size:
            received += accepted.recv(1 << 16)
        elapsed_s = time.monotonic() - started
        accepted.sendall(b"done")
        assert client.recv(4) == b"done"
        sender.join()
    assert bytes(received) == payload
    two = switch.snapshot()["ports"][1]["queues"][0]
    # The line's own clock bounds the rate from above whatever the machine's load; headers cost 4 %.
    assert elapsed_s > 0.95 * (two["transmitted_bytes"] - 64 * 1514) * 8 / rate_bps
    assert two["transmitted_bytes"] > size
    assert two["tail_drops"] > 0, "2 MB through 32 packets of queue: slow start must overflow it"
    switch.close()


def test_port_that_cannot_be_opened_says_why(network):
    with pytest.raises(OSError, match="port 4: cannot use interface nowhere"):
        network.switch.call(lambda: PacketPort(4, "nowhere"))
