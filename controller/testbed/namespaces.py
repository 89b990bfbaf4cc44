# SPDX-License-Identifier: Apache-2.0
"""Named network namespaces, as ``ip netns`` shows them, which outlive the process that created them.

The name keeps the namespace alive, so that the processes in it can be found and ended, even after a crash. A switch
serves P4Runtime (and BMv2 also Thrift, on all addresses and without authentication) only within its own namespace.
Controllers run outside, and reach it through a proxy on this machine's loopback.
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
"""iproute2's folder of named namespaces."""
END_DEADLINE_S: Final = 5.0

_T = TypeVar("_T")


class NamedNamespace:
    """A named network namespace.

    Parameters
    ----------
    name
        As ``ip netns list`` shows it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def path(self) -> str:
        """The file that represents it."""
        return str(_FOLDER / self.name)

    @property
    def exists(self) -> bool:
        """Whether a namespace of this name exists."""
        return Path(self.path).exists()

    def attach(self, pid: int) -> None:
        """Give this name to the namespace of a process.

        Raises
        ------
        TestbedError
            The name is taken, or this system does not allow named namespaces.
        """
        ip("netns", "attach", self.name, str(pid))

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function in a thread in this namespace. Sockets that it opens stay in the namespace."""
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
        """Return the ids of the processes in this namespace."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()] if self.exists else []

    def clear(self) -> int:
        """End all processes in this namespace, first with SIGTERM, then with SIGKILL; return how many there were.

        Raises
        ------
        TestbedError
            A process does not end.
        """
        began = self.pids()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.pids():
                _signal(pid, number)
            came_true(lambda: not self.pids(), END_DEADLINE_S)
        left = self.pids()
        if left:
            raise TestbedError(f"namespace {self.name}: processes {left} do not end: they are blocked in the kernel")
        return len(began)

    def remove(self) -> None:
        """End its processes, and delete it with its interfaces."""
        if self.exists:
            self.clear()
            ip("netns", "delete", self.name)


def run_in(namespace: NamedNamespace, *argv: str) -> str:
    """Run a program in a namespace, wait for it, and return its output.

    Raises
    ------
    TestbedError
        It failed; the message has its error output.
    """
    done = namespace.call(lambda: subprocess.run(argv, capture_output=True, text=True, check=False))
    if done.returncode:
        raise TestbedError(f"{namespace.name}: {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def ip(*arguments: str) -> str:
    """Run iproute2's ``ip`` and return its output.

    Raises
    ------
    TestbedError
        It failed; the message has its error output.
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
    """A port of this machine's loopback that is forwarded to a port of a namespace's loopback."""

    outside: int
    namespace: str
    inside: int


class Doorways(Closing):
    """Forwards connections into namespaces, in a thread; a context manager.

    Parameters
    ----------
    ways
        The ports to forward.

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
            raise TestbedError(f"cannot listen for connections to the switches: {error.strerror}") from error

    def close(self) -> None:
        """Accept no more connections; open ones end with this process."""
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
        No server answers.
    """
    return NamedNamespace(namespace).call(lambda: socket.create_connection((LOOPBACK, port), timeout=5))


def free_ports(count: int) -> list[int]:
    """Return ports of this machine's loopback that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


async def _carry(way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one connection until either end closes it."""
    try:
        inside = await asyncio.to_thread(connect, way.namespace, way.inside)
        inside.setblocking(False)
        far_reader, far_writer = await asyncio.open_connection(sock=inside)
    except OSError:
        writer.close()  # the switch is down; the controller retries
        return
    await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    writer.close()
