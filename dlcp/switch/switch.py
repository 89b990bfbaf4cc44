# SPDX-License-Identifier: Apache-2.0
"""The built-in switch: one loop that receives, runs the program, queues, and sends on time.

`Switch` is that loop; `SwitchProcess` runs it in a process of its own, for programs that need one.
"""

import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import wait  # select.select knows no descriptors from 1024 on
from pathlib import Path
from typing import Any, Final, TypeVar

from dlcp import children
from dlcp.closing import Closing, end
from dlcp.namespace import Namespace
from dlcp.switch.executor.program import DROP_PORT, CompiledMachine, Program
from dlcp.switch.forwarding import BatchForwarding, Forwarding, PacketProgram, PlainForwarding
from dlcp.switch.ports import PortGroup
from dlcp.switch.ports.queues import COUNTED, NEVER_NS, PortQueueing, QueueCounters

T = TypeVar("T")

_FD_SETSIZE: Final = 1024
MODERATION_S: Final = 100e-6
"""How long a busy switch sleeps before it looks for packets again, as network cards hold interrupts back. Chosen by
us: it costs no rate, for the line's clock is virtual, delays a packet by less than its own length at 100 Mbit/s, and
lets one wake-up serve several packets."""
SLEEP_MAX_S: Final = 0.5
_PR_SET_TIMERSLACK: Final = 29


