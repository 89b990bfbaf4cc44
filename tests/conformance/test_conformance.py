# SPDX-License-Identifier: Apache-2.0
"""The built-in switch against what simple_switch answered to the same packets, entries and writes."""

import collections
import copy
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from dlcp.host import netlab
from dlcp.switch import Program
from tests.conformance import p4testgen, recording, replay, scenarios, simple_switch
from tests.conformance.recorder import Uncertain, record
from tests.conformance.recording import Burst, Markers, Packet, Recording

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "p4" / "build" / "dlcp.json"
DATA = ROOT / "tests" / "data" / "conformance"
NAMES = [*scenarios.SCENARIOS, "p4testgen"]
DIGEST = hashlib.sha256(PROGRAM.read_bytes()).hexdigest()
AGAIN = "record again with `python -m tests.conformance.record`"
SHOWN = 5
EVENTS = {
    "ingress_events": {
        0: "no route",
        1: "refused",
        2: "untrusted",
        3: "over share",
        4: "policy drop",
        5: "budget spent",
        6: "slot taken",
        7: "trimmed",
    },
    "egress_events": {0: "forwarded", 1: "marked"},
}


@functools.cache
def recorded(name: str) -> Recording:
    return recording.read(DATA / f"{name}.jsonl.gz")


@functools.cache
def program(backend: str) -> Program:
    return Program.load(PROGRAM, backend=backend)


def first_differences(made: Recording, backend: str = "python", *, batches: bool = False) -> str:
    found = list(itertools.islice(replay.differences(made, program(backend), batches=batches), SHOWN))
    return "\n".join(found)


def without_answers(steps):
    """Return steps as they were before they were recorded."""

    def bare(packet):
        return dataclasses.replace(packet, time_us=0, answer=None)

    for step in steps:
        match step:
            case Markers():
                pass
            case Packet():
                yield bare(step)
            case Burst(leads, packets, depths):
                yield Burst([bare(packet) for packet in leads], [bare(packet) for packet in packets], depths)
            case recording.AgeSlot():
                yield dataclasses.replace(step, value=0)
            case _:
                yield step


@pytest.mark.recorded
def test_recordings_are_of_this_program():
    others = [name for name in NAMES if recorded(name).program != DIGEST]
    assert not others, f"p4/build was compiled again since {', '.join(others)} were recorded; {AGAIN}"


def test_recordings_are_of_these_scenarios():
    changed = [n for n in scenarios.SCENARIOS if list(without_answers(recorded(n).steps)) != scenarios.steps(n)]
    assert not changed, f"tests/conformance was changed since {', '.join(changed)} were recorded; {AGAIN}"


@pytest.mark.recorded
@pytest.mark.parametrize("batches", [False, True], ids=["single", "batches"])
@pytest.mark.parametrize("backend", ["python", "numba"])
@pytest.mark.parametrize("name", NAMES)
def test_built_in_switch_answers_as_simple_switch(name, backend, batches):
    if backend == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed")
    assert not first_differences(recorded(name), backend, batches=batches)


def test_recordings_are_many_and_of_every_kind():
    packets = [packet for name in NAMES for packet in recorded(name).packets()]
    assert len(packets) >= 5000
    assert sum(packet.answer is None for packet in packets) >= 1000
    kinds = collections.Counter(packet.kind for packet in packets)
    assert kinds["p4testgen"] >= 300
    for make in ("data", "control", "tcp", "udp", "fragment", "options", "bad_checksum", "ttl", "truncated", "version"):
        assert kinds[make] >= 20, make
    for make in ("udp_length", "no_checksum", "ethernet", "mutated", "noise", "cut off", "UDP checksum", "slot taken"):
        assert kinds[make] >= 20, make


def test_every_event_of_the_program_occurs():
    seen = {name: set() for name in EVENTS}
    for name in NAMES:
        for counter, found in seen.items():
            found |= {index & 7 for index in recorded(name).state.counters.get(counter, {})}
    assert seen == {name: set(events) for name, events in EVENTS.items()}


def test_queues_really_filled():
    bursts = [step for step in recorded("queues").steps if isinstance(step, Burst)]
    state = recorded("queues").state
    policy_drops = sum(n for index, (n, _) in state.counters["ingress_events"].items() if index & 7 == 4)
    lost = sum(packet.answer is None for burst in bursts for packet in burst.packets)
    marked = sum(n for index, (n, _) in state.counters["egress_events"].items() if index & 7 == 1)
    assert lost - policy_drops >= 20, "queues that are full drop the tail"
    assert marked >= 50, "marks by depth"


@pytest.mark.recorded
def test_a_changed_answer_is_found():
    made = copy.deepcopy(recorded("drops"))
    packets = [step for step in made.steps if isinstance(step, Packet)]
    forwarded = next(packet for packet in packets if packet.answer)
    port, data = forwarded.answer
    forwarded.answer = port, data[:-1] + bytes([data[-1] ^ 1])
    dropped = next(packet for packet in packets if not packet.answer)
    dropped.answer = dropped.port, dropped.data
    (index, (count, octets)), *_ = made.state.counters["egress_events"].items()
    made.state.counters["egress_events"][index] = count, octets + 1
    made.state.registers["DlcpIngress.selective_drop.slot_spent"][5] = 9
    found = list(replay.differences(made, program("python")))
    assert len(found) == 4, found
    assert f"egress_events[{index}]" in found[3]
    assert "slot_spent[5]" in found[2]


def test_recordings_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "copy.jsonl.gz"
    recording.write(path, recorded("queues"))
    assert recording.read(path) == recorded("queues")
    assert path.read_bytes() == (DATA / "queues.jsonl.gz").read_bytes()


def test_protobuf_text_is_read():
    text = 'a { b: 5 c: "x\\x0a\\101\\n" }  # d\na: { b: -1 } e: WORD f: "1" "2"'
    expected = {"a": [{"b": ["5"], "c": [b"x\nA\n"]}, {"b": ["-1"]}], "e": ["WORD"], "f": [b"12"]}
    assert p4testgen.parse(text) == expected


@pytest.fixture(scope="module")
def live():
    """Skip, and say why, where simple_switch cannot be run."""
    for works, reason in (simple_switch.available(), netlab.available()):
        if not works:
            pytest.skip(f"needs simple_switch in a network namespace: {reason}")

    def run(steps):
        try:
            return record(PROGRAM, DIGEST, steps)
        except Uncertain as error:
            pytest.skip(f"simple_switch's answers are not certain on a machine this busy: {error}")

    return run


def test_simple_switch_still_answers_as_recorded(live):
    steps = [*recorded("mixed1").steps[:100], *recorded("drops").steps[:100]]
    again = list(live(list(without_answers(steps))).packets())
    before = [step for step in steps if isinstance(step, Packet)]
    assert [packet.answer for packet in again] == [packet.answer for packet in before]


def test_simple_switch_answers_new_packets_alike(live):
    made = live(scenarios.steps("mixed1", seed=2)[:150])
    assert sum(1 for _ in made.packets()) > 50
    assert not first_differences(made)
