# SPDX-License-Identifier: Apache-2.0
"""Differential fuzzer: random entries, packets, depths and state through simple_switch and the built-in switch.

``python -m tests.packet.fuzz_switch --seed 1 --packets 100000`` compares every packet that comes out, and every
register and counter in the end, with both back ends of the built-in switch, a packet at a time and in batches. What
differs is made as small as can be and written as a packet test (STF) that simple_switch passes.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dlcp.switch import BACKENDS, Program
from tests.conformance import replay
from tests.conformance.recorder import Uncertain, record
from tests.conformance.recording import Burst, Markers, Packet, Recording, SetEntries, Step
from tests.packet import as_stf, fuzz_steps, stf
from tests.packet.stf_text import text

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "p4" / "build" / "dlcp.json"


SEQUENCE_PACKETS = 2000
ANSWER_S = 0.001
SHRINK_RUNS = 120
"""How often a failure is tried again while it is made smaller."""
_CELL = re.compile(r"(register|counter) (\S+)\[(\d+)\]: recorded (\(?[\d, ]+\)?), got")

Reference = Callable[[Sequence[Step]], Recording]
"""Answers steps as they should be answered."""
Compare = Callable[[Recording], list[str]]
"""Describes the answers that differ."""


def compare_with(programs: Sequence[Program], ways: Sequence[bool] = (False, True)) -> Compare:
    """Return a comparison with these programs, each a packet at a time (False) and in batches (True)."""

    def compare(made: Recording) -> list[str]:
        found = []
        for program, batches in itertools.product(programs, ways):
            how = f"{program.backend}, {'batches' if batches else 'single'}"
            found += [
                f"{how}: {line}" for line in itertools.islice(replay.differences(made, program, batches=batches), 10)
            ]
        return found

    return compare


def with_simple_switch(steps: Sequence[Step]) -> Recording:
    """Return the steps with simple_switch's answers."""
    return record(PROGRAM, Program.load(PROGRAM).digest, steps, answer_s=ANSWER_S)


def shrink(steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool], runs: int = SHRINK_RUNS) -> list[Step]:
    """Return as few steps as can be found that still fail: ever smaller parts are left out, entries too."""
    budget = itertools.count()

    def still(candidate: Sequence[Step]) -> bool:
        return next(budget) < runs and any(isinstance(one, Packet | Burst) for one in candidate) and fails(candidate)

    # The first entries stay: the markers, by which simple_switch is known to have settled, need theirs.
    kept = [steps[0], *_without_parts(list(steps[1:]), lambda rest: still([steps[0], *rest]))]
    for number in range(len(kept)):
        kept = _with_fewer_entries(kept, number, still)
    return kept


def _with_fewer_entries(steps: list[Step], number: int, fails: Callable[[list[Step]], bool]) -> list[Step]:
    step = steps[number]
    if not isinstance(step, SetEntries):
        return steps

    def made(entries: list) -> list[Step]:
        document = {**step.entries, "entries": [*Markers.ENTRIES, *entries]}
        return [*steps[:number], SetEntries(document), *steps[number + 1 :]]

    own = [entry for entry in step.entries["entries"] if entry not in Markers.ENTRIES]
    fewer = made(_without_parts(own, lambda entries: fails(made(entries))))
    pruned = [*fewer[:number], SetEntries(_pruned(fewer[number].entries)), *fewer[number + 1 :]]
    return pruned if fails(pruned) else fewer


def _pruned(document: dict) -> dict:
    """Return entries without the groups and members that none of them uses."""
    used_groups = {entry.get("group") for entry in document["entries"]}
    used_members = {entry.get("member") for entry in document["entries"]}
    profiles = []
    for profile in document["profiles"]:
        groups = [group for group in profile.get("groups", ()) if group["id"] in used_groups]
        used = used_members.union(*(group["members"] for group in groups))
        members = [member for member in profile["members"] if member["id"] in used]
        profiles.append({**profile, "members": members, "groups": groups})
    return {**document, "profiles": profiles}


