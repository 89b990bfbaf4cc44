# SPDX-License-Identifier: Apache-2.0
"""Records what simple_switch answers, into tests/data/conformance: ``python -m tests.conformance.record [NAME ...]``.

It takes simple_switch with its Thrift modules, p4testgen for the scenario of that name, and the right to make a
network namespace. Without names it records everything. Afterwards the built-in switch has to answer the same.
"""

import argparse
import collections
import itertools
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "p4" / "build" / "dlcp.json"
DATA = ROOT / "tests" / "data" / "conformance"
SHOWN = 10
"""Differences that are printed of each scenario."""


def main() -> int:
    """Record; return how many scenarios differ."""
    from dlcp.host.netlab import become_root
    from dlcp.switch import Program
    from tests.conformance import p4testgen, recording, replay, scenarios
    from tests.conformance.recorder import record

    names = [*scenarios.SCENARIOS, "p4testgen"]
    parser = argparse.ArgumentParser(description="record what simple_switch answers, and compare the built-in switch")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"scenarios: {', '.join(names)} (all)")
    parser.add_argument("--seed", type=int, default=1, help="of the random scenarios (1)")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    become_root()
    program = Program.load(PROGRAM)
    differing = 0
    kinds: collections.Counter[str] = collections.Counter()
    for name in options.names or names:
        start_s = time.monotonic()
        steps = p4testgen.steps(ROOT) if name == "p4testgen" else scenarios.steps(name, options.seed)
        made = record(PROGRAM, program.digest, steps)
        if not options.check:
            recording.write(DATA / f"{name}.jsonl.gz", made)
        found = list(itertools.islice(replay.differences(made, program), SHOWN))
        packets = list(made.packets())
        dropped = sum(packet.answer is None for packet in packets)
        kinds.update(packet.kind for packet in packets)
        print(f"{name}: {len(packets)} packets, {dropped} dropped, {time.monotonic() - start_s:.0f} s")
        for line in found:
            print(f"  {line}")
        differing += bool(found)
    print(f"{kinds.total()} packets, {len(kinds)} kinds, {differing} scenarios that differ")
    return differing


if __name__ == "__main__":
    sys.exit(main())
