# SPDX-License-Identifier: Apache-2.0
"""The drops of one message in all switches of a fabric together, when all of their queues are deep."""

import random
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from dlcp.controller.entries import entries
from dlcp.controller.fabric import Job, leaf_spine, stages_between, star
from dlcp.switch import DROP_PORT, PortQueueing, Program, apply_entries
from dlcp.transport import LossBound
from tests.conformance import frames
from tests.controller.test_paths import random_fabric

PROGRAM = Path(__file__).parents[2] / "p4" / "build" / "dlcp.json"
PACKETS = 400
DEEP = 60


def programs_of(fabric):
    """Every switch's program, with all queues of gradients deep."""
    programs = {switch.name: Program.load(PROGRAM) for switch in fabric.switches}
    for name, program in programs.items():
        apply_entries(entries(fabric, name), program)
        for port in fabric.neighbours[name]:
            program.registers["queue_depth"][port << 3 | 4] = DEEP
    return programs


def packet_of(fabric, message, budget, index):
    first, last = (int(ip_address(host.address)) for host in (fabric.hosts[0], fabric.hosts[-1]))
    header = frames.dlcp(queue=4, drop_class=7, job=1, budget=budget, message=message, index=index, count=PACKETS)
    return bytearray(frames.gradients(header, src=first, dst=last))


def dropped_on_the_way(fabric, programs, message, budget):
    """Send a message from the first host to the last, and return how many of its packets the switches dropped."""
    lost = 0
    for index in range(PACKETS):
        packet = packet_of(fabric, message, budget, index)
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


def dropped_at_worst(fabric, programs, message, budget):
    """Return how many packets of a message the switches drop if each of them meets as many as it may drop.

    No spraying can make a switch drop more, whichever packets it sends over which path.
    """
    lost = 0
    for name in {name for stages in stages_between(fabric) for stage in stages for name in stage}:
        port = min(fabric.neighbours[name])
        for index in range(PACKETS):
            packet = packet_of(fabric, message, budget, index)
            lost += programs[name].ingress(packet, port, index)[0] == DROP_PORT
    return lost


@pytest.mark.parametrize(("leaves", "spines"), [(2, 1), (2, 2), (2, 4), (4, 4)])
def test_all_switches_of_a_sprayed_message_keep_its_bound_together(leaves, spines):
    fabric = leaf_spine(leaves, spines, 1, queueing=PortQueueing(10**9, 64), jobs=[Job(1)])
    allowed = LossBound(0.1).allowed(PACKETS)
    programs = programs_of(fabric)
    assert allowed / 2 <= dropped_on_the_way(fabric, programs, 1, allowed) <= allowed
    if leaves == 2:
        assert dropped_at_worst(fabric, programs, 2, allowed) <= allowed
    # Without parts, a switch drops the whole budget, and the next one another.
    for program in programs.values():
        program.tables["budget_part"].clear()
    assert dropped_on_the_way(fabric, programs, 3, allowed) > allowed


def test_the_parts_of_known_fabrics():
    assert star(3).budget_parts == {"switch": 0}
    assert leaf_spine(2, 2, 2).budget_parts == {"leaf1": 2, "leaf2": 2, "spine1": 2, "spine2": 2}
    fabric = leaf_spine(2, 2, 2)
    piped = tuple(replace(switch, pipes=2) if "spine" in switch.name else switch for switch in fabric.switches)
    assert replace(fabric, switches=piped).budget_parts == {"leaf1": 2, "leaf2": 2, "spine1": 3, "spine2": 3}
    parts = leaf_spine(4, 4, 2).budget_parts
    assert {parts[f"leaf{number}"] for number in range(1, 5)} == {2}
    assert {parts[f"spine{number}"] for number in range(1, 5)} == {3}


def test_the_parts_of_any_path_add_up_to_one_at_most():
    for seed in range(30):
        fabric, draw = random_fabric(seed), random.Random(seed)
        pipes = {switch.name: draw.choice([1, 1, 2, 4]) for switch in fabric.switches}
        switches = tuple(replace(switch, pipes=pipes[switch.name]) for switch in fabric.switches)
        fabric = replace(fabric, switches=switches)
        parts = fabric.budget_parts
        for stages in stages_between(fabric):
            assert sum(pipes[name] * 0.5 ** parts[name] for stage in stages for name in stage) <= 1
