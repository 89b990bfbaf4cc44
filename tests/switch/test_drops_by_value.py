# SPDX-License-Identifier: Apache-2.0
"""Which packets a congested switch drops, with the controller's own entries, in virtual time: the least valuable.

A job sends messages in bursts, as hosts do, into a port that carries other traffic, too. What it sends is more than the
port can take, so something has to be dropped; the question is what.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from dlcp.controller.entries import entries
from dlcp.controller.fabric import Job, star
from dlcp.switch import DROP_PORT, PortQueueing, Program, apply_entries
from dlcp.values.tags import FRONT_SHARES
from dlcp.wire import Flag
from tests.conformance import frames
from tests.switch.object_switch import ObjectQueues

PROGRAM = Path(__file__).resolve().parents[2] / "p4" / "build" / "dlcp.json"
RATE_BPS = 64_000_000
DEPTH = 32
FRAME_BYTES = 1514
FRAME_NS = FRAME_BYTES * 8 * 10**9 // RATE_BPS
MESSAGE_PACKETS, BURST_PACKETS, SENDERS = 250, 60, 3
"""Three hosts send a burst of 20 packets each at once, into queues of 32."""
BUDGET = MESSAGE_PACKETS // 10
GRADIENTS, OTHERS = 1, 2
"""The ports of the two senders; the receiver is at port 3."""
RECEIVER = 0x0A000003


@dataclass
class Drops:
    """The drops of a run: kinds of packets, by whether the program chose them or a queue was full."""

    chosen: Counter = field(default_factory=Counter)
    full: Counter = field(default_factory=Counter)
    sent: Counter = field(default_factory=Counter)
    by_message: Counter = field(default_factory=Counter)
    """Packets of each message that the program chose."""
    departed: Counter = field(default_factory=Counter)
    wrong_depths: int = 0
    """How often the program's depth differed from the queue's, while that was not full."""

    @property
    def by_value(self) -> float:
        """The share of dropped gradient packets that the program chose."""
        return self.chosen.total() / max(1, self.chosen.total() + self.full.total() - self.full["other"])


def run(*, offered: float, others: float, share: float, budget: int = BUDGET, seconds: float = 1.0) -> Drops:
    """Send gradients and other traffic, in parts of the port's rate, into one port; return what was dropped."""
    rng = random.Random(1)
    fabric = star(3, queueing=PortQueueing(RATE_BPS, DEPTH), jobs=[Job(1, share, 0.05, burst_s=DEPTH * FRAME_NS / 1e9)])
    program = Program.load(PROGRAM)
    apply_entries(entries(fabric, "switch"), program)
    queues, found = ObjectQueues(PortQueueing(RATE_BPS, DEPTH)), Drops()
    depths = program.registers["queue_depth"]

    def depart(now_ns: int) -> None:
        while departure := queues.dequeue(now_ns):
            packet, carry, queue, start_ns, came_ns, enq, deq = departure
            program.egress(packet, carry, 3, came_ns // 1000, (start_ns - came_ns) // 1000, enq, deq, start_ns // 1000)
            queues.transmit(packet, queue)
            found.departed["other" if queue == 1 else "gradients"] += 1

    def arrive(now_ns: int, port: int, packet: bytes, kind: str, message: int = -1) -> None:
        depart(now_ns)
        found.sent[kind] += 1
        to_port, queue, carry = program.ingress(bytearray(packet), port, now_ns // 1000)
        if to_port == DROP_PORT:
            found.chosen[kind] += 1
            found.by_message[message] += 1
        elif not queues.enqueue(bytearray(packet), carry, queue, now_ns):
            found.full[kind] += 1
        elif depths[3 << 3 | queue] != queues.depths[queue] < DEPTH:
            found.wrong_depths += 1

    events = [(number * FRAME_NS / others, OTHERS, 0) for number in range(int(seconds * 1e9 * others / FRAME_NS))]
    bursts = int(seconds * 1e9 * offered / FRAME_NS / BURST_PACKETS)
    apart_ns = BURST_PACKETS * FRAME_NS / offered
    events += [
        (number * apart_ns + index * FRAME_NS / SENDERS, GRADIENTS, number * BURST_PACKETS + index)
        for number in range(bursts)
        for index in range(BURST_PACKETS)
    ]
    ordinary = frames.ethernet(frames.ipv4(bytes(FRAME_BYTES - 34), src=0x0A000002, dst=RECEIVER, protocol=6))
    for now_ns, port, number in sorted(events):
        if port == OTHERS:
            arrive(int(now_ns), port, ordinary, "other")
            continue
        message, index = divmod(number, MESSAGE_PACKETS)
        kind = rng.choices(["control", "protected", "again", "tagged"], [0.02, 0.05, 0.03, 0.9])[0]
        drop_class = rng.choices(range(8), FRONT_SHARES)[0] if kind == "tagged" else 7
        flags = {"protected": int(Flag.PROTECTED), "again": int(Flag.RETRANSMISSION)}.get(kind, 0)
        tags = {"type": 2 if kind == "control" else 1, "flags": flags, "queue": 4, "drop_class": drop_class}
        header = frames.dlcp(**tags, job=1, budget=budget, message=message, index=index, count=MESSAGE_PACKETS)
        packet = frames.gradients(header, bytes(FRAME_BYTES - 74), src=0x0A000001, dst=RECEIVER)
        arrive(int(now_ns), port, packet, f"class {drop_class}" if kind == "tagged" else kind, message)
    depart(1 << 62)
    assert not any(depths.values()), "what has left does not wait"
    return found


NEVER = ("control", "protected", "again", "class 0")


@pytest.mark.parametrize(
    ("offered", "others", "share"), [(0.7, 0.4, 0.35), (1.1, 0.0, 0.35), (1.1, 0.0, 0.9), (0.6, 0.5, 0.5)]
)
def test_most_of_what_is_dropped_is_chosen_by_value(offered, others, share):
    found = run(offered=offered, others=others, share=share)
    assert found.chosen.total() > 100
    assert found.by_value >= 0.8, (found.chosen, found.full)
    assert not any(found.chosen[kind] for kind in (*NEVER, "other"))
    assert not found.full["other"]
    least, most = found.chosen["class 7"] / found.sent["class 7"], found.chosen["class 1"] / found.sent["class 1"]
    assert least > 2 * most
    assert found.wrong_depths == 0


def test_within_its_share_no_message_loses_more_than_its_budget():
    found = run(offered=0.9, others=0.2, share=0.95, budget=5)
    assert max(found.by_message.values()) == 5
    assert not any(found.chosen[kind] for kind in (*NEVER, "other"))


def test_what_exceeds_a_share_is_dropped_by_value_even_if_no_budget_is_left():
    found = run(offered=0.8, others=0.35, share=0.35, budget=0)
    assert found.chosen.total() > 100
    assert found.by_value >= 0.8, (found.chosen, found.full)
    assert not any(found.chosen[kind] for kind in (*NEVER, "other"))


def test_others_get_what_the_job_leaves_whatever_is_dropped():
    found = run(offered=1.0, others=0.65, share=0.3)
    assert found.full["other"] == 0
    assert found.departed["other"] == found.sent["other"]
