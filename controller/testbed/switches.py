# SPDX-License-Identifier: Apache-2.0
"""Start the switch programs of a testbed, and make them send at their ports' rates.

BMv2's own rate is per priority queue: a port with k busy queues would send at k times the rate, and strict priority
would have no effect. Instead, its egress interfaces have a token bucket (``tbf``) and its packet sockets have small
send buffers. Then a send blocks while the interface is busy, and packets wait in BMv2's queues, as on a link of that
rate.
"""

import contextlib
import ctypes
import errno
import os
import socket
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any, Final

from dlcp.controller.testbed import TestbedError, came_true
from dlcp.controller.testbed.layout import StateFile, SwitchPlan
from dlcp.controller.testbed.proxy import LOOPBACK, ForwardedPort, connect
from dlcp.controller.testbed.requirements import SwitchKind
from dlcp.processes import end, python_command

PORT_BURST_BYTES: Final = 3_028
"""Largest burst after a pause: two full frames. With less, the rate would fall whenever a timer is late."""
PORT_LIMIT_BYTES: Final = 262_144
"""More than a socket's send buffer holds, so that the token bucket itself never drops."""
SEND_BUFFER_BYTES: Final = 8_192
"""Send buffer of a packet socket, before the kernel doubles it: about seven full frames with their overhead."""
_PIDFD_GETFD: Final = 438
"""Number of the system call, the same on every architecture."""


def shrink_packet_buffers(pid: int) -> None:
    """Shrink the send buffers of all packet sockets of a process.

    The sockets are duplicated from outside (``pidfd_getfd``): libpcap opens them with the system default and has no
    option for their size, and changing the default would affect every program of the machine.

    Raises
    ------
    TestbedError
        The process's sockets cannot be duplicated, or none is a packet socket.
    """
    pidfd = os.pidfd_open(pid)
    try:
        found = [fd for fd in _sockets(pid) if _shrink(pidfd, fd)]
    finally:
        os.close(pidfd)
    if not found:
        raise TestbedError(f"process {pid} has no packet socket: it has not opened its ports")


def _sockets(pid: int) -> list[int]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if str(link.readlink()).startswith("socket:"):
                found.append(int(link.name))
    return found


def _shrink(pidfd: int, fd: int) -> bool:
    """Shrink the send buffer of one socket of a process if it is a packet socket; return whether it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        number = ctypes.get_errno()
        if number == errno.EBADF:  # closed since
            return False
        raise TestbedError(
            f"cannot duplicate the switch's sockets: {os.strerror(number)}; this needs root and Linux 5.6 or newer"
        )
    with socket.socket(fileno=copy) as sock:
        if sock.family != socket.AF_PACKET:
            return False
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return True


_START_DEADLINE_S: Final = 60.0
_STOP_DEADLINE_S: Final = 10.0
CONTROL_PORT: Final = 9559
THRIFT_PORT: Final = 9090
"""These ports are the same for all switches: each has a namespace of its own."""
PRIORITY_QUEUES: Final = 8


class SwitchProgram(ABC):
    """A switch as a process in its namespace. It starts without a program, which a controller installs over P4Runtime.

    Parameters
    ----------
    plan
        Its namespace and its ports.
    files
        The testbed's files, for its log.
    """

    kind: SwitchKind

    def __init__(self, plan: SwitchPlan, files: StateFile) -> None:
        self.plan = plan
        self.log = files.path(f".{plan.name}.log")
        self._files = files
        self._process: subprocess.Popen[Any] | None = None

    @property
    @abstractmethod
    def argv(self) -> list[str]:
        """The command line."""

    @property
    def forwarded(self) -> list[ForwardedPort]:
        """The forwarded ports of its servers."""
        return [ForwardedPort(self.plan.control_port, self.plan.namespace, CONTROL_PORT)]

    @property
    def pid(self) -> int:
        """The process id; 0 if it was not started."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, and wait until it accepts connections.

        Raises
        ------
        TestbedError
            It exited, or did not answer in time; the message has the end of its log.
        """
        with self.log.open("ab") as log:
            self._process = self._popen(log)
        self._await_answer(self._process)

    def stop(self) -> None:
        """End the process, first with SIGTERM, then by force."""
        if self._process is not None:
            end(self._process, _STOP_DEADLINE_S)

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:].strip() or "it printed nothing"

    def _popen(self, log: IO[bytes]) -> "subprocess.Popen[Any]":
        # `ip netns exec` remounts /sys for the namespace, where BMv2 reads the state of its ports.
        argv = ["ip", "netns", "exec", self.plan.namespace, *self.argv]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _await_answer(self, process: "subprocess.Popen[Any]") -> None:
        in_time = came_true(lambda: process.poll() is not None or self._answers(), _START_DEADLINE_S)
        if process.poll() is not None:
            raise TestbedError(f"switch {self.plan.name} exited with status {process.returncode}: {self.said()}")
        if not in_time:
            raise TestbedError(
                f"switch {self.plan.name} does not answer after {_START_DEADLINE_S:.0f} s: {self.said()}"
            )

    def _answers(self) -> bool:
        """Return whether it accepts connections of a controller."""
        try:
            connect(self.plan.namespace, CONTROL_PORT).close()
        except OSError:
            return False
        return True


class Bmv2(SwitchProgram):
    """``simple_switch_grpc``. The interfaces behind its ports limit their rate."""

    kind = "bmv2"

    @property
    def argv(self) -> list[str]:
        """The command line. Without ``--priority-queues`` a packet of any priority but the lowest is dropped."""
        plan = self.plan
        return [
            *("simple_switch_grpc", "--no-p4", "--device-id", str(plan.device_id), "--log-level", "off"),
            *(word for port in plan.ports for word in ("-i", f"{port.number}@{port.interface}")),
            *("--thrift-port", str(THRIFT_PORT)),
            *("--notifications-addr", f"ipc://{self._files.path(f'.{plan.name}.notifications')}"),
            *("--", "--priority-queues", str(PRIORITY_QUEUES), "--grpc-server-addr", f"{LOOPBACK}:{CONTROL_PORT}"),
        ]

    @property
    def forwarded(self) -> list[ForwardedPort]:
        """The forwarded ports of its servers, including Thrift's."""
        return [*super().forwarded, ForwardedPort(self.plan.thrift_port, self.plan.namespace, THRIFT_PORT)]

    def start(self) -> None:
        """Start it and shrink its sockets' send buffers, so that waiting packets are in its queues."""
        super().start()
        shrink_packet_buffers(self.pid)


class Builtin(SwitchProgram):
    """``dlcp switch``, whose ports limit their own rate."""

    kind = "builtin"

    @property
    def counters(self) -> Path:
        """The file of its counters."""
        return self._files.path(f".{self.plan.name}.counters.json")

    @property
    def argv(self) -> list[str]:
        """The command line."""
        ports = self.plan.ports
        return [
            *python_command("dlcp.cli", "switch"),
            *(word for port in ports for word in ("--port", f"{port.number}=packet:{port.interface}")),
            *(word for port in ports for word in ("--rate-bps", f"{port.number}={port.rate_bps}")),
            *(word for port in ports for word in ("--depth-packets", f"{port.number}={port.depth_packets}")),
            *("--p4runtime", f"{LOOPBACK}:{CONTROL_PORT}", "--insecure", "--device-id", str(self.plan.device_id)),
            *("--counters", str(self.counters), "--counters-every", "0.2"),
        ]


def make(kind: SwitchKind, plan: SwitchPlan, files: StateFile) -> SwitchProgram:
    """Return the program for a switch."""
    return Bmv2(plan, files) if kind == "bmv2" else Builtin(plan, files)
