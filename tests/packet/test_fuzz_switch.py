# SPDX-License-Identifier: Apache-2.0
"""The short form of `fuzz_switch`, and that it finds differences."""

import functools
import importlib.util
import json
from collections import Counter

import pytest

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from dlcp.host import netlab
from dlcp.switch import Program
from tests.conformance import replay, simple_switch
from tests.conformance.recording import Burst, Packet
from tests.packet import fuzz_steps, fuzz_switch, stf

SEQUENCES, PACKETS, FAULT_PACKETS = 2, 600, 200
SHORT = 300
"""Packets with simple_switch, which is slower."""
FAULTS = {
    "threshold": ("selective_drop_limit", ">", ">="),
    "TTL": ("ttl", "<=", "<"),
    "mark": ("limit_0", ">", ">="),
}
"""A field of the compiled program, a comparison that reads it, and a wrong one."""


@functools.cache
def program(backend: str) -> Program:
    return Program.load(fuzz_switch.PROGRAM, backend=backend)


def by_built_in(steps):
    return replay.answered(steps, program("python"))


def test_back_ends_and_batches_agree():
    if importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed")
    compare = fuzz_switch.compare_with([program("python"), program("numba")])
    *_, tally = fuzz_switch.fuzz(1, range(SEQUENCES), by_built_in, compare, packets=PACKETS)
    assert tally.failures == []
    assert tally.packets >= 0.9 * SEQUENCES * PACKETS
    assert 0.2 < tally.dropped / tally.packets < 0.8


def test_simple_switch_answers_alike():
    for works, reason in (simple_switch.available(), netlab.available()):
        if not works:
            pytest.skip(f"needs simple_switch in a network namespace: {reason}")
    compare = fuzz_switch.compare_with([program("python")])
    *_, tally = fuzz_switch.fuzz(2, range(1), fuzz_switch.with_simple_switch, compare, packets=SHORT)
    if tally.uncertain:
        pytest.skip("simple_switch's answers are not certain on a machine this busy")
    assert tally.failures == []
    assert tally.packets >= 0.9 * SHORT


def test_a_sequence_has_something_of_everything():
    made = by_built_in(fuzz_steps.sequence("1 0", fuzz_switch.SEQUENCE_PACKETS))
    steps = Counter(type(step).__name__ for step in made.steps)
    assert min(steps[name] for name in ("SetEntries", "Change", "SetGroup", "WriteRegister", "AgeSlot", "Burst")) > 0
    other = by_built_in(fuzz_steps.sequence("1 2", fuzz_switch.SEQUENCE_PACKETS))
    events = {  # a slot is taken by another message in most sequences, not in all
        name: {index & 7 for each in (made, other) for index in each.state.counters[name]}
        for name in ("ingress_events", "egress_events")
    }
    assert events == {"ingress_events": {0, 1, 2, 3, 4, 5, 6, 7}, "egress_events": {0, 1}}
    lengths = {len(step.data) for step in made.steps if isinstance(step, Packet)}
    assert set(fuzz_steps.BOUNDARIES) <= lengths
    bursts = [step for step in made.steps if isinstance(step, Burst)]
    assert any(packet.answer is None for burst in bursts for packet in burst.packets)


def test_sequences_are_the_same_for_the_same_seed():
    assert fuzz_steps.sequence("5 1", 300) == fuzz_steps.sequence("5 1", 300)
    assert fuzz_steps.sequence("5 1", 300) != fuzz_steps.sequence("5 2", 300)


def spoil(part, field, right, wrong):
    """Change every comparison of a field in a compiled program; return how many."""
    if isinstance(part, list):
        return sum(spoil(item, field, right, wrong) for item in part)
    if not isinstance(part, dict):
        return 0
    changed = 0
    if part.get("op") == right and field in (
        name for side in ("left", "right") for name in (part[side].get("value") or ()) if isinstance(name, str)
    ):
        part["op"] = wrong
        changed = 1
    return changed + sum(spoil(item, field, right, wrong) for item in part.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_made_small(fault, tmp_path):
    path = tmp_path / "faulty.json"
    document = json.loads(fuzz_switch.PROGRAM.read_text())
    assert spoil(document, *FAULTS[fault]) > 0
    path.write_text(json.dumps(document))
    faulty = Program.load(path)
    compare = fuzz_switch.compare_with([faulty], [False])
    tallies = fuzz_switch.fuzz(3, range(8), by_built_in, compare, packets=FAULT_PACKETS)
    tally = next(tally for tally in tallies if tally.failures)
    script = stf.parse(tally.failures[0])
    assert len(script.statements) <= 22, tally.failures[0]
    assert stf.run(script, stf.BuiltIn(program("python"))).passed
    assert not stf.run(script, stf.BuiltIn(faulty)).passed
