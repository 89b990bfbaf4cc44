# SPDX-License-Identifier: Apache-2.0
"""What a testbed leaves on disk while it is up, so that any later command finds it, and can remove it after a crash."""

import dataclasses
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from dlcp.controller.testbed.errors import TestbedError
from dlcp.controller.testbed.layout import RUN_FOLDER, Layout
from dlcp.controller.testbed.namespaces import NamedNamespace

KEEPER_DEADLINE_S: Final = 15.0
_POLL_S: Final = 0.05

_T = TypeVar("_T")


@dataclass(frozen=True)
class ProcessId:
    """A process that can be told from a later one with the same number: by when it started, in ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """Return the identity of a process that runs now.

        Raises
        ------
        ProcessLookupError
            There is none.
        """
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, started)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return _started(self.pid) == self.started

    def end(self, deadline_s: float = KEEPER_DEADLINE_S) -> None:
        """End it, politely first, if it runs."""
        for number, patience_s in ((signal.SIGTERM, deadline_s), (signal.SIGKILL, 5.0)):
            until_s = time.monotonic() + patience_s
            if self.alive:
                os.kill(self.pid, number)
            while self.alive and time.monotonic() < until_s:
                time.sleep(_POLL_S)


@dataclass(frozen=True)
class SwitchState:
    """A switch that was started, and how often it had to be started again."""

    process: ProcessId
    restarts: int = 0


@dataclass(frozen=True)
class TestbedState:
    """A testbed, whole or half made.

    Parameters
    ----------
    layout
        Everything it consists of. It is on disk before the first part is made.
    keeper
        The process that holds it.
    namespaces
        The names of its network namespaces.
    ready
        Whether all of it was made.
    switches
        The switches that have been started, by name.
    """

    __test__ = False

    layout: Layout
    keeper: ProcessId
    namespaces: tuple[str, ...]
    ready: bool = False
    switches: dict[str, SwitchState] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether its keeper runs."""
        return self.keeper.alive


@dataclass(frozen=True)
class Traces:
    """The part of a testbed's state that it takes to remove it; any version's, for it has to go whoever made it."""

    keeper: ProcessId
    namespaces: tuple[str, ...]
    switches: dict[str, SwitchState] = field(default_factory=dict)


@dataclass(frozen=True)
class StateFile:
    """The file and the other traces of the testbed of one name."""

    name: str = "dlcp"

    def path(self, suffix: str) -> Path:
        """Return the file of this testbed with the given suffix, such as ``.json``."""
        return RUN_FOLDER / f"{self.name}{suffix}"

    def read(self) -> TestbedState | None:
        """Return what is on disk, None if there is no testbed.

        Raises
        ------
        TestbedError
            The file is not what :meth:`write` wrote.
        """
        return self._decode(TestbedState)

    def write(self, state: TestbedState) -> None:
        """Put a state in place of the one on disk, at once."""
        RUN_FOLDER.mkdir(parents=True, exist_ok=True)
        partial = self.path(f".json.{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(state))
        partial.replace(self.path(".json"))

    def update_switch(self, name: str, switch: SwitchState) -> None:
        """Note that a switch runs as this process now."""
        state = self.read()
        assert state is not None
        self.write(dataclasses.replace(state, switches={**state.switches, name: switch}))

    def remove(self) -> int:
        """Take down the testbed that is on disk, whole or half made; return how many processes had to be ended.

        Raises
        ------
        TestbedError
            A process does not end, or a namespace cannot be removed; the state stays, so it can be tried again.
        """
        state = self._decode(Traces)
        if state is None:
            return 0
        ended = sum(process.alive for process in (state.keeper, *(made.process for made in state.switches.values())))
        state.keeper.end()
        for made in state.switches.values():
            made.process.end()
        for name in state.namespaces:
            namespace = NamedNamespace(name)
            ended += len(namespace.pids())
            namespace.remove()
        for path in RUN_FOLDER.glob(f"{self.name}.*"):
            path.unlink()
        return ended

    def _decode(self, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode(self.path(".json").read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise TestbedError(
                f"{self.path('.json')} is no testbed's state: {error}; remove it, and what `ip netns list` shows of it"
            ) from None


def _started(pid: int) -> int | None:
    """Return when a process started, None if it has ended; one that only waits to be reaped has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
