# SPDX-License-Identifier: Apache-2.0
"""The way of a table entry, from a fabric's file to a table of the built-in switch, stays short."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from dlcp.switch import EmptyProgram, Switch

ROOT = Path(__file__).parents[2]
FILES_MAX = 12
"""The present count: document, fabric, entries, compiled_program, switch_client; service, device, entities, built_in,
program, tables, model."""
NOT_ENTRIES = {
    *("dlcp/switch/queues.py", "dlcp/switch/forwarding.py"),
    *(
        "dlcp/controller/topology_files.py",
        "dlcp/inputs/foreign_formats.py",
        "dlcp/host/ip.py",
        "dlcp/inputs/addresses.py",
    ),
}
"""Called on the way for something else: the depths of a fabric's ports, and when the switch wakes up; whether the file
is another project's, and whether addresses are some, and those of hosts such that loopback ports can carry."""


class Tracer:
    """Notes the project's files that are called, and the classes of entries that are made, while it is on."""

    def __init__(self):
        self.on, self.files, self.entries = False, set(), set()

    def __call__(self, frame, event, _):
        if not self.on or event != "call":
            return
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT / "dlcp"):
            self.files.add(file.relative_to(ROOT).as_posix())
        if frame.f_code.co_name == "__init__":
            name = type(frame.f_locals[frame.f_code.co_varnames[0]]).__name__
            if name.endswith("Entry"):
                self.entries.add(name)


def walk_of_a_route(folder):
    """Return what was noted while a fabric was read and one of its routes written into a running switch."""
    pytest.importorskip("finsy", reason="P4Runtime takes the packages of the extra fabric")
    from dlcp.controller.compiled_program import CompiledProgram, difference
    from dlcp.controller.entries import entries
    from dlcp.controller.fabric import load
    from dlcp.controller.switch_client import Session
    from dlcp.switch.p4runtime import P4RuntimeDevice, P4RuntimeServer

    tracer, pipeline, path = Tracer(), CompiledProgram(), folder / "star.yaml"

    def wanted():
        return difference(pipeline.encode(entries(load(path), "s1")), [])

    async def write(address):
        control = f"{{name: s1, grpc: '{address}', insecure: true, ports: loopback}}"
        path.write_text(f"hosts: 1\nswitches: [{control}]\n")
        async with Session(load(path).switch("s1"), pipeline) as session:
            await session.become_primary()
            await session.install()
            members, groups, _ = wanted().batches()
            await session.write(members)
            await session.write(groups)
            tracer.on = True
            sys.setprofile(tracer)
            (route,) = (change for change in wanted() if change.entity.table_entry.action.action_profile_group_id)
            await session.write([route])
            sys.setprofile(None)
            tracer.on = False

    threading.setprofile(tracer)  # for the threads of switch and server
    try:
        switch = Switch(EmptyProgram(), [])
        with switch.running(), P4RuntimeServer(P4RuntimeDevice(switch), ("127.0.0.1", 0)) as server:
            asyncio.run(write(server.address))
        switch.close()
    finally:
        threading.setprofile(None)
    return tracer


def test_the_way_of_a_table_entry_stays_short(tmp_path):
    walk = walk_of_a_route(tmp_path)
    files = sorted(walk.files - NOT_ENTRIES)
    assert {"dlcp/controller/entries.py", "dlcp/switch/executor/tables.py"} <= set(files)
    assert len(files) <= FILES_MAX, files
    # Between them it is P4Runtime's message, which is not a class of Python.
    assert walk.entries == {"TableEntry", "P4TableEntry"}
