# SPDX-License-Identifier: Apache-2.0
"""Switches that answer P4Runtime: the built-in one and BMv2's, each in a process of its own."""

import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import grpc

from dlcp.host.netlab import Namespace, available
from dlcp.host.processes import end
from dlcp.switch import LoopbackHost
from dlcp.wire import UDP_PORT_BASE
from tests.conformance.packet_socket import PacketSocket
from tests.conformance.simple_switch import mortal
from tests.transport.free_ports import free_port

DEVICE_ID = 7
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 10.0
PACKET_DEADLINE_S = 5.0


class BuiltIn:
    """``dlcp switch --p4runtime``, without a program, with one port on the loopback interface."""

    name = "built-in"

    def __init__(self, *more: str, insecure: bool = True) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.host = _free_host()
        self._arguments = [*(["--insecure"] if insecure else []), *more]
        self.process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def missing() -> str:
        return ""

    def start(self) -> None:
        command = [sys.executable, "-m", "dlcp.cli", "switch", "--port", f"{self.host}=loopback"]
        command += ["--p4runtime", self.address, "--device-id", str(DEVICE_ID), *self._arguments]
        self.process = subprocess.Popen(mortal(command), stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line == f"switch ready: ports {self.host}; P4Runtime on {self.address}\n"

    def kill(self) -> None:
        """End at once, as in a crash."""
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=STOP_DEADLINE_S)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.communicate(timeout=STOP_DEADLINE_S)
            assert self.process.returncode == 0


class Bmv2:
    """simple_switch_grpc without a program; in a network namespace, for its Thrift server listens on all addresses."""

    name = "simple_switch_grpc"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dlcp-p4runtime-")
        self.address = f"unix:{self._folder.name}/grpc"
        self._process: subprocess.Popen[bytes] | None = None
        self._namespace = Namespace("simple_switch_grpc")

    @staticmethod
    def missing() -> str:
        if shutil.which("simple_switch_grpc") is None:
            return "simple_switch_grpc is not on PATH"
        works, reason = available()
        return "" if works else reason

    def start(self) -> None:
        Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)
        notifications = f"ipc://{self._folder.name}/notifications.ipc"
        command = [
            "simple_switch_grpc",
            "--no-p4",
            "--device-id",
            str(DEVICE_ID),
            "--notifications-addr",
            notifications,
        ]
        command += self._more()
        command += ["--", "--grpc-server-addr", self.address, "--priority-queues", "8"]
        self._process = subprocess.Popen(
            mortal(command, self._namespace),
            cwd=self._folder.name,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with grpc.insecure_channel(self.address) as channel:
            grpc.channel_ready_future(channel).result(START_DEADLINE_S)

    def _more(self) -> list[str]:
        return []

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_DEADLINE_S)

    def stop(self) -> None:
        if self._process is not None:
            end(self._process, STOP_DEADLINE_S)

    def close(self) -> None:
        self.stop()
        self._namespace.close()
        self._folder.cleanup()


class PacketBmv2(Bmv2):
    """The same with a socket for packets in place of interfaces."""

    def start(self) -> None:
        super().start()
        self._socket = PacketSocket(self._packets())

    def port(self, data: bytes) -> int | None:
        """Give it a packet on port 1 and return where it comes out; None if it does not in time."""
        self._socket.send(1, data)
        answer = self._socket.receive(PACKET_DEADLINE_S)
        return None if answer is None else answer[0]

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _packets(self) -> str:
        return f"ipc://{self._folder.name}/packets"

    def _more(self) -> list[str]:
        return ["--packet-in", self._packets()]


def _free_host() -> int:
    """Return a port of the built-in switch that no other switch of this machine has."""
    for number in random.sample(range(100, 250), 100):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
            sock.bind((LoopbackHost.numbered(number - 1).alias, UDP_PORT_BASE))
            return number
    raise AssertionError("this machine runs too many switches")
