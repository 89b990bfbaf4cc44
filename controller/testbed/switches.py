# SPDX-License-Identifier: Apache-2.0
"""The programs that play the switches of a testbed: how each is started, and made to send at a port's rate."""

import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any, Final

from dlcp.controller.testbed.doorway import LOOPBACK, Way, connect
from dlcp.controller.testbed.errors import TestbedError
from dlcp.controller.testbed.layout import SwitchPlan
from dlcp.controller.testbed.requirements import SwitchKind
from dlcp.controller.testbed.shaping import shrink_packet_buffers
from dlcp.controller.testbed.state import StateFile

from dlcp.closing import end

START_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 10.0
CONTROL_PORT: Final = 9559
THRIFT_PORT: Final = 9090
"""The same in every switch's namespace, whose addresses are the switch's own."""
PRIORITY_QUEUES: Final = 8
_POLL_S: Final = 0.02


class SwitchProgram(ABC):
    """A switch as a process in its namespace. It starts empty: what it does, a controller tells it by P4Runtime.

    Parameters
    ----------
    plan
        Its ports and its socket.
    files
        Where its log goes.
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
    def ways(self) -> list[Way]:
        """The ways in to its servers."""
        return [Way(self.plan.control_port, self.plan.namespace, CONTROL_PORT)]

    @property
    def pid(self) -> int:
        """The process id; 0 if it was not started."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and return when it answers on its socket.

        Raises
        ------
        TestbedError
            It ended, or did not answer in time; the message has what it said.
        """
        with self.log.open("ab") as log:
            self._process = self._popen(log)
        self._await_answer(self._process)

    def stop(self) -> None:
        """End it, politely first."""
        if self._process is not None:
            end(self._process, STOP_DEADLINE_S)

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:].strip() or "it printed nothing"

    def _popen(self, log: IO[bytes]) -> "subprocess.Popen[Any]":
        # This way /sys shows it the interfaces of its namespace, where BMv2 looks for the state of its ports.
        argv = ["ip", "netns", "exec", self.plan.namespace, *self.argv]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _await_answer(self, process: "subprocess.Popen[Any]") -> None:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if process.poll() is not None:
                raise TestbedError(f"switch {self.plan.name} ended with status {process.returncode}: {self.said()}")
            if time.monotonic() > deadline_s:
                raise TestbedError(
                    f"switch {self.plan.name} does not answer after {START_DEADLINE_S:.0f} s: {self.said()}"
                )
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        """Say whether it listens for a controller."""
        try:
            connect(self.plan.namespace, CONTROL_PORT).close()
        except OSError:
            return False
        return True


class Bmv2(SwitchProgram):
    """``simple_switch_grpc``. Its ports are shaped by the interfaces behind them (see ``shaping``)."""

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
    def ways(self) -> list[Way]:
        """The ways in to its servers, Thrift's among them."""
        return [*super().ways, Way(self.plan.thrift_port, self.plan.namespace, THRIFT_PORT)]

    def start(self) -> None:
        """Start it, and make its sockets hold as little as they can, so that what waits, waits in its queues."""
        super().start()
        shrink_packet_buffers(self.pid)


class Builtin(SwitchProgram):
    """``dlcp switch``, whose ports have a rate of their own."""

    kind = "builtin"

    @property
    def counters(self) -> Path:
        """The file into which it writes its counters."""
        return self._files.path(f".{self.plan.name}.counters.json")

    @property
    def argv(self) -> list[str]:
        """The command line."""
        ports = self.plan.ports
        return [
            *(sys.executable, "-m", "dlcp.cli", "switch"),
            *(word for port in ports for word in ("--port", f"{port.number}=packet:{port.interface}")),
            *(word for port in ports for word in ("--rate-bps", f"{port.number}={port.rate_bps}")),
            *(word for port in ports for word in ("--depth-packets", f"{port.number}={port.depth_packets}")),
            *("--p4runtime", f"{LOOPBACK}:{CONTROL_PORT}", "--insecure", "--device-id", str(self.plan.device_id)),
            *("--counters", str(self.counters), "--counters-every", "0.2"),
        ]


def make(kind: SwitchKind, plan: SwitchPlan, files: StateFile) -> SwitchProgram:
    """Return the program that plays a switch."""
    return Bmv2(plan, files) if kind == "bmv2" else Builtin(plan, files)
