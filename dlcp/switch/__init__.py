# SPDX-License-Identifier: Apache-2.0
"""The built-in switch: runs the compiled P4 program without root, BMv2 or hardware."""

from dlcp.switch.cells import CounterCell, MeterConfig
from dlcp.switch.errors import EntryError, ProgramError, UnknownName, UnsupportedFeature
from dlcp.switch.profiles import Action, Group, Member
from dlcp.switch.program import DROP_PORT, Carry, Program, Snapshot
from dlcp.switch.tables import Entry

__all__ = [
    "DROP_PORT",
    "Action",
    "Carry",
    "CounterCell",
    "Entry",
    "EntryError",
    "Group",
    "Member",
    "MeterConfig",
    "Program",
    "ProgramError",
    "Snapshot",
    "UnknownName",
    "UnsupportedFeature",
]
