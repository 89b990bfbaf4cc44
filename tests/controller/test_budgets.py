# SPDX-License-Identifier: Apache-2.0
"""The drops of one message in all switches of a fabric together, when all of their queues are deep."""

from pathlib import Path

import pytest

from dlcp.controller.entries import entries, most_switches
from dlcp.controller.fabric import Job, Port, leaf_spine
from dlcp.switch import DROP_PORT, PortQueueing, Program, apply_entries
from dlcp.transport import LossBound
from tests.conformance import frames

PROGRAM = Path(__file__).parents[2] / "p4" / "build" / "dlcp.json"
PACKETS = 400
DEEP = 60


def dropped(fabric, programs, message: int, budget: int) -> int:
    """Send a message from the first host to the last, and return how many of its packets the switches dropped."""
    first, last = (0x0A000000 | int(host.address.rsplit(".", 1)[1]) for host in (fabric.hosts[0], fabric.hosts[-1]))
    lost = 0
    for index in range(PACKETS):
        header = frames.dlcp(queue=4, drop_class=7, job=1, budget=budget, message=message, index=index, count=PACKETS)
        packet = bytearray(frames.gradients(header, src=first, dst=last))
        at = fabric.attachments[fabric.hosts[0].name]
        while at is not None:
            program = programs[at.switch]
            port, _, carry = program.ingress(packet, at.number, index)
            if port == DROP_PORT:
                lost += 1
                break
            program.egress(packet, carry, port, index, 0, DEEP, DEEP, index)
            at = fabric.neighbours[at.switch][port].port
    return lost


@pytest.mark.parametrize("spines", [1, 2, 4])
def test_all_switches_of_a_sprayed_message_keep_its_bound_together(spines):
    fabric = leaf_spine(2, spines, 1, queueing=PortQueueing(10**9, 64), jobs=[Job(1)])
    assert fabric.attachments["host1"] == Port("leaf2", 1)
    allowed = LossBound(0.1).allowed(PACKETS)
    switches = most_switches(fabric)
    assert switches == 2 + spines
    programs = {switch.name: Program.load(PROGRAM) for switch in fabric.switches}
    for name, program in programs.items():
        apply_entries(entries(fabric, name), program)
        for port in fabric.neighbours[name]:
            program.registers["queue_depth"][port << 3 | 4] = DEEP
    assert dropped(fabric, programs, 1, allowed // switches) == allowed // switches * switches <= allowed
    # Divided by the length of the path, as it was before, or not at all:
    if spines > 1:
        assert dropped(fabric, programs, 2, allowed // 3) > allowed
    assert dropped(fabric, programs, 3, allowed) > allowed
