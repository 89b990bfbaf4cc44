# SPDX-License-Identifier: Apache-2.0
"""Bring a testbed up, find it from a later command, and take it down, even after a crash."""

import dataclasses
import json
import os
import subprocess
import time
from multiprocessing.connection import wait  # select.select does not support descriptors above 1023
from typing import IO, Final

import msgspec

from dlcp.controller.fabric import Fabric, load
from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.layout import KEEPER_READY, Layout, StateFile, TestbedState, lay_out
from dlcp.controller.testbed.programming import Controller, with_addresses
from dlcp.controller.testbed.requirements import SwitchKind, missing
from dlcp.netlab import NamedNamespace
from dlcp.processes import python_command

UP_DEADLINE_S: Final = 120.0
"""Building takes about 0.2 s per node. Numba's first compilation in a switch takes the longest."""
FABRIC: Final = ".fabric.json"
"""Suffix of the file with the fabric of a testbed that is up; ``dlcp fabric`` accepts that file."""


def up(fabric: Fabric, kind: SwitchKind, name: str) -> TestbedState:
    """Bring a testbed up in a process of its own, and program its switches.

    Parameters
    ----------
    fabric
        The fabric to build. The testbed replaces the kinds and addresses of its switches.
    kind
        The kind of its switches.
    name
        Prefix of its namespaces and files.

    Raises
    ------
    TestbedError
        A requirement is missing, a testbed of this name is up, or it could not be created; then nothing is left of it.
    """
    layout = lay_out(fabric, kind, name)
    lacking = missing(layout.kind)
    if lacking:
        raise TestbedError("a testbed needs the following:\n" + "\n".join(f"  {line}" for line in lacking))
    files = StateFile(layout.name)
    state = files.read()
    if state is not None and state.alive:
        raise TestbedError(f"testbed {layout.name!r} is already up; run `dlcp testbed down` first")
    files.remove()
    taken = [name for name in layout.namespaces if NamedNamespace(name).exists]
    if taken:
        raise TestbedError(
            f"network namespace {taken[0]} already exists; run `ip netns delete {taken[0]}`, or choose another --name"
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
    """Return the testbed of that name.

    Raises
    ------
    TestbedError
        It is not up, or has crashed.
    """
    state = StateFile(name).read()
    if state is None:
        raise TestbedError(f"testbed {name!r} is not up; run `dlcp testbed up`")
    if not (state.alive and state.ready):
        raise TestbedError(f"testbed {name!r} has crashed; `dlcp testbed down` removes its remains")
    return state


def down(name: str) -> int:
    """Take a testbed down in any state; return the number of processes ended.

    Raises
    ------
    TestbedError
        A process does not end.
    """
    return StateFile(name).remove()


def _start_keeper(layout: Layout, files: StateFile) -> None:
    """Start the process that holds the testbed, and wait until it reports that the testbed is ready."""
    log_path = files.path(".keeper.log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        # In a session of its own, so that it outlives the terminal.
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
            raise TestbedError(f"cannot build testbed {layout.name!r}: {said or 'its log is empty'}")


def _says_ready(output: IO[bytes]) -> bool:
    """Read until the ready line; return whether it came within ``UP_DEADLINE_S``."""
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
