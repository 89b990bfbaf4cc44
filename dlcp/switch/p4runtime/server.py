# SPDX-License-Identifier: Apache-2.0
"""The P4Runtime server of a switch: an event loop in a thread of its own, beside the packet loop."""

import asyncio
import gc
import re
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from finsy.proto import p4r_grpc

from dlcp.closing import Closing
from dlcp.switch.p4runtime.device import Device
from dlcp.switch.p4runtime.service import Service

PORT: Final = 9559
"""What IANA has registered for P4Runtime."""
MESSAGE_MAX: Final = 64 << 20
"""Longest message that is taken, in bytes: a program, or a batch of half a million updates."""
START_DEADLINE_S: Final = 30.0
STOP_DEADLINE_S: Final = 5.0
SWITCH_INTERVAL_S: Final = 0.2e-3
"""How long this thread may keep the interpreter when the packet loop wants it; Python's own 5 ms would be some ten
times as long as a burst takes. Chosen by us."""
GC_THRESHOLDS: Final = 50_000, 20, 100
"""When the collector looks for cycles, during which nothing else runs: seldom, for entries have none, and ten thousand
of them would have it look at everything several times. Chosen by us."""
_ADDRESS: Final = re.compile(r"(?:(?P<host>\[[^\]]+\]|[^:\[\]]*):)?(?P<port>\d+)|(?P<alone>\[[^\]]+\]|[^:\[\]]+)")


@dataclass(frozen=True)
class TlsFiles:
    """What TLS with certificates on both sides needs: PEM files. Whoever has no certificate of ``ca`` is refused."""

    certificate: Path
    key: Path
    ca: Path

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files; raises OSError if one cannot be read."""
        pair = self.key.read_bytes(), self.certificate.read_bytes()
        return grpc.ssl_server_credentials([pair], self.ca.read_bytes(), require_client_auth=True)


class P4RuntimeServer(Closing):
    """Answers P4Runtime for one switch; a context manager, or :meth:`close` it.

    Parameters
    ----------
    device
        The switch; its packet loop may start later.
    address
        Where to listen; port 0 takes one that is free.
    device_id
        What controllers call this switch.
    tls
        None for plain text, which anyone who can reach the address may use.

    Attributes
    ----------
    address
        Where it listens, as ``HOST:PORT``.

    Raises
    ------
    OSError
        The address cannot be listened on, or a TLS file cannot be read.
    """

    def __init__(
        self, device: Device, address: tuple[str, int], device_id: int = 1, tls: TlsFiles | None = None
    ) -> None:
        self._device, self._device_id = device, device_id
        self._credentials = tls.credentials() if tls is not None else None
        self._started: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        host, port = address
        self._thread = threading.Thread(target=self._run, args=(host, port), name="dlcp-p4runtime", daemon=True)
        self._thread.start()
        try:
            self.address = _join(host, self._started.result(START_DEADLINE_S))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all calls and stop listening."""
        self._device.close()
        with suppress(RuntimeError):  # the thread has closed its loop
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(2 * STOP_DEADLINE_S)

    def _run(self, host: str, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(host, port))
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self, host: str, port: int) -> None:
        options = (
            ("grpc.max_receive_message_length", MESSAGE_MAX),
            # Two switches on one port would each get half the calls.
            ("grpc.so_reuseport", 0),
        )
        server = grpc.aio.server(options=options)
        service = Service(self._device, self._device_id)
        p4r_grpc.add_P4RuntimeServicer_to_server(service, server)
        place = _join(host, port)
        try:
            if self._credentials is None:
                bound = server.add_insecure_port(place)
            else:
                bound = server.add_secure_port(place, self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {place} for P4Runtime: {error}") from None
        await server.start()
        self._started.set_result(bound)
        await self._stop.wait()
        service.close()
        await server.stop(STOP_DEADLINE_S)


def make_way_for_packets() -> None:
    """Set up this process so that its controllers' calls hold packets up less; for a process that is a switch only."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``HOST`` or ``PORT``; this machine alone and port 9559 unless said.

    Raises
    ------
    ValueError
        The text is none of these.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"] or PORT) > 65_535:
        raise ValueError(f"{text!r} is no address to listen on; give HOST:PORT, as in 127.0.0.1:{PORT}")
    host = (found["host"] or found["alone"] or "127.0.0.1").strip("[]")
    return host, int(found["port"] or PORT)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
