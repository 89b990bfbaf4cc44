# SPDX-License-Identifier: Apache-2.0
import random
import select
import socket
import struct
from contextlib import closing

import pytest

from dlcp.switch import LoopbackHost, LoopbackPorts, internet_checksum, udp_headers

UDP_PORT = 41696  # outside DLCP's own block, so that a switch that runs meanwhile is in nobody's way
HOSTS = [LoopbackHost.numbered(index) for index in range(3)]


def host_socket(index, udp_port=UDP_PORT, address=None):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, 13, 1)  # IP_RECVTOS
    sock.bind((address or HOSTS[index].real, udp_port))
    sock.settimeout(5)
    return sock


@pytest.fixture
def ports():
    opened = LoopbackPorts(HOSTS, (UDP_PORT,), mtu_bytes=1500)
    yield opened
    opened.close()


def fetch(ports, count, limit=64):
    """Receive until ``count`` packets are in or nothing more comes."""
    found = []
    while len(found) < count and select.select(ports.filenos(), [], [], 0.5)[0]:
        for fileno in select.select(ports.filenos(), [], [], 0)[0]:
            burst = ports.receive(fileno, limit)
            found += zip(burst.ports, burst.packets, strict=True)
    return found


def test_datagram_becomes_the_frame_that_the_host_would_have_sent(ports):
    with host_socket(0) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0xBA)  # DSCP 46, ECT(0)
        sender.sendto(b"gradient", (HOSTS[2].alias, UDP_PORT))
        [(port, packet)] = fetch(ports, 1)
    assert port == 1
    assert packet[0:14].hex() == "0200000000030200000000010800"
    assert internet_checksum(packet[14:34]) == 0
    version, tos, total, _, fragment, ttl, protocol, _, source, target = struct.unpack("!BBHHHBBH4s4s", packet[14:34])
    assert (version, tos, total, fragment, ttl, protocol) == (0x45, 0xBA, 36, 0x4000, 64, 17)
    assert (source, target) == (bytes([10, 0, 0, 1]), bytes([10, 0, 0, 3]))
    assert struct.unpack("!HHHH", packet[34:42]) == (UDP_PORT, UDP_PORT, 16, 0)
    assert packet[42:] == b"gradient"
    assert ports.counters[1].received == 1
    assert ports.counters[1].received_bytes == 50


@pytest.mark.parametrize("ecn", [0, 1, 2, 3])
def test_frame_reaches_the_host_with_tos_and_from_the_alias_of_its_sender(ports, ecn):
    frame = bytearray(
        udp_headers(HOSTS[1].mac, HOSTS[0].mac, HOSTS[1].address, HOSTS[0].address, UDP_PORT, UDP_PORT, 28 | ecn, 5)
    )
    with host_socket(0) as receiver:
        ports.send(1, [frame + b"hello"])
        data, ancillary, _, sender = receiver.recvmsg(100, 64)
    assert data == b"hello"
    assert sender == (HOSTS[1].alias, UDP_PORT)
    assert [value[0] for level, kind, value in ancillary if (level, kind) == (0, 1)] == [28 | ecn]


def test_burst_arrives_whole_and_in_order(ports):
    sizes = [1400] * 70 + [100, 1400, 1400, 0, 7]
    frames = [
        bytearray(
            udp_headers(HOSTS[1].mac, HOSTS[0].mac, HOSTS[1].address, HOSTS[0].address, UDP_PORT, UDP_PORT, 0, size)
        )
        + bytes([number]) * size
        for number, size in enumerate(sizes)
    ]
    with host_socket(0) as receiver:
        ports.send(1, frames)
        received = [receiver.recv(2000) for _ in sizes]
    assert received == [bytes([number]) * size for number, size in enumerate(sizes)]
    assert ports.counters[1].sent == len(sizes)


def test_segmented_send_of_a_host_is_taken_apart(ports):
    with host_socket(1) as sender:
        payload = b"".join(bytes([number]) * 1000 for number in range(40)) + b"rest"
        sender.sendmsg([payload], [(17, 103, struct.pack("=H", 1000))], 0, (HOSTS[0].alias, UDP_PORT))
        found = fetch(ports, 41)
    assert [packet[42:] for _, packet in found] == [bytes([number]) * 1000 for number in range(40)] + [b"rest"]
    assert all(internet_checksum(packet[14:34]) == 0 for _, packet in found)
    assert struct.unpack_from("!H", found[-1][1], 16) == (32,)


def test_strangers_are_refused_and_counted(ports):
    with host_socket(0, 41800) as wrong_port, host_socket(0, UDP_PORT, "127.77.2.9") as wrong_address:
        wrong_port.sendto(b"x", (HOSTS[0].alias, UDP_PORT))
        wrong_address.sendto(b"x", (HOSTS[0].alias, UDP_PORT))
        assert fetch(ports, 2) == []
    assert ports.counters[1].refused == 2


def test_oversize_is_counted(ports):
    with host_socket(0) as sender:
        sender.sendto(bytes(1472), (HOSTS[1].alias, UDP_PORT))
        sender.sendto(bytes(1473), (HOSTS[1].alias, UDP_PORT))
        assert [len(packet) for _, packet in fetch(ports, 2)] == [1514]
    assert ports.counters[1].oversize == 1


def test_dead_host_is_counted_and_harms_nobody(ports):
    def frame(target):
        headers = udp_headers(
            HOSTS[1].mac, HOSTS[target].mac, HOSTS[1].address, HOSTS[target].address, UDP_PORT, UDP_PORT, 0, 1
        )
        return bytearray(headers) + b"x"

    with host_socket(0) as receiver:
        for _ in range(3):
            ports.send(3, [frame(2)])
            ports.send(1, [frame(0)])
            assert receiver.recv(10) == b"x"
    assert fetch(ports, 1) == []
    assert ports.counters[3].unreachable == 3
    assert ports.counters[1].unreachable == ports.counters[1].send_errors == 0


def test_garbage_in_either_direction_ends_in_counters(ports):
    rng = random.Random(7)
    datagrams, frames = 0, 10_000
    with host_socket(0) as sender, host_socket(0, 41801) as stranger:
        for _ in range(10_000):
            who = sender if rng.random() < 0.5 else stranger
            datagrams += who.sendto(rng.randbytes(rng.randrange(0, 1600)), (HOSTS[1].alias, UDP_PORT)) >= 0
            if not datagrams % 20:
                fetch_now(ports)
        fetch_now(ports)
    one, two = ports.counters[1], ports.counters[2]
    assert one.received + one.oversize + two.refused == datagrams == 10_000
    good = udp_headers(HOSTS[1].mac, HOSTS[0].mac, HOSTS[1].address, HOSTS[0].address, UDP_PORT, UDP_PORT, 0, 30)
    for _ in range(frames):
        frame = bytearray(good) + bytes(30)
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(34)] = rng.randrange(256)
        del frame[rng.randrange(1, 80) :]
        ports.send(1, [frame])
    one.unreachable = 0  # nobody is bound there
    assert one.sent + one.undeliverable + one.send_errors == frames
    assert one.undeliverable > frames // 2


def fetch_now(ports):
    for fileno in ports.filenos():
        while ports.receive(fileno, 64).packets:
            pass


def test_alias_in_use_says_so():
    with (
        closing(LoopbackPorts(HOSTS[:1], (UDP_PORT,))),
        pytest.raises(OSError, match=r"127\.77\.0\.1:41696 .*another switch"),
    ):
        LoopbackPorts(HOSTS, (UDP_PORT,))
