# SPDX-License-Identifier: Apache-2.0
"""Ports of this machine's loopback that lead to servers in network namespaces.

A switch serves P4Runtime (and BMv2 also Thrift, on all addresses and without authentication) only within its own
namespace. Controllers run outside, and reach it through a proxy on this machine's loopback.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dlcp.closing import Closing
from dlcp.controller.testbed import TestbedError
from dlcp.netlab import NamedNamespace

LOOPBACK: Final = "127.0.0.1"
_START_DEADLINE_S: Final = 10.0
_CHUNK_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class ForwardedPort:
    """A port of this machine's loopback that is forwarded to a port of a namespace's loopback."""

    outside: int
    namespace: str
    inside: int


class NamespaceProxy(Closing):
    """Forwards connections into namespaces, in a thread; a context manager.

    Parameters
    ----------
    ports
        The ports to forward.

    Raises
    ------
    TestbedError
        A port is taken.
    """

    def __init__(self, ports: Sequence[ForwardedPort]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dlcp-namespace-proxy", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(ports), self._loop).result(_START_DEADLINE_S)
        except OSError as error:
            self.close()
            raise TestbedError(f"cannot listen for connections to the switches: {error.strerror}") from error

    def close(self) -> None:
        """Accept no more connections; open ones end with this process."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_DEADLINE_S)

    async def _open(self, ports: Sequence[ForwardedPort]) -> None:
        for port in ports:

            async def carry(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: ForwardedPort = port
            ) -> None:
                await _carry(port, reader, writer)

            await asyncio.start_server(carry, LOOPBACK, port.outside)


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


async def _carry(port: ForwardedPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one connection until either end closes it."""
    try:
        inside = await asyncio.to_thread(connect, port.namespace, port.inside)
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
