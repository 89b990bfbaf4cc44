# SPDX-License-Identifier: Apache-2.0
"""Packet tests as text: entries, registers, input packets and expected output packets.

``python -m dlcp.switch.stf p4/stf/*.stf`` runs them on the built-in switch. In Python::

    from dlcp.switch import Program, stf

    outcome = stf.run(stf.read(path), stf.BuiltIn(Program.load("p4/build/dlcp.json")))
    assert outcome.passed, outcome.failures

Any other implementation of `StfTarget` can replace `BuiltIn`.
"""

from dlcp.switch.stf.frames import FrameError, Pattern, frame
from dlcp.switch.stf.runner import BuiltIn, StfOutcome, run
from dlcp.switch.stf.script import Script, Statement, StfError, StfTarget, parse, read

__all__ = [
    "BuiltIn",
    "FrameError",
    "Pattern",
    "Script",
    "Statement",
    "StfError",
    "StfOutcome",
    "StfTarget",
    "frame",
    "parse",
    "read",
    "run",
]
