# SPDX-License-Identifier: Apache-2.0
"""Testbeds come and go: up, found again by a later command, and down, also after a crash."""

import dataclasses
import json
import os
import subprocess
import time
from multiprocessing.connection import wait  # select.select knows no descriptors from 1024 on
from typing import IO, Final

import msgspec

from dlcp.children import python_command
from dlcp.controller.fabric import Fabric, load
from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.layout import KEEPER_READY, Layout, StateFile, TestbedState, lay_out
from dlcp.controller.testbed.namespaces import NamedNamespace
from dlcp.controller.testbed.programming import Controller, with_addresses
from dlcp.controller.testbed.requirements import SwitchKind, missing

UP_DEADLINE_S: Final = 120.0
"""Building takes some 0.2 s a node; Numba's first compilation in a switch takes the most."""
FABRIC: Final = ".fabric.json"
"""Which file has the fabric of a testbed that is up; ``dlcp fabric`` takes it."""


def up(fabric: Fabric, kind: SwitchKind, name: str) -> TestbedState:
    """Bring a testbed up, leave it to a process of its own, and program its switches.

    Parameters
    ----------
    fabric
        What to build. Its switches' kinds and addresses do not count: they are the testbed's.
    kind
        Which switches to build it with.
    name
        Prefix of its namespaces and files.

    Raises
    ------
    TestbedError
        Something it needs is missing, one of this name is up, or it could not be made; then nothing is left of it.
    """
    layout = lay_out(fabric, kind, name)
    lacking = missing(layout.kind)
    if lacking:
        raise TestbedError("a testbed needs\n" + "\n".join(f"  {line}" for line in lacking))
    files = StateFile(layout.name)
    state = files.read()
    if state is not None and state.alive:
        raise TestbedError(f"testbed {layout.name!r} is up already; `dlcp testbed down` first")
    files.remove()
    taken = [name for name in layout.namespaces if NamedNamespace(name).exists]
    if taken:
        raise TestbedError(
            f"network namespace {taken[0]} exists and is not ours: `ip netns delete {taken[0]}`, or --name"
        )
    try:
        _start_keeper(layout, files)
        known = with_addresses(fabric, layout)
        files.path(FABRIC).write_text(json.dumps(dataclasses.asdict(known)), encoding="utf-8")
        Controller(known).close()
    except BaseException:
        files.remove()
        raise
    return find(layout.name)


def fabric_of(name: str) -> Fabric:
    """Return the fabric of a testbed that is up, with the addresses of its switches."""
    return load(StateFile(name).path(FABRIC))


def find(name: str) -> TestbedState:
    """Return the testbed of a name.

    Raises
    ------
    TestbedError
        There is none, or it has crashed.
    """
    state = StateFile(name).read()
    if state is None:
        raise TestbedError(f"no testbed {name!r} is up; `dlcp testbed up` makes one")
    if not (state.alive and state.ready):
        raise TestbedError(f"testbed {name!r} has crashed; `dlcp testbed down` removes what it left")
    return state


def down(name: str) -> int:
    """Take a testbed down, whatever state it is in; return how many processes had to be ended.

    Raises
    ------
    TestbedError
        A process does not end.
    """
    return StateFile(name).remove()


def _start_keeper(layout: Layout, files: StateFile) -> None:
    """Start the process that holds the testbed, and wait until it says that all is made."""
    log_path = files.path(".keeper.log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        # In a session of its own, so that it stays when the terminal goes.
        keeper = subprocess.Popen(
            python_command("dlcp.controller.testbed.keeper"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with keeper.stdin, keeper.stdout:
        keeper.stdin.write(msgspec.json.encode(layout))
        keeper.stdin.close()
        if not _says_ready(keeper.stdout):
            said = log_path.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
            raise TestbedError(f"testbed {layout.name!r} was not made: {said or 'it did not say why'}")


def _says_ready(output: IO[bytes]) -> bool:
    """Read lines until the one that says ready; say whether it came, and in time."""
    deadline_s = time.monotonic() + UP_DEADLINE_S
    pending = b""
    while wait([output.fileno()], max(0.0, deadline_s - time.monotonic())):
        some = os.read(output.fileno(), 4096)
        if not some:
            return False
        pending += some
        if f"{KEEPER_READY}\n".encode() in pending:
            return True
    return False