class Switch:
    """A switch made of a program, ports, and a queue scheduler for each port.

    Parameters
    ----------
    program
        Decides what happens to a packet.
    groups
        The ports.
    queueing
        How each port queues and sends, by port number; a port that is not named has no rate and BMv2's depths.
    describe_program
        Called by :meth:`snapshot` for what the program has to tell: a dict that JSON can hold.
    clock
        Nanoseconds that never go back; tests pass their own.

    Raises
    ------
    ValueError
        Two groups with the same port, a port number out of range, or queueing for a port that does not exist.
    """

    def __init__(
        self,
        program: PacketProgram,
        groups: Sequence[PortGroup],
        queueing: Mapping[int, PortQueueing] | None = None,
        *,
        describe_program: Callable[[], dict[str, Any]] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.groups = tuple(groups)
        self._describe_program = describe_program
        self._clock = clock
        self._origin_ns = clock()
        self._group_of: dict[int, PortGroup] = {}
        for group in self.groups:
            for port in group.counters:
                if port in self._group_of or not 0 <= port < DROP_PORT:
                    raise ValueError(f"port {port} is given twice" if port in self._group_of else f"no port {port}")
                self._group_of[port] = group
        for port in queueing or {}:
            if port not in self._group_of:
                raise ValueError(f"queueing is given for port {port}, but the ports are {sorted(self._group_of)}")
        self._forwarding = self._make(program, queueing or {})
        self._group_of_fileno = {fileno: group for group in self.groups for fileno in group.filenos()}
        self._idle_ns = 0
        self._stop = threading.Event()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._alarm_read, self._alarm_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._alarm_read, select.EPOLLIN)
        for fileno in self._group_of_fileno:
            self._epoll.register(fileno, select.EPOLLIN)

    @property
    def queues(self) -> Mapping[int, QueueCounters]:
        """The queues of each port."""
        return self._forwarding.queues

    @property
    def ingress_drops(self) -> Mapping[int, int]:
        """Packets that the program dropped in ingress, by the port they came in on."""
        return self._forwarding.ingress_drops

    @property
    def no_port(self) -> int:
        """Packets that the program sent to a port that does not exist."""
        return self._forwarding.no_port

    def now_ns(self) -> int:
        """Return nanoseconds since the switch was made; what the program sees, in microseconds, as time stamps."""
        return self._clock() - self._origin_ns

    def run(self, snapshot_path: Path | None = None, snapshot_every_s: float = 1.0) -> None:
        """Switch packets until :meth:`stop` is called.

        With ``snapshot_path``, the counters are written there as JSON from time to time and at the end; each write
        replaces the file at once, so that a reader never sees half of one.
        """
        _sharpen_timers()
        next_snapshot_s = 0.0
        while not self._stop.is_set():
            self.turn(SLEEP_MAX_S)
            if snapshot_path is not None and time.monotonic() >= next_snapshot_s:
                next_snapshot_s = time.monotonic() + snapshot_every_s
                self.write_snapshot(snapshot_path)
        if snapshot_path is not None:
            self.write_snapshot(snapshot_path)

    def stop(self) -> None:
        """Make :meth:`run` return soon; may be called from a signal handler or another thread."""
        self._stop.set()
        self._wake()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the loop call ``function`` between two bursts; may be called from any thread.

        No packet is looked at meanwhile, so the function may change entries, or the program itself, and should take
        less than a millisecond. What it returns or raises is in the future; wait for that with a deadline, for a switch
        that does not run calls nothing.
        """
        future: Future[T] = Future()
        self._calls.append((function, future))
        self._wake()
        return future

    def replace(self, program: PacketProgram) -> None:
        """Go on with another program; for a function that :meth:`call` has the loop call.

        Packets that wait in queues are dropped, for only their own program knows what it noted about them; what is on a
        line arrives at once. What has been counted stays.
        """
        before = self._forwarding
        before.finish()
        self._forwarding = self._make(program, {port: queues.queueing for port, queues in before.queues.items()})
        self._forwarding.adopt(before)

    @contextmanager
    def running(self) -> Iterator["Switch"]:
        """Run in a thread of this process for as long as the ``with`` block lasts."""
        thread = threading.Thread(target=self.run, name="dlcp-switch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()

    def close(self) -> None:
        """Close the ports."""
        while self._calls:
            self._calls.popleft()[1].cancel()
        self._epoll.close()
        os.close(self._alarm_read)
        os.close(self._alarm_write)
        for group in self.groups:
            group.close()

    def turn(self, sleep_max_s: float) -> None:
        """Sleep until something is due or comes in, at most ``sleep_max_s``, and treat it."""
        for _ in range(len(self._calls)):
            self._answer(*self._calls.popleft())
        forwarding = self._forwarding
        began_ns = self.now_ns()
        if sleep_max_s and forwarding.wake_ns != NEVER_NS:
            time.sleep(MODERATION_S)
        wait_s = min((forwarding.wake_ns - self.now_ns()) * 1e-9, sleep_max_s)
        if wait_s > 0:
            # select sleeps by the microsecond, but knows no descriptors from 1024 on; epoll knows milliseconds only.
            if self._epoll.fileno() < _FD_SETSIZE:
                select.select([self._epoll], [], [], wait_s)
            else:
                self._epoll.poll(wait_s)
        now_ns = self.now_ns()
        self._idle_ns += now_ns - began_ns
        ready = []
        for fileno, _ in self._epoll.poll(0):
            if fileno == self._alarm_read:
                os.read(fileno, 4096)
            else:
                ready.append(fileno)
        if ready:
            forwarding.take_in(ready)
        elif forwarding.wake_ns <= now_ns:
            forwarding.serve(now_ns)

    def snapshot(self) -> dict[str, Any]:
        """Return all counters as a dict that JSON can hold."""
        for group in self.groups:
            group.refresh()
        now_ns = self.now_ns()
        return {
            "uptime_s": now_ns * 1e-9,
            "busy": 1 - self._idle_ns / now_ns if now_ns else 0.0,
            "late_max_s": self._forwarding.late_max_ns * 1e-9,
            "no_port": self.no_port,
            "ports": [self._port_snapshot(port) for port in sorted(self.queues)],
            "program": self._describe_program() if self._describe_program else {},
        }

    def write_snapshot(self, path: Path) -> None:
        """Write :meth:`snapshot` to a file as JSON, replacing it at once."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.snapshot()), encoding="utf-8")
        partial.replace(path)

    def _wake(self) -> None:
        """End the sleep of the loop, if it sleeps."""
        # A pipe that is full has woken it already.
        with suppress(BlockingIOError):
            os.write(self._alarm_write, b"\0")

    @staticmethod
    def _answer(function: Callable[[], Any], future: "Future[Any]") -> None:
        """Call a function that :meth:`call` was given."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _port_snapshot(self, port: int) -> dict[str, Any]:
        queues = self.queues[port]
        counted = zip(*(getattr(queues, name) for name in COUNTED), strict=True)
        return {
            "port": port,
            "leads_to": self._group_of[port].describe(port),
            "rate_bps": queues.queueing.rate_bps,
            "ingress_drops": self.ingress_drops[port],
            "lost": queues.lost,
            "lost_arriving": queues.lost_arriving,
            **asdict(self._group_of[port].counters[port]),
            "queues": [
                {"queue": queue, "depth": queues.depth(queue), **dict(zip(COUNTED, numbers, strict=True))}
                for queue, numbers in enumerate(counted)
            ],
        }

    def _make(self, program: PacketProgram, queueing: Mapping[int, PortQueueing]) -> Forwarding:
        """Return what runs a program: batches for one that is compiled."""
        machine = program.machine if isinstance(program, Program) else None
        if isinstance(machine, CompiledMachine):
            return BatchForwarding(machine, self._group_of, queueing, self.now_ns)
        return PlainForwarding(program, self._group_of, queueing, self.now_ns)


def _sharpen_timers() -> None:
    """Ask the kernel to wake this thread within a microsecond of the time asked for; its default is 50."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


