# SPDX-License-Identifier: Apache-2.0
"""Ways into the switches' namespaces: addresses of this machine's loopback that lead to servers in there.

A switch answers P4Runtime (and BMv2 Thrift, on all addresses, to anyone) only within its own namespace. Controllers are
outside, and know it by an address of this machine.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dlcp.controller.testbed.errors import TestbedError
from dlcp.controller.testbed.namespaces import NamedNamespace

from dlcp.closing import Closing

LOOPBACK: Final = "127.0.0.1"
START_DEADLINE_S: Final = 10.0
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
            asyncio.run_coroutine_threadsafe(self._open(ways), self._loop).result(START_DEADLINE_S)
        except OSError as error:
            self.close()
            raise TestbedError(f"no way in to the switches: {error.strerror}") from error

    def close(self) -> None:
        """Let no more connections in; those there are end with this process."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_DEADLINE_S)

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
