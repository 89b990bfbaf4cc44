# SPDX-License-Identifier: Apache-2.0
"""The built-in switch: one loop that receives, runs the program, queues, and sends on time.

`Switch` is that loop; `SwitchProcess` runs it in a child process.
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
from multiprocessing.connection import wait  # select.select takes only descriptors below 1024
from pathlib import Path
from typing import Any, Final, TypeVar

from dlcp.host import processes
from dlcp.host.closing import Closing
from dlcp.host.netlab import NetworkNamespace
from dlcp.host.processes import end
from dlcp.switch.event_counters import EgressEvent, IngressEvent, decode_events, event_totals
from dlcp.switch.executor.program import CompiledMachine, Program
from dlcp.switch.forwarding import BatchForwarding, Forwarding, PacketProgram, PlainForwarding
from dlcp.switch.ports import PortGroup
from dlcp.switch.queues import COUNTED, DROP_PORT, NEVER_NS, PortQueueing, PortQueues

T = TypeVar("T")

_FD_SETSIZE: Final = 1024
MODERATION_S: Final = 100e-6
"""Sleep of a busy switch before it polls again, like interrupt moderation in network cards. It costs no rate, since the
line's clock is virtual, delays a packet by less than its transmission time at 100 Mbit/s, and lets one wake-up serve
several packets."""
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
        Queueing of each port, by port number; other ports have no rate limit and BMv2's depths.
    clock
        Monotonic clock in nanoseconds; tests pass their own.

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
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.groups = tuple(groups)
        self._program = program
        self._clock = clock
        self._origin_ns = clock()
        self._group_of: dict[int, PortGroup] = {}
        for group in self.groups:
            for port in group.counters:
                if port in self._group_of or not 0 <= port < DROP_PORT:
                    wrong = "is given twice" if port in self._group_of else f"is outside 0..{DROP_PORT - 1}"
                    raise ValueError(f"port {port} {wrong}")
                self._group_of[port] = group
        for port in queueing or {}:
            if port not in self._group_of:
                raise ValueError(f"queueing is given for port {port}, but the ports are {sorted(self._group_of)}")
        self._forwarding = self._make(program, queueing or {})
        self._idle_ns = 0
        self._stop = threading.Event()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._alarm_read, self._alarm_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._alarm_read, select.EPOLLIN)
        for group in self.groups:
            for fileno in group.filenos():
                self._epoll.register(fileno, select.EPOLLIN)

    @property
    def queues(self) -> Mapping[int, PortQueues]:
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
        """Return nanoseconds since the switch was made; the program's time stamps are this in microseconds."""
        return self._clock() - self._origin_ns

    def run(self, snapshot_path: Path | None = None, snapshot_every_s: float = 1.0) -> None:
        """Switch packets until :meth:`stop` is called.

        With ``snapshot_path``, write the counters there as JSON every ``snapshot_every_s`` and at the end. Each write
        replaces the file atomically.
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
        """Call ``function`` on the loop's thread between two bursts; may be called from any thread.

        No packet is processed meanwhile, so the function may change entries or the program, and should take less than
        a millisecond. The future holds its result or exception; wait with a timeout, since a switch that is not
        running calls nothing.
        """
        future: Future[T] = Future()
        self._calls.append((function, future))
        self._wake()
        return future

    def replace(self, program: PacketProgram) -> None:
        """Continue with another program; run this on the loop's thread, through :meth:`call`.

        Queued packets are dropped, since only their own program can interpret what its ingress noted about them.
        Packets on a line arrive at once. The counters are kept.
        """
        before = self._forwarding
        before.finish()
        self._forwarding = self._make(program, {port: queues.queueing for port, queues in before.queues.items()})
        self._forwarding.adopt(before)
        self._program = program

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
        """Sleep until a packet is due or arrives, at most ``sleep_max_s``, and process it."""
        for _ in range(len(self._calls)):
            self._answer(*self._calls.popleft())
        forwarding = self._forwarding
        began_ns = self.now_ns()
        if sleep_max_s and forwarding.wake_ns != NEVER_NS:
            time.sleep(MODERATION_S)
        wait_s = min((forwarding.wake_ns - self.now_ns()) * 1e-9, sleep_max_s)
        if wait_s > 0:
            # select takes microseconds, but only descriptors below 1024; epoll takes only milliseconds.
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
        """Return all counters as a JSON-serializable dict."""
        for group in self.groups:
            group.refresh()
        now_ns = self.now_ns()
        return {
            "uptime_s": now_ns * 1e-9,
            "busy": 1 - self._idle_ns / now_ns if now_ns else 0.0,
            "late_max_s": self._forwarding.late_max_ns * 1e-9,
            "no_port": self.no_port,
            "ports": [self._port_snapshot(port) for port in sorted(self.queues)],
            "program": _describe(self._program) if isinstance(self._program, Program) else {},
        }

    def write_snapshot(self, path: Path) -> None:
        """Write :meth:`snapshot` to a file as JSON, replacing it atomically."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.snapshot()), encoding="utf-8")
        partial.replace(path)

    def _wake(self) -> None:
        """Wake the loop if it is sleeping."""
        # A full pipe has already woken it.
        with suppress(BlockingIOError):
            os.write(self._alarm_write, b"\0")

    @staticmethod
    def _answer(function: Callable[[], Any], future: "Future[Any]") -> None:
        """Call a function passed to :meth:`call` and complete its future."""
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
        counted = zip(*(getattr(queues, name) for name in ("depths", *COUNTED)), strict=True)
        return {
            "port": port,
            "leads_to": self._group_of[port].describe(port),
            "rate_bps": queues.queueing.rate_bps,
            "ingress_drops": self.ingress_drops[port],
            "lost": queues.lost,
            "lost_arriving": queues.lost_arriving,
            **asdict(self._group_of[port].counters[port]),
            "queues": [
                {"queue": queue, **dict(zip(("depth", *COUNTED), numbers, strict=True))}
                for queue, numbers in enumerate(counted)
            ],
        }

    def _make(self, program: PacketProgram, queueing: Mapping[int, PortQueueing]) -> Forwarding:
        """Return the forwarding for a program: in batches if the program is compiled."""
        machine = program.machine if isinstance(program, Program) else None
        if isinstance(machine, CompiledMachine):
            return BatchForwarding(machine, self._group_of, queueing, self.now_ns)
        return PlainForwarding(program, self._group_of, queueing, self.now_ns)


