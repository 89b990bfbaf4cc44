# SPDX-License-Identifier: Apache-2.0
"""The controller of a testbed, which runs in a thread while the testbed is in use."""

import asyncio
import dataclasses
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, TypeVar

from dlcp.closing import Closing
from dlcp.controller.fabric import Fabric
from dlcp.controller.pipeline import CompiledProgram
from dlcp.controller.session import ControlError, Readings, Session, read_counters
from dlcp.controller.testbed import TestbedError, came_true
from dlcp.controller.testbed.layout import Layout
from dlcp.controller.testbed.proxy import LOOPBACK
from dlcp.controller.watch import Watcher
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
