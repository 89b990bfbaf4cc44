# SPDX-License-Identifier: Apache-2.0
"""Proves what the switch program promises, for all packets, entries and register contents: ``make prove``.

The program is the compiled one, ``build/dlcp.json``. `formulas` turns its parser and controls into formulas over one
packet, `promises` says what no packet may do, and z3 looks for one that does. For a broken promise, `attacks` looks for
a short sequence of packets that breaks it, and this script prints it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

import z3
from attacks import Attack, find_attack
from formulas import Machine
from promises import BOUND, PROMISES, bound_breaks

from dlcp.switch.executor import bmv2_json, model


def prove(program: model.ProgramDef, names: Sequence[str] = (*PROMISES, BOUND)) -> Iterator[tuple[str, bool, float]]:
    """Yield each promise, whether it is proven, and the seconds that took."""
    packet = Machine(program, "packet")
    for name in names:
        begin = monotonic()
        solver = z3.SolverFor("QF_AUFBV")
        solver.add(bound_breaks(program) if name == BOUND else z3.And(packet.sane, PROMISES[name](packet)))
        yield name, solver.check() == z3.unsat, monotonic() - begin


def described(attack: Attack) -> str:
    """Return an attack as text, to be followed by hand."""
    lines = ["  entries:"]
    lines += [
        f"    {entry.table} {entry.match} -> {entry.target} {entry.meter or ''}" for entry in attack.entries.entries
    ]
    lines += [f"    {profile.profile}: {dict(profile.members)}" for profile in attack.entries.profiles]
    lines.append("  registers:")
    lines += [f"    {name}: {value} but {cells}" for name, (value, cells) in attack.registers.items()]
    lines.append("  packets:")
    lines += [f"    at {item.time_us} us to port {item.port}: {item.data.hex()}" for item in attack.packets]
    return "\n".join(lines)


def main() -> int:
    """Prove all promises, and print attacks on those that do not hold; return 1 if there is one."""
    parser = argparse.ArgumentParser(description="Prove what the switch program promises.")
    parser.add_argument("--program", type=Path, default=bmv2_json.PROGRAM_PATH, metavar="FILE")
    program = bmv2_json.load_definition(parser.parse_args().program)
    failed = False
    for name, is_proven, seconds in prove(program):
        print(f"{name:<14} {'proven' if is_proven else 'NOT PROVEN'}  {seconds:5.1f} s", flush=True)
        if not is_proven:
            attack = find_attack(program, name)
            print("  no short attack found" if attack is None else described(attack), flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