def _describe(program: Program) -> dict[str, Any]:
    """Return a program's counters by the names of their events, as plain values."""
    found = {}
    for name, events in (("ingress_events", IngressEvent), ("egress_events", EgressEvent)):
        # A controller may have sent a program that counts other things.
        if name in program.counters:
            counted = program.counters[name].values()
            decoded = decode_events(events, counted[:, 0], counted[:, 1])
            found[name] = {"totals": event_totals(decoded), "by_queue": [event._asdict() for event in decoded]}
    return {"digest": program.digest, "backend": program.backend, **found}


def _sharpen_timers() -> None:
    """Set this thread's timer slack to 1 us; the kernel's default is 50 us."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


READY: Final = "switch ready"
"""Start of the line that `dlcp switch` prints once it forwards packets."""
_START_DEADLINE_S: Final = 180.0
"""Longer than any program takes to load, including Numba compilation."""
_STOP_DEADLINE_S: Final = 10.0


class SwitchProcessError(RuntimeError):
    """The switch did not start or exited early; the message includes its output."""


class SwitchProcess(Closing):
    """``dlcp switch`` as a child process and context manager; it forwards packets once constructed.

    Parameters
    ----------
    arguments
        Command-line arguments of ``dlcp switch``.
    namespace
        Network namespace to run in, for packet ports; this process's own by default.
    documents
        What the files of further options hold, by option, such as ``{"--entries": {...}}``; JSON-serializable.
    counters_every_s
        Maximum age of a :meth:`snapshot`, in seconds.

    Raises
    ------
    SwitchProcessError
        It did not start.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        namespace: NetworkNamespace | None = None,
        documents: Mapping[str, Any] | None = None,
        counters_every_s: float = 0.2,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dlcp-switch-")
        self._counters = Path(self._folder.name) / "counters.json"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        argv = ["switch", *arguments]
        for option, document in (documents or {}).items():
            path = Path(self._folder.name, option.lstrip("-")).with_suffix(".json")
            path.write_text(json.dumps(document), encoding="utf-8")
            argv += [option, str(path)]
        argv += ["--counters", str(self._counters), "--counters-every", str(counters_every_s)]
        popen = subprocess.Popen if namespace is None else namespace.popen
        self._process: subprocess.Popen[bytes]
        self._process, self._lifeline = processes.start(
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
        """Return the latest counters; after :meth:`stop`, the final ones.

        Raises
        ------
        SwitchProcessError
            The switch has exited unexpectedly.
        """
        if self._process.poll() not in (None, 0):
            raise SwitchProcessError(f"the switch has exited: {self._printed()}")
        snapshot: dict[str, Any] = json.loads(self._counters.read_text(encoding="utf-8"))
        return snapshot

    def stop(self) -> dict[str, Any]:
        """Stop the switch and return its last counters."""
        self._process.terminate()
        self._process.wait(_STOP_DEADLINE_S)
        return self.snapshot()

    def close(self) -> None:
        """Stop the switch if it is running, and remove its files."""
        end(self._process, _STOP_DEADLINE_S)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def _await_ready(self) -> None:
        """Wait for the ready line and the first counters."""
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
                raise SwitchProcessError(f"the switch wrote no counters: {self._printed()}")
            time.sleep(0.005)

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or "it printed nothing"