READY: Final = "switch ready"
"""How the line begins that `dlcp switch` prints once it takes packets."""
_START_DEADLINE_S: Final = 180.0
"""Longer than any program takes to load, Numba's compilation included."""
_STOP_DEADLINE_S: Final = 10.0


class SwitchProcessError(RuntimeError):
    """The switch did not start, or ended before it was asked to; the message has what it printed."""


class SwitchProcess(Closing):
    """``dlcp switch`` as a child process; a context manager. When made, it takes packets.

    Parameters
    ----------
    arguments
        What follows ``dlcp switch`` on a command line.
    namespace
        Where to run, for packet ports; this process's own network otherwise.
    counters_every_s
        How old :meth:`snapshot` may be, in seconds.

    Raises
    ------
    SwitchProcessError
        It did not start.
    """

    def __init__(
        self, arguments: Sequence[str], *, namespace: Namespace | None = None, counters_every_s: float = 0.2
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dlcp-switch-")
        self._counters = Path(self._folder.name) / "counters.json"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        argv = ["switch", *arguments]
        argv += ["--counters", str(self._counters), "--counters-every", str(counters_every_s)]
        popen = subprocess.Popen if namespace is None else namespace.popen
        self._process: subprocess.Popen[bytes]
        self._process, self._lifeline = children.start(
            "dlcp.cli", *argv, popen=popen, stdout=subprocess.PIPE, stderr=self._errors
        )
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def snapshot(self) -> dict[str, Any]:
        """Return the counters as they were a moment ago; after :meth:`stop`, as they were at the end.

        Raises
        ------
        SwitchProcessError
            The switch has ended by itself.
        """
        if self._process.poll() not in (None, 0):
            raise SwitchProcessError(f"the switch has ended: {self._printed()}")
        snapshot: dict[str, Any] = json.loads(self._counters.read_text(encoding="utf-8"))
        return snapshot

    def stop(self) -> dict[str, Any]:
        """Stop the switch and return its last counters."""
        self._process.terminate()
        self._process.wait(_STOP_DEADLINE_S)
        return self.snapshot()

    def close(self) -> None:
        """Stop the switch, if it runs, and remove what it wrote."""
        end(self._process, _STOP_DEADLINE_S)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def _await_ready(self) -> None:
        """Wait for the line that says that packets are taken, and for the first counters."""
        deadline = time.monotonic() + _START_DEADLINE_S
        output = self._process.stdout
        assert output is not None
        if not wait([output.fileno()], _START_DEADLINE_S):
            raise SwitchProcessError(f"the switch is not ready after {_START_DEADLINE_S:.0f} s: {self._printed()}")
        if not output.readline().decode().startswith(READY):
            self._process.wait(_STOP_DEADLINE_S)
            raise SwitchProcessError(f"the switch did not start: {self._printed()}")
        while not self._counters.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SwitchProcessError(f"the switch did not run: {self._printed()}")
            time.sleep(0.005)

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or "it printed nothing"
