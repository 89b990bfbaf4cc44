# SPDX-License-Identifier: Apache-2.0
"""The Tofino program packet by packet: the tests of the program for v1model, p4testgen's cases and random packets.

There is no free model of the chip, so ``p4machine`` runs the sources themselves. What comes out may differ from what
the program for v1model makes of a packet only where ``p4/README.md`` says so.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tna.p4syntax import Reader
from tests.tna.p4tokens import P4Error

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from dlcp.switch import Program
from tests.conformance import replay
from tests.conformance.recording import Burst, Change, Packet, SetEntries, Step
from tests.packet import fuzz_steps, stf
from tests.tna.tna_program import CELLS, DEPTH_MAX, SOURCE, TnaProgram

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "p4" / "build" / "dlcp.json"

pytestmark = pytest.mark.compiled("v1model")
SENT_AGAIN = "the `entropy` of a retransmitted packet"
NOT_HERE = {
    "depth.stf": "A burst that arrives before any packet leaves is not coloured",
    "excess.stf": "No budget is charged, and only the traffic manager counts these drops",
}
"""Files of which not all holds here, and what p4/README.md says of it."""
DIFFERENT = {"route.stf": (SENT_AGAIN, {"sent again"})}
"""By file: the row of p4/README.md, and what all packets are that are answered otherwise."""
SEQUENCES, PACKETS = 6, 320
TAGS = 44
"""The byte of a frame that holds queue and drop class."""
DEEPEST = DEPTH_MAX // CELLS
"""In packets: a depth in cells goes no further."""


@pytest.fixture(scope="module")
def v1model():
    return Program.load(PROGRAM, backend="python")


@pytest.fixture(scope="module")
def tna():
    return TnaProgram(Program.load(PROGRAM, backend="python"))


class Watched(stf.BuiltIn):
    """A target that notes what each packet sent is like."""

    def __init__(self, program: TnaProgram) -> None:
        super().__init__(program)  # type: ignore[arg-type]
        self._tna = program
        self.sent: list[bytes] = []

    def send(self, port: int, data: bytes) -> None:
        self.sent.append(data)
        super().send(port, data)


STF = sorted(path for path in (ROOT / "p4" / "stf").glob("*.stf*") if path.name not in NOT_HERE)


@pytest.mark.parametrize("path", STF, ids=lambda path: path.name)
def test_packet_tests_come_out_as_with_v1model_or_as_the_readme_says(path, tna):
    script = stf.read(path)
    target = Watched(tna)
    outcome = stf.run(script, target)
    row, kinds = DIFFERENT.get(path.name, ("", set()))
    assert outcome.packets == len(target.sent) > 0
    differing = set(map(_line, outcome.failures))
    at = _answers(script)
    assert {tna.differs(at[line]) for line in differing} == kinds, outcome.failures[:3]
    if row:
        assert row in (ROOT / "p4" / "README.md").read_text()


@pytest.mark.parametrize(("name", "passes"), [("depth.stf", True), ("excess.stf", False)])
def test_what_is_different_here_is_so_as_the_readme_says(name, passes, tna):
    outcome = stf.run(stf.read(ROOT / "p4" / "stf" / name), stf.BuiltIn(tna))
    packets = [line for line in outcome.failures if "register" not in line and "counter" not in line]
    assert bool(packets) == passes, packets
    assert outcome.failures
    assert NOT_HERE[name] in (ROOT / "p4" / "README.md").read_text()


def _line(failure: str) -> int:
    return int(failure.split(":")[1])


def _answers(script: stf.Script) -> dict[int, bytes]:
    """Return the packet that was sent last before each statement, by line."""
    found, last = {}, b""
    for statement in script.statements:
        if hasattr(statement, "data"):
            last = statement.data
        found[statement.line] = last
    return found


@pytest.mark.parametrize("number", range(SEQUENCES))
def test_random_packets_entries_depths_and_slots_are_treated_alike(number, tna, v1model):
    steps = list(_without_differences(fuzz_steps.sequence(f"tofino {number}", PACKETS), tna))
    made = replay.answered(steps, v1model)
    assert sum(1 for _ in made.packets()) > PACKETS / 2
    tna.clear_entries()
    tna.reset_state()
    pipeline = replay._Single(tna)
    for step in made.steps:
        if isinstance(step, Packet):
            assert pipeline.one_by_one([step]) == [step.answer], step
        elif isinstance(step, Burst):
            assert pipeline.one_by_one(step.leads) == [packet.answer for packet in step.leads]
            assert pipeline.at_once(step.packets, step.depths) == [packet.answer for packet in step.packets]
        else:
            replay._prepare(step, tna)
    depths, slots = v1model.registers["queue_depth"].values(), v1model.registers["slot_owner"].values()
    assert [tna.registers["queue_depth"][i] for i in range(512)] == [min(depth, DEEPEST) for depth in depths]
    for slot in np.flatnonzero(slots):
        for name in ("slot_owner", "slot_spent"):
            assert tna.registers[name][slot] == v1model.registers[name][slot], f"{name}[{slot}]"
    for name in ("ingress_events", "egress_events"):
        counted = v1model.counters[name].values()
        assert counted.any()
        for index, (packets, octets) in enumerate(counted):
            if packets or index in range(2048):
                assert tna.counters[name][index] == (packets, octets), f"{name}[{index}]"


def _without_differences(steps: Sequence[Step], tna: TnaProgram) -> Iterator[Step]:
    """Leave out what may differ: some packets, drops from bursts, and the thresholds of queue 0."""
    for step in steps:
        if isinstance(step, Packet):
            if not tna.differs(step.data):
                yield step
        elif isinstance(step, Burst):
            leads, packets = ([p for p in part if not tna.differs(p.data)] for part in (step.leads, step.packets))
            yield Burst(leads, [packet for packet in packets if not packet.data[TAGS] >> 2 & 7], step.depths)
        elif isinstance(step, SetEntries):
            yield SetEntries(step.entries | {"entries": [entry for entry in step.entries["entries"] if _alike(entry)]})
        elif not isinstance(step, Change) or _alike(step.entry):
            yield step


def _alike(entry: dict[str, Any]) -> bool:
    return entry["table"] != "drop_threshold" or entry["match"]["queue"] != 0


def test_every_action_table_and_parser_state_is_reached(tna, v1model):
    tna.machine.reached.clear()
    for path in (ROOT / "p4" / "stf").glob("*.stf"):
        stf.run(stf.read(path), stf.BuiltIn(tna))
    blocks = tna.machine.source.blocks.values()
    wanted = {f"{block.name}.{name}" for block in blocks for name in (*block.actions, *block.states)}
    wanted |= {f"{name} hit" for block in blocks for name in block.tables if not block.tables[name]["entries"]}
    missing = wanted - tna.machine.reached - {"over_threshold hit", "device_port missed"}
    assert not missing


def test_a_change_of_the_program_is_noticed(tmp_path, v1model):
    folder = tmp_path / "p4"
    for name in ("tna", "shared"):
        (folder / name).mkdir(parents=True)
        for path in (SOURCE.parents[1] / name).glob("*.p4"):
            text = path.read_text()
            (folder / name / path.name).write_text(text.replace("spent < hdr.dlcp.budget", "spent <= hdr.dlcp.budget"))
    changed = TnaProgram(v1model, folder / "tna" / "dlcp.p4")
    outcome = stf.run(stf.read(ROOT / "p4" / "stf" / "drop.stf"), stf.BuiltIn(changed))
    assert any("unexpected packet" in line or "expected" in line for line in outcome.failures)


def test_what_the_machine_does_not_know_is_refused(tmp_path):
    path = tmp_path / "a.p4"
    path.write_text("control C(inout headers_t hdr) { apply { while (true) { } } }\n")
    with pytest.raises(P4Error, match=r"a\.p4:1"):
        Reader(path)
