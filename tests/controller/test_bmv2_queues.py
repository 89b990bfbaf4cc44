# SPDX-License-Identifier: Apache-2.0
"""What the controller says of a BMv2 without eight queues a port, which drops most packets without a word."""

import asyncio
import stat
from collections import Counter

import pytest
from finsy.proto import p4r

from dlcp.cli import main
from dlcp.controller import switch_client
from dlcp.controller.fabric import FabricSwitch, star
from dlcp.controller.switch_client import QueueError, queue_depths_unavailable, set_queue_depths, set_up_queues
from dlcp.switch import EgressEvent, PortQueueing, event_index
from dlcp.wire import Queue
from tests.controller.switches import described, running

RESTART = "restart it with -- --priority-queues 8"
UNKNOWN = "it has no CPU port either, so make sure that it was started with -- --priority-queues 8"
EIGHT = ("--priority-queues", "8")
CPU_PORT = ("--cpu-port", "100")


class Probed:
    """A session with a BMv2 that has a CPU port or not, and queues or not: it counts the frames that it is sent."""

    def __init__(self, cpu_port=True, queues=True):
        self.switch = FabricSwitch("switch", "bmv2")
        self._cpu_port, self._queues = cpu_port, queues
        self.frames = []
        self._counted = Counter()

    async def send_packet(self, frame):
        self.frames.append(frame)
        self._counted["arrivals", 36] += self._cpu_port
        if self._cpu_port and self._queues:
            self._counted["egress_events", event_index(1, Queue.ORDINARY, 0, EgressEvent.FORWARDED)] += 1

    async def read(self, wanted):
        data = [p4r.CounterData(packet_count=self._counted[each.counter_id, each.index]) for each in wanted]
        return [p4r.Entity(counter_entry=p4r.CounterEntry(data=each)) for each in data]


def set_up(session):
    return asyncio.run(set_up_queues(session, star(3, ports="packet")))


def test_a_frame_finds_out_whether_there_are_queues(monkeypatch):
    monkeypatch.setattr(switch_client, "_PROBE_DEADLINE_S", 0.1)
    forwards = Probed()
    assert set_up(forwards).endswith("so its queues keep the depth they were started with")
    (frame,) = forwards.frames
    assert (frame[:6], frame[12:14], len(frame)) == (bytes.fromhex("020000000001"), b"\x88\xb5", 60)
    with pytest.raises(QueueError, match=f"switch switch: BMv2 has fewer than 8 queues .*; {RESTART}"):
        set_up(Probed(queues=False))
    assert UNKNOWN in set_up(Probed(cpu_port=False))


def test_a_command_for_a_queue_out_of_range_means_too_few_queues(tmp_path, monkeypatch):
    tool = tmp_path / "simple_switch_CLI"
    tool.write_text("#!/bin/sh\necho 'TApplicationException: vector::_M_range_check: __n (which is 7) >= 1'; exit 1\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(QueueError, match=RESTART):
        asyncio.run(set_queue_depths(FabricSwitch("a", "bmv2", thrift="127.0.0.1:9090"), {1: PortQueueing()}))


@pytest.mark.parametrize(
    ("thrift", "options", "status", "said"),
    [
        (True, EIGHT, 0, ""),
        (True, (), 1, RESTART),
        (False, (*EIGHT, *CPU_PORT), 0, ""),
        (False, CPU_PORT, 1, RESTART),
        (False, (), 0, UNKNOWN),
    ],
)
def test_apply_says_whether_a_real_bmv2_has_queues(tmp_path, capsys, thrift, options, status, said):
    with running("bmv2", options=options) as switch:
        if thrift and queue_depths_unavailable(described(switch, thrift=switch.thrift)):
            pytest.skip("simple_switch_CLI is not on PATH; p4lang's package p4lang-bmv2 brings it")
        file = tmp_path / "fabric.yaml"
        also = f", thrift: '{switch.thrift}'" if thrift else ""
        file.write_text(
            f"switches: [{{name: s1, kind: bmv2, grpc: '{switch.address}', insecure: true{also}}}]\n"
            "hosts: 2\nlinks: [{a: host0, b: 's1:1'}, {a: host1, b: 's1:2'}]\n"
        )
        found = main(["fabric", "apply", str(file)])
    captured = capsys.readouterr()
    printed = " ".join((captured.out + captured.err).split())
    assert found == status, printed
    assert said in printed
    assert said or (RESTART not in printed and UNKNOWN not in printed)
