# SPDX-License-Identifier: Apache-2.0
"""Compiles the simulator and the switch program, which takes Numba a minute: ``python -m tests.compile_ahead``.

The results stay on disk. Without them, tests that run at the same time would compile the same.
"""

from dlcp.sim import simulate
from dlcp.switch import PROGRAM_PATH, Program
from tests.sim.sim_scenarios import draw

program = Program.load(PROGRAM_PATH, backend="numba")
_, _, carry = program.ingress(bytearray(64), 0, 0)
program.egress(bytearray(64), carry, 0, 0, 0, 0, 0, 0)
for engine in ("kernel", "flows"):
    simulate(draw(0), engine=engine)
