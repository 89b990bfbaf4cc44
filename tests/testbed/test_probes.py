# SPDX-License-Identifier: Apache-2.0
"""The tools of a testbed: names, frames and counters, without a testbed."""

import os

import pytest

pytest.importorskip("finsy", reason="switches are programmed over P4Runtime: pip install dlcp[fabric]")

from dlcp.controller.display import queue_lines
from dlcp.controller.fabric import leaf_spine
from dlcp.controller.testbed import TestbedError, layout, requirements
from dlcp.controller.testbed.accounts import padded
from dlcp.controller.testbed.layout import ProcessId, StateFile, TestbedState, WireEnd, lay_out
from dlcp.controller.testbed.probes import Frame, kind_of, write_pcap
from dlcp.host.ip import IPV4
from dlcp.switch import EventCount, PortQueueing, read_ports, udp_headers, write_ports
from dlcp.switch.event_counters import SwitchAccount
from dlcp.wire import UDP_PORT_BASE, Header, PacketType

FABRIC = leaf_spine(2, 2, 2)
LAYOUT = lay_out(FABRIC, "builtin", "t")
MACS = ("02:00:00:00:00:01", "02:00:00:00:00:02")
DATA = Header(PacketType.DATA, 0, 6, 3, 0, 1, 0, 0, 0, 0, 0, 1, 0)


def frame(payload, port=UDP_PORT_BASE):
    return udp_headers(*MACS, "10.0.0.1", "10.0.0.2", 9999, port, 0, len(payload)) + payload


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["host0"], ["leaf1:1 host0"]),
        (["leaf1", "spine1"], ["leaf1:3 spine1:1"]),
        (["spine2:2"], ["leaf2:4 spine2:2"]),
        (["spine1"], ["leaf1:3 spine1:1", "leaf2:3 spine1:2"]),
    ],
)
def test_a_link_is_named_by_its_ends(names, ends):
    assert [f"{a} {b}" for a, b in LAYOUT.links_of(names)] == ends


@pytest.mark.parametrize(
    ("names", "problem"),
    [(["hots0"], "no host, switch or port is named 'hots0'; did you mean"), (["host0", "leaf2"], "no link joins")],
)
def test_a_link_that_is_not_there_is_refused(names, problem):
    with pytest.raises(TestbedError, match=problem):
        LAYOUT.links_of(names)


def test_bmv2_is_not_asked_for_what_it_cannot_do():
    with pytest.raises(TestbedError, match="BMv2 has neither delay nor loss"):
        lay_out(leaf_spine(1, 1, 2, queueing=PortQueueing(rate_bps=10**6, loss=0.1)), "bmv2", "t")


def test_the_kind_of_a_frame():
    assert kind_of(frame(padded(DATA, IPV4))) == "DLCP DATA job 1 queue 6 class 3"
    assert kind_of(frame(b"short")) == "UDP"
    assert kind_of(frame(padded(DATA, IPV4), port=80)) == "UDP"
    assert kind_of(bytes(12) + b"\x08\x06" + bytes(28)) == "ARP"
    assert kind_of(b"") == "EtherType 0x0000"


def test_others_can_read_a_capture(tmp_path):
    scapy = pytest.importorskip("scapy.utils", reason="needs Scapy: pip install dlcp[capture]")
    from dlcp.wire.scapy import DLCP

    end = WireEnd("host1", 0, "t-host1", "eth0")
    write_pcap(
        tmp_path / "x.pcap", [Frame(end, 1_500_000_000, frame(padded(DATA, IPV4))), Frame(end, 2 * 10**9, bytes(60))]
    )
    first, second = scapy.rdpcap(str(tmp_path / "x.pcap"))
    assert (float(first.time), first[DLCP].queue, len(second)) == (1.5, 6, 60)


def test_live_counters_as_lines():
    events = [EventCount("FORWARDED", 1, 6, 0, 12, 0), EventCount("POLICY_DROP", 1, 6, 5, 3, 0)]
    account = SwitchAccount.of(events, {(1, 6): 2, (3, 7): 1})
    assert queue_lines(FABRIC, {"leaf1": account}) == [
        "leaf1:1 (host0) queue 6: forwarded 12, policy drops 3, tail drops 2",
        "leaf1:3 (spine1:1) queue 7: tail drops 1",
    ]


def test_the_queueing_of_ports_is_read_as_it_was_written(tmp_path):
    ports = {1: PortQueueing(rate_bps=5, depth_packets=(1,) * 8, limit_bytes=3), 2: PortQueueing(loss=0.5)}
    write_ports(tmp_path / "ports.json", ports)
    assert read_ports(tmp_path / "ports.json") == ports


def test_a_mininet_script_is_not_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(layout, "RUN_FOLDER", tmp_path)
    files = StateFile("t")
    files.write(TestbedState(LAYOUT, ProcessId.of(os.getpid()), (), is_script=True))
    with pytest.raises(TestbedError, match=f"the Mininet script in process {os.getpid()}; end the script"):
        files.remove()
    assert files.read() is not None


def test_a_capability_that_a_container_lacks_is_named(monkeypatch):
    monkeypatch.setattr(requirements, "_CAPABILITIES", {"NET_ADMIN": 63})
    monkeypatch.setattr(requirements, "_BMV2_CAPABILITIES", {"SYS_PTRACE": 63})
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 0)
    assert "CAP_NET_ADMIN: start the container with --privileged" in requirements.missing("builtin")[0]
    assert "CAP_SYS_PTRACE" in requirements.missing("bmv2")[1]
    assert "CAP_SYS_PTRACE" not in str(requirements.missing("builtin"))
