# SPDX-License-Identifier: Apache-2.0
"""Findings about the kernel's UDP agree with the kernel."""

import errno
import socket
from pathlib import Path

import pytest

from dlcp.doctor import Status, examination
from dlcp.host.interfaces import NetworkInterface, interfaces
from dlcp.transport.path_mtu import payload_for_mtu


def test_an_option_that_the_kernel_does_not_know_is_a_note_with_a_fix(monkeypatch):
    monkeypatch.setattr(examination, "UDP_SEGMENT", 9999)
    monkeypatch.setattr(examination, "UDP_GRO", 9998)
    for finding in (examination.examine_segmentation(), examination.examine_coalescing()):
        assert finding.status is Status.NOTE
        assert "does not work here" in finding.text
        assert "Linux kernel" in finding.fix


def test_bursts_are_found_where_the_kernel_has_them():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.setsockopt(examination.SOL_UDP, examination.UDP_SEGMENT, 1000)
            sock.setsockopt(examination.SOL_UDP, examination.UDP_GRO, 1)
        except OSError:
            pytest.skip("this kernel has no UDP_SEGMENT or UDP_GRO")
    assert examination.examine_segmentation().data == {"udp_segment": True}
    assert examination.examine_coalescing().data == {"udp_gro": True}


def test_a_kernel_that_ignores_segmentation_is_found_out(monkeypatch):
    # UDP_ENCAP_... an option that is taken and does something else
    monkeypatch.setattr(examination, "UDP_SEGMENT", 100)
    monkeypatch.setattr(examination, "_TIMEOUT_S", 0.2)
    finding = examination.examine_segmentation()
    assert finding.status is Status.NOTE
    assert finding.data == {"udp_segment": False}


def test_buffers_say_what_was_granted_and_how_to_get_more(monkeypatch):
    maximum = int(Path("/proc/sys/net/core/rmem_max").read_text())
    monkeypatch.setattr(examination, "WANTED_BUFFER_BYTES", 4 * maximum)
    # Without the right to go past the maximum: SO_RCVBUF stands in for SO_RCVBUFFORCE.
    monkeypatch.setattr(examination, "SO_RCVBUFFORCE", socket.SO_RCVBUF)
    receive, send = examination.examine_buffers()
    assert receive.data == {"receive_buffer_granted_bytes": maximum, "receive_buffer_asked_bytes": 4 * maximum}
    assert receive.fix == f"sysctl -w net.core.rmem_max={4 * maximum}"
    assert receive.status is (Status.OK if 2 * maximum >= examination.ENOUGH_BUFFER_BYTES else Status.NOTE)
    monkeypatch.setattr(examination, "ENOUGH_BUFFER_BYTES", 3 * maximum)
    assert examination.examine_buffers()[0].status is Status.NOTE
    assert send.subject == "send buffer"


def test_interfaces_are_those_of_the_kernel():
    loopback, *others = [interface for interface in interfaces() if interface.name == "lo"]
    assert [loopback.address, *(other.address for other in others)] in (["127.0.0.1"], ["127.0.0.1", "::1"])
    assert loopback.loopback
    assert loopback.mtu_bytes == int(Path("/sys/class/net/lo/mtu").read_text())


def test_the_payload_that_fits_an_mtu():
    assert (payload_for_mtu(1500), payload_for_mtu(1400), payload_for_mtu(9000)) == (1440, 1336, 8936)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (None, Status.OK, "takes bursts"),
        (errno.EIO, Status.NOTE, "refuses bursts"),
        (errno.ENETUNREACH, Status.OK, "MTU 1500"),
    ],
)
def test_an_interface_without_checksum_offload_is_found_by_its_error(monkeypatch, answer, status, words):
    class Burst(socket.socket):
        def sendto(self, data, address):
            if answer:
                raise OSError(answer, "as some kernels do")
            return len(data)

    monkeypatch.setattr(examination.socket, "socket", Burst)
    finding = examination.examine_interface(NetworkInterface("eth7", "127.0.0.1", 1500, False, True))
    assert finding.status is status
    assert words in finding.text
    assert (f"ethtool -K {'eth7'} tx-checksum-ip-generic on" in finding.fix) == (answer == errno.EIO)


def test_trying_a_burst_sends_nothing(namespaces):
    near, far = namespaces.Namespace("near"), namespaces.Namespace("far")
    try:
        commands = [
            f"link add dlcp0 type veth peer name dlcp0 netns {far.path}",
            "addr add 10.9.0.1/24 dev dlcp0",
            "link set dlcp0 up",
        ]
        for command in commands:
            assert near.run(["ip", *command.split()]).returncode == 0
        assert far.run(["ip", "link", "set", "dlcp0", "up"]).returncode == 0
        ipv4 = 0x0800
        wire = far.call(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ipv4)))
        (interface,) = [found for found in near.call(interfaces) if not found.loopback]
        assert interface == NetworkInterface("dlcp0", "10.9.0.1", 1500, False, True)
        finding = near.call(lambda: examination.examine_interface(interface))
        assert finding.data["bursts"] in (True, False)
        wire.settimeout(0.2)
        with pytest.raises(TimeoutError):
            wire.recv(65536)
        wire.close()
    finally:
        near.close()
        far.close()


def test_ports_in_use_are_named():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind(("127.0.0.1", 53701))
        except OSError:
            pytest.skip("somebody uses port 53701")
        finding = examination.examine_ports()
    assert 53701 in finding.data["ports_taken"]
    assert finding.status is Status.OK or len(finding.data["ports_taken"]) == 8
