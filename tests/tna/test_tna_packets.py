# SPDX-License-Identifier: Apache-2.0
"""The Tofino program packet by packet: the tests of the program for v1model, p4testgen's cases and random packets.

There is no free model of the chip, so ``p4machine`` runs the sources themselves. What comes out may differ from what
the program for v1model makes of a packet only where ``p4/tna/README.md`` says so.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tna.p4syntax import Reader
from tests.tna.p4tokens import P4Error

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from set_up import BUDGET_PARTS

from dlcp.switch import Program
from tests.conformance import replay
from tests.conformance.recording import Burst, Change, Packet, SetEntries, Step
from tests.packet import fuzz_steps, stf
from tests.tna.tna_program import CELLS, DEPTH_MAX, SOURCE, TnaProgram

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "p4" / "build" / "dlcp.json"

pytestmark = pytest.mark.compiled("v1model")
SENT_AGAIN = "the `entropy` of a retransmitted packet"
NOT_TRIMMED = "`trimming`, `trim`, `Trim`"
NOT_HERE = {
    "depth.stf": "A burst that arrives before any packet leaves is not coloured",
    "excess.stf": "No budget is charged, and only the traffic manager counts these drops",
}
"""Files of which not all holds here, and what p4/tna/README.md says of it."""
DIFFERENT = {
    "route.stf": (SENT_AGAIN, {"sent again"}),
    "trim.stf": (NOT_TRIMMED, {"of a job that is trimmed"}),
}
"""By file: the row of p4/tna/README.md, and what all packets are that are answered otherwise."""
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
        assert row in (ROOT / "p4" / "tna" / "README.md").read_text()


@pytest.mark.parametrize(("name", "passes"), [("depth.stf", True), ("excess.stf", False)])
def test_what_is_different_here_is_so_as_the_readme_says(name, passes, tna):
    outcome = stf.run(stf.read(ROOT / "p4" / "stf" / name), stf.BuiltIn(tna))
    packets = [line for line in outcome.failures if "register" not in line and "counter" not in line]
    assert bool(packets) == passes, packets
    assert outcome.failures
    assert NOT_HERE[name] in (ROOT / "p4" / "tna" / "README.md").read_text()


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
    tna.clear_entries()
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
    """Leave out what may differ: some packets, drops from bursts, thresholds of queue 0, and trimming."""
    for step in steps:
        if isinstance(step, Packet):
            if not tna.differs(step.data):
                yield step
        elif isinstance(step, Burst):
            leads, packets = ([p for p in part if not tna.differs(p.data)] for part in (step.leads, step.packets))
            yield Burst(leads, [packet for packet in packets if not packet.data[TAGS] >> 2 & 7], step.depths)
        elif isinstance(step, SetEntries):
            entries = [_possible(entry) for entry in step.entries["entries"] if _alike(entry)]
            yield SetEntries(step.entries | {"entries": entries})
        elif not isinstance(step, Change):
            yield step
        elif _alike(step.entry):
            yield Change(step.operation, _possible(step.entry))


def _alike(entry: dict[str, Any]) -> bool:
    return entry["table"] != "trimming" and (entry["table"] != "drop_threshold" or entry["match"]["queue"] != 0)


def _possible(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry that a Tofino can have: its part of a budget has a limit."""
    if entry.get("action") == "part_of_budget":
        return entry | {"params": {"halvings": min(len(BUDGET_PARTS) - 1, entry["params"]["halvings"])}}
    return entry


def _of_budget(halvings: int) -> stf.Script:
    """Return packets over a threshold: four of a message whose budget allows three to be dropped here."""
    packet = (
        "packet 1 ethernet() ipv4(src=10.0.0.1, dst=10.0.0.3) udp() "
        f"dlcp(queue=5, drop_class=6, job=7, budget={(4 << halvings) - 1})\n"
    )
    return stf.parse(
        f"""\
add port_trust ig_port:1 trust()
member route_selector 3 to_next_hop(port:3, mac:02:00:00:00:00:03)
add ipv4_route ipv4_dst:10.0.0.3/32 member 3
add drop_threshold queue:5 drop_class:6 drop_above(depth:10)
add budget_part 1 part_of_budget(halvings:{halvings})
register_write queue_depth(3,5) 11
{packet}{packet}{packet}no_packet
{packet}expect 3
"""
    )


@pytest.mark.parametrize("halvings", range(len(BUDGET_PARTS)))
def test_each_part_of_a_budget_is_that_of_the_other_program(halvings, tna, v1model):
    for program in (tna, v1model):
        assert stf.run(_of_budget(halvings), stf.BuiltIn(program)).failures == []


def test_every_action_table_and_parser_state_is_reached(tna, v1model):
    tna.machine.reached.clear()
    for path in (ROOT / "p4" / "stf").glob("*.stf"):
        stf.run(stf.read(path), stf.BuiltIn(tna))
    for halvings in range(len(BUDGET_PARTS)):
        stf.run(_of_budget(halvings), stf.BuiltIn(tna))
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
            (folder / name / path.name).write_text(text.replace("spent < meta.budget", "spent <= meta.budget"))
    changed = TnaProgram(v1model, folder / "tna" / "dlcp.p4")
    outcome = stf.run(stf.read(ROOT / "p4" / "stf" / "drop.stf"), stf.BuiltIn(changed))
    assert any("unexpected packet" in line or "expected" in line for line in outcome.failures)


def test_what_the_machine_does_not_know_is_refused(tmp_path):
    path = tmp_path / "a.p4"
    path.write_text("control C(inout headers_t hdr) { apply { while (true) { } } }\n")
    with pytest.raises(P4Error, match=r"a\.p4:1"):
        Reader(path)
