# SPDX-License-Identifier: Apache-2.0
"""Packet tests as text: what goes in, which entries and registers there are, what has to come out.

``python -m dlcp.switch.stf p4/stf/*.stf`` runs them on the built-in switch. In Python::

    from dlcp.switch import stf
    from dlcp.switch.program import Program

    outcome = stf.run(stf.read(path), stf.BuiltIn(Program.load("p4/build/dlcp.json")))
    assert outcome.passed, outcome.failures

Whatever has the methods of `Target` can be tested in the place of `BuiltIn`.
"""

from dlcp.switch.stf.builtin import BuiltIn
from dlcp.switch.stf.frames import FrameError, Pattern, frame
from dlcp.switch.stf.parser import parse, read
from dlcp.switch.stf.runner import Outcome, Target, run
from dlcp.switch.stf.statements import Script, Statement, StfError
from dlcp.switch.stf.text import text

__all__ = [
    "BuiltIn",
    "FrameError",
    "Outcome",
    "Pattern",
    "Script",
    "Statement",
    "StfError",
    "Target",
    "frame",
    "parse",
    "read",
    "run",
    "text",
]