def _without_parts(items: list, fails: Callable[[list], bool]) -> list:
    """Leave out halves, quarters ... of a list, from the end, as long as the rest still fails."""
    size = max(1, len(items) // 2)
    while True:
        end = len(items)
        while end > 0:
            fewer = items[: max(0, end - size)] + items[end:]
            if len(fewer) < len(items) and fails(fewer):
                items = fewer
            end -= size
        if size == 1:
            return items
        size //= 2


def as_test(made: Recording, found: Sequence[str], title: str) -> str:
    """Return a packet test with the answers of the reference, and checks of the cells that differ."""
    checks: list[stf.Statement] = []
    for kind, name, index, value in dict.fromkeys(_CELL.search(line).groups() for line in found if _CELL.search(line)):
        if kind == "register":
            checks.append(stf.CheckRegister(0, name, int(index), "==", int(value)))
        else:
            packets, octets = (int(part) for part in value.strip("()").split(","))
            checks += [
                stf.CheckCounter(0, name, int(index), unit, "==", count)
                for unit, count in (("packets", packets), ("bytes", octets))
            ]
    lines = [f"# SPDX-License-Identifier: Apache-2.0\n# {title}\n", *(f"# {line[:300]}\n" for line in found[:3])]
    return "".join([*lines, text([*as_stf.statements(made.steps), *checks])])


@dataclasses.dataclass
class Tally:
    """The number of compared packets and values."""

    packets: int = 0
    dropped: int = 0
    sequences: int = 0
    uncertain: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    """Packet tests, one for each sequence that differs."""


def fuzz(
    seed: int, numbers: Sequence[int], reference: Reference, compare: Compare, *, packets: int = SEQUENCE_PACKETS
) -> Iterator[Tally]:
    """Run sequences and return the tally after each; a sequence that differs is made small."""
    tally = Tally()
    for number in numbers:
        name = f"{seed} {number}"
        steps = fuzz_steps.sequence(name, packets)
        try:
            made = reference(steps)
        except Uncertain as error:
            print(f"sequence {name}: {error}", file=sys.stderr)
            tally.uncertain += 1
            yield tally
            continue
        if found := compare(made):
            small = shrink(steps, lambda some: bool(_found(some, reference, compare)))
            made_small = reference(small)
            tally.failures.append(as_test(made_small, compare(made_small) or found, f"fuzz_switch.py, sequence {name}"))
        tally.sequences += 1
        sent = list(made.packets())
        tally.packets += len(sent)
        tally.dropped += sum(packet.answer is None for packet in sent)
        yield tally


def _found(steps: Sequence[Step], reference: Reference, compare: Compare) -> list[str]:
    try:
        return compare(reference(steps))
    except (Uncertain, LookupError, ValueError):
        return []  # such as the change of an entry that was left out


def main() -> int:
    """Fuzz; return how many sequences differ."""
    from dlcp.host.netlab import become_root

    parser = argparse.ArgumentParser(description="compare the built-in switch with simple_switch on random packets")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random (1)")
    parser.add_argument("--packets", type=int, default=100_000, help="how many at least (100000)")
    parser.add_argument(
        "--skip", type=int, default=0, metavar="N", help="leave the first N sequences out, to go on (0)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzz", help="where failures are written (out/fuzz)")
    options = parser.parse_args()
    become_root()
    backends = [name for name in BACKENDS if name != "numba" or importlib.util.find_spec("numba")]
    compare = compare_with([Program.load(PROGRAM, backend=name) for name in backends])
    tally, started_s = Tally(), time.monotonic()
    for tally in fuzz(options.seed, range(options.skip, 1 << 30), with_simple_switch, compare):
        took_s = time.monotonic() - started_s
        last = options.skip + tally.sequences + tally.uncertain
        print(
            f"{last} sequences of seed {options.seed}: {tally.packets} packets, {tally.dropped} dropped, "
            f"{len(tally.failures)} sequences differ, {tally.uncertain} uncertain, {took_s:.0f} s",
            flush=True,
        )
        if tally.packets >= options.packets or len(tally.failures) >= 3:
            break
    for number, test in enumerate(tally.failures):
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"fuzz-{options.seed}-{number}.stf"
        path.write_text(test, encoding="utf-8")
        print(f"written: {path}")
    return len(tally.failures)


if __name__ == "__main__":
    sys.exit(main())
