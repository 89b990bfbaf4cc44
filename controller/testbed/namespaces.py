# SPDX-License-Identifier: Apache-2.0
"""Network namespaces with names, which outlive the process that made them: what ``ip netns`` shows.

A name keeps a namespace in being, so no other can take its place, and whatever runs in it can be found and ended, also
after a crash. A switch answers P4Runtime (and BMv2 Thrift, on all addresses, to anyone) only within its own namespace:
controllers are outside, and reach it at an address of this machine's loopback that leads in.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from dlcp.closing import Closing
from dlcp.controller.testbed import TestbedError, came_true
from dlcp.namespace import enter

_FOLDER: Final = Path("/run/netns")
"""Where iproute2 keeps the names."""
END_DEADLINE_S: Final = 5.0

_T = TypeVar("_T")


class NamedNamespace:
    """A network namespace that has a name.

    Parameters
    ----------
    name
        As ``ip netns list`` shows it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def path(self) -> str:
        """The file that stands for it."""
        return str(_FOLDER / self.name)

    @property
    def exists(self) -> bool:
        """Whether there is a namespace of this name."""
        return Path(self.path).exists()

    def attach(self, pid: int) -> None:
        """Give this name to the namespace of a process.

        Raises
        ------
        TestbedError
            The name is taken, or namespaces cannot be given names here.
        """
        ip("netns", "attach", self.name, str(pid))

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function in a thread that is in this namespace; sockets it makes stay in there."""
        results: list[_T] = []
        errors: list[BaseException] = []

        def enter_and_call() -> None:
            try:
                enter(self.path)
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=enter_and_call, name=f"dlcp-{self.name}")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def popen(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process in this namespace; options as for ``subprocess.Popen``."""
        return self.call(lambda: subprocess.Popen(argv, **options))

    def pids(self) -> list[int]:
        """Return the processes that are in this namespace."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()] if self.exists else []

    def clear(self) -> int:
        """End all processes in this namespace, politely first, and return how many there were.

        Raises
        ------
        TestbedError
            Some did not end.
        """
        began = self.pids()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.pids():
                _signal(pid, number)
            came_true(lambda: not self.pids(), END_DEADLINE_S)
        left = self.pids()
        if left:
            raise TestbedError(f"namespace {self.name}: processes {left} do not end; they wait in the kernel")
        return len(began)

    def remove(self) -> None:
        """End what runs in it, and let it and its interfaces go."""
        if self.exists:
            self.clear()
            ip("netns", "delete", self.name)


def run_in(namespace: NamedNamespace, *argv: str) -> str:
    """Run a program to its end in a namespace and return what it prints.

    Raises
    ------
    TestbedError
        With what it said.
    """
    done = namespace.call(lambda: subprocess.run(argv, capture_output=True, text=True, check=False))
    if done.returncode:
        raise TestbedError(f"{namespace.name}: {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def ip(*arguments: str) -> str:
    """Run ``ip`` of iproute2 and return what it prints.

    Raises
    ------
    TestbedError
        With what it said.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


LOOPBACK: Final = "127.0.0.1"
_START_DEADLINE_S: Final = 10.0
_CHUNK_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Way:
    """A port of this machine's loopback that leads to one of a namespace's."""

    outside: int
    namespace: str
    inside: int


class Doorways(Closing):
    """Carries connections along ways, in a thread; a context manager.

    Parameters
    ----------
    ways
        From where to where.

    Raises
    ------
    TestbedError
        A port is taken.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dlcp-doorways", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(ways), self._loop).result(_START_DEADLINE_S)
        except OSError as error:
            self.close()
            raise TestbedError(f"no way in to the switches: {error.strerror}") from error

    def close(self) -> None:
        """Let no more connections in; those there are end with this process."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_DEADLINE_S)

    async def _open(self, ways: Sequence[Way]) -> None:
        for way in ways:

            async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way = way) -> None:
                await _carry(way, reader, writer)

            await asyncio.start_server(carry, LOOPBACK, way.outside)


def connect(namespace: str, port: int) -> socket.socket:
    """Return a connection to a server on the loopback of a namespace.

    Raises
    ------
    OSError
        Nobody answers.
    """
    return NamedNamespace(namespace).call(lambda: socket.create_connection((LOOPBACK, port), timeout=5))


def free_ports(count: int) -> list[int]:
    """Return ports of this machine's loopback that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


async def _carry(way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry one connection, until either end closes it."""
    try:
        inside = await asyncio.to_thread(connect, way.namespace, way.inside)
        inside.setblocking(False)
        far_reader, far_writer = await asyncio.open_connection(sock=inside)
    except OSError:
        writer.close()  # the switch is away; the controller tries again
        return
    await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    writer.close()
