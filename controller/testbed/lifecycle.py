# SPDX-License-Identifier: Apache-2.0
"""Bring a testbed up, program its switches, find it from a later command, and take it down, even after a crash."""

import asyncio
import dataclasses
import json
import os
import subprocess
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import wait  # select.select does not support descriptors above 1023
from typing import IO, Any, Final, TypeVar

import msgspec

from dlcp.controller.compiled_program import CompiledProgram
from dlcp.controller.fabric import Fabric, SwitchKind, load
from dlcp.controller.switch_client import ControlError, Readings, Session, read_counters
from dlcp.controller.testbed import TestbedError, came_true
from dlcp.controller.testbed.layout import KEEPER_READY, LOOPBACK, Layout, StateFile, TestbedState, lay_out
from dlcp.controller.testbed.requirements import missing
from dlcp.controller.watch import Watcher
from dlcp.host.closing import Closing
from dlcp.host.netlab import NamedNamespace
from dlcp.host.processes import python_command
from dlcp.switch import EventCount

PROGRAM_DEADLINE_S: Final = 30.0
READ_DEADLINE_S: Final = 20.0
_EVERY_S: Final = 5.0
"""Interval between comparisons of the switches with the wanted state. A lost connection is noticed at once."""

_T = TypeVar("_T")


def with_addresses(fabric: Fabric, layout: Layout) -> Fabric:
    """Return a fabric with the switch kind and the addresses of a testbed."""
    switches = tuple(
        dataclasses.replace(
            switch,
            kind=layout.kind,
            ports="packet",
            device_id=plan.device_id,
            grpc=f"{LOOPBACK}:{plan.control_port}",
            insecure=True,
            tls=None,
            thrift=f"{LOOPBACK}:{plan.thrift_port}" if layout.kind == "bmv2" else "",
        )
        for switch, plan in zip(fabric.switches, layout.switches, strict=True)
    )
    return dataclasses.replace(fabric, switches=switches, mtu_bytes=layout.mtu_bytes)


class Controller(Closing):
    """Programs the switches of a testbed and keeps them so; a context manager. The constructor waits until they are.

    Parameters
    ----------
    fabric
        The wanted state, with the testbed's addresses.

    Raises
    ------
    TestbedError
        A switch was not reached or programmed in time.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._pipeline = CompiledProgram()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dlcp-controller", daemon=True)
        self._thread.start()
        self._watcher = Watcher(fabric, self._pipeline, every_s=_EVERY_S)
        self._task = asyncio.run_coroutine_threadsafe(self._watcher.run(), self._loop)
        try:
            self._await_programmed()
        except BaseException:
            self.close()
            raise

    @property
    def installs(self) -> int:
        """Number of program installations: one for each switch, and one for each restart."""
        return sum(state.installs for state in self._watcher.states.values())

    def events(self, name: str) -> tuple[EventCount, ...]:
        """Return the event counters of a switch.

        Raises
        ------
        TestbedError
            The switch does not answer.
        """
        try:
            return self._call(self._read(name)).events
        except (ControlError, FutureTimeoutError) as error:
            raise TestbedError(f"cannot read the counters of switch {name}: {error}") from error

    def close(self) -> None:
        """Disconnect from the switches, which keep their state.

        Raises
        ------
        TestbedError
            A connection to a switch does not close.
        """
        self._task.cancel()
        try:
            self._call(_settle())
        except FutureTimeoutError:
            raise TestbedError(f"connections to switches are still open after {READ_DEADLINE_S:.0f} s") from None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(READ_DEADLINE_S)
        self._loop.close()

    def _await_programmed(self) -> None:
        came_true(lambda: self._task.done() or not self._away(), PROGRAM_DEADLINE_S)
        if self._task.done():
            self._task.result()
        away = self._away()
        if away:
            raise TestbedError(f"switch {away[0]} was not programmed within {PROGRAM_DEADLINE_S:.0f} s")

    def _away(self) -> list[str]:
        return [name for name, state in self._watcher.states.items() if not state.connected]

    async def _read(self, name: str) -> Readings:
        async with Session(self._fabric.switch(name), self._pipeline) as session:
            return await read_counters(session, self._fabric.neighbours[name])

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(READ_DEADLINE_S)


async def _settle() -> None:
    """Wait for the cancelled tasks to end."""
    current = asyncio.current_task()
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not current), return_exceptions=True)


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
        A process does not end, or a Mininet script holds the testbed.
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
