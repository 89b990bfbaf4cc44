# SPDX-License-Identifier: Apache-2.0
"""Hosts in namespaces around a real built-in switch that only the controller tells what to do."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dlcp.host import netlab
from dlcp.switch import SwitchProcess
from dlcp.wire import UDP_PORT_BASE, Header, PacketType
from tests.waiting import gone, until

GRPC, METRICS = "127.0.0.1:9559", "127.0.0.1:9464"
DEADLINE_S = 60
SENT = 200
FABRIC = f"""
hosts: 2
switches: [{{name: s1, grpc: "{GRPC}", insecure: true}}]
queueing: {{rate_bps: 50e6, depth_packets: 300}}
"""


@pytest.fixture
def network():
    works, reason = netlab.available()
    if not works:
        pytest.skip(f"needs network namespaces: {reason}")
    with netlab.StarNetwork(2) as made:
        yield made


def test_a_killed_switch_is_restored_while_hosts_go_on_and_all_counters_agree(network, tmp_path):
    file = tmp_path / "fabric.yaml"
    file.write_text(FABRIC)
    one, two = (host_socket(host) for host in network.hosts)
    with one, two, watching(network, file):
        with switch_of(network) as switch:
            until_delivered(one, two)
            subprocess.run(["kill", "-KILL", str(switch.pid)], check=True)
            until(lambda: gone(switch.pid))
        with switch_of(network) as switch:
            delivered = until_delivered(one, two)
            for number in range(SENT):  # one by one: a busy machine's sockets have room for few at once
                one.sendto(packet(number), ("10.0.0.2", UDP_PORT_BASE))
                delivered += until(lambda: received(two, 0.01), f"packet {number} does not arrive")
            delivered += received(two, 0.2)
            counted = until_counted(network, delivered)
            snapshot = switch.stop()
    forwarded = snapshot["program"]["egress_events"]["totals"]["FORWARDED"]
    assert delivered >= SENT
    assert delivered == forwarded == snapshot["ports"][1]["queues"][5]["transmitted"] == counted


def switch_of(network):
    arguments = ["--port", "1=packet:port1", "--port", "2=packet:port2", "--p4runtime", GRPC, "--insecure"]
    return SwitchProcess([*arguments, "--rate-bps", "50e6", "--depth-packets", "300"], namespace=network.switch)


@contextmanager
def watching(network, file):
    argv = [sys.executable, "-m", "dlcp.cli", "fabric", "watch", str(file), "--metrics", METRICS, "--every", "0.3"]
    with network.switch.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout.readline().startswith("watching: s1")
            yield
            watch.send_signal(signal.SIGINT)
            assert watch.wait(20) == 0
        finally:
            watch.kill()
        said = watch.stderr.read()
    assert said.count("program installed") == 2, said


def host_socket(host):
    def make():
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((host.address, UDP_PORT_BASE))
        sock.settimeout(0.05)
        return sock

    return host.namespace.call(make)


def packet(number):
    return Header(PacketType.DATA, 0, 5, 0, 0, 1, 100, 1, 1, 0, number, 1000, 0).encode() + bytes(500)


def received(sock, timeout_s=0.0):
    """Count what has arrived, and what does until nothing came for so long."""
    count = 0
    sock.settimeout(timeout_s)
    try:
        while True:
            sock.recv(2000)
            count += 1
    except (BlockingIOError, TimeoutError):
        return count


def until_delivered(one, two):
    """Send until something arrives, and return how many packets did."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        one.sendto(packet(0), ("10.0.0.2", UDP_PORT_BASE))
        count = received(two, 0.1)
        if count:
            return count
        assert time.monotonic() < deadline, "nothing arrives"


def until_counted(network, packets):
    """Return how many forwarded packets Prometheus collects, once they are as many as expected."""
    until(lambda: network.switch.call(scrape) >= packets, lambda: f"{network.switch.call(scrape)} of {packets} counted")
    return network.switch.call(scrape)


def scrape():
    with urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "dlcp_switch_event_packets_total" and sample.labels["event"] == "FORWARDED"
    )
