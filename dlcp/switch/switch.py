# SPDX-License-Identifier: Apache-2.0
"""The built-in switch: one loop that receives, runs the program, queues, and sends on time."""

import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from dlcp.switch.ports import Burst, PortGroup
from dlcp.switch.program import DROP_PORT
from dlcp.switch.queues import NEVER_NS, QUEUES, PortQueueing, PortQueues

PORTS_MAX: Final = 512
BURST_PACKETS: Final = 32
"""Frames taken from a socket before the others have their turn. Chosen by us: a burst takes less than 1 ms."""
SERVE_EVERY_PACKETS: Final = 8
"""Ingress packets after which departures that fell due meanwhile are served."""
MODERATION_S: Final = 100e-6
"""How long a busy switch sleeps before it looks for packets again, as network cards hold interrupts back. Chosen by
us: it costs no rate, for the line's clock is virtual, delays a packet by less than its own length at 100 Mbit/s, and
lets one wake-up serve several packets."""
SLEEP_MAX_S: Final = 0.5
_PR_SET_TIMERSLACK: Final = 29


class Pipeline(Protocol):
    """What the switch asks of a program; ``dlcp.switch.program.Program`` is one."""

    def ingress(self, packet: bytearray, port: int, now_us: int) -> tuple[int, int, Any]:
        """Return egress port, queue (priority), and what egress needs to know; the packet stays as it is."""

    def egress(
        self,
        packet: bytearray,
        carry: Any,
        port: int,
        enq_us: int,
        deq_delta_us: int,
        enq_depth: int,
        deq_depth: int,
        now_us: int,
    ) -> bool:
        """Edit the packet in place; False when it is to be dropped."""


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
        program: Pipeline,
        groups: Sequence[PortGroup],
        queueing: Mapping[int, PortQueueing] | None = None,
        *,
        describe_program: Callable[[], dict[str, Any]] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.program = program
        self.groups = tuple(groups)
        self._describe_program = describe_program
        self._clock = clock
        self._origin_ns = clock()
        self._group_of: dict[int, PortGroup] = {}
        self.queues: dict[int, PortQueues] = {}
        """The queues of each port."""
        for group in self.groups:
            for port in group.counters:
                if port in self._group_of or not 0 <= port < DROP_PORT:
                    raise ValueError(f"port {port} is given twice" if port in self._group_of else f"no port {port}")
                self._group_of[port] = group
                self.queues[port] = PortQueues((queueing or {}).get(port))
        for port in queueing or {}:
            if port not in self.queues:
                raise ValueError(f"queueing is given for port {port}, but the ports are {sorted(self.queues)}")
        self._group_of_fileno = {fileno: group for group in self.groups for fileno in group.filenos()}
        self._by_port: list[PortQueues | None] = [self.queues.get(port) for port in range(PORTS_MAX)]
        self._active: set[int] = set()
        """Ports that have a packet in a queue or on the line."""
        self._wake_ns = NEVER_NS
        self.ingress_drops = dict.fromkeys(self.queues, 0)
        """Packets that the program dropped in ingress, by the port they came in on."""
        self.no_port = 0
        """Packets that the program sent to a port that does not exist."""
        self._idle_ns = 0
        self._late_max_ns = 0
        self._stop = threading.Event()
        self._alarm_read, self._alarm_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._alarm_read, select.EPOLLIN)
        for fileno in self._group_of_fileno:
            self._epoll.register(fileno, select.EPOLLIN)

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
        os.write(self._alarm_write, b"\0")

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
        self._epoll.close()
        os.close(self._alarm_read)
        os.close(self._alarm_write)
        for group in self.groups:
            group.close()

    def turn(self, sleep_max_s: float) -> None:
        """Serve what is due, sleep until something is, at most ``sleep_max_s``, and take in what has come."""
        now_ns = self.now_ns()
        if self._wake_ns <= now_ns:
            self._serve(now_ns)
        if self._active and sleep_max_s:
            time.sleep(MODERATION_S)
        wait_s = min((self._wake_ns - self.now_ns()) * 1e-9, sleep_max_s)
        if wait_s > 0:
            # select sleeps by the microsecond; epoll alone knows milliseconds only.
            select.select([self._epoll], [], [], wait_s)
        self._idle_ns += self.now_ns() - now_ns
        for fileno, _ in self._epoll.poll(0):
            group = self._group_of_fileno.get(fileno)
            if group is not None:
                self._take_in(group.receive(fileno, BURST_PACKETS))

    def snapshot(self) -> dict[str, Any]:
        """Return all counters as a dict that JSON can hold."""
        for group in self.groups:
            group.refresh()
        now_ns = self.now_ns()
        return {
            "uptime_s": now_ns * 1e-9,
            "busy": 1 - self._idle_ns / now_ns if now_ns else 0.0,
            "late_max_s": self._late_max_ns * 1e-9,
            "no_port": self.no_port,
            "ports": [self._port_snapshot(port) for port in sorted(self.queues)],
            "program": self._describe_program() if self._describe_program else {},
        }

    def write_snapshot(self, path: Path) -> None:
        """Write :meth:`snapshot` to a file as JSON, replacing it at once."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.snapshot()), encoding="utf-8")
        partial.replace(path)

    def _port_snapshot(self, port: int) -> dict[str, Any]:
        queues = self.queues[port]
        return {
            "port": port,
            "leads_to": self._group_of[port].describe(port),
            "rate_bps": queues.queueing.rate_bps,
            "ingress_drops": self.ingress_drops[port],
            "lost": queues.lost,
            "lost_arriving": queues.lost_arriving,
            **asdict(self._group_of[port].counters[port]),
            "queues": [
                {
                    "queue": queue,
                    "depth": queues.depth(queue),
                    "max_depth": queues.max_depth[queue],
                    "enqueued": queues.enqueued[queue],
                    "transmitted": queues.transmitted[queue],
                    "transmitted_bytes": queues.transmitted_bytes[queue],
                    "tail_drops": queues.tail_drops[queue],
                    "egress_drops": queues.egress_drops[queue],
                }
                for queue in range(QUEUES)
            ],
        }

    def _take_in(self, burst: Burst) -> None:
        """Run ingress over packets that have come in, and queue what it forwards."""
        ingress, by_port = self.program.ingress, self._by_port
        now_ns = self.now_ns()
        until_serve = 0
        for port, packet in zip(burst.ports, burst.packets, strict=True):
            if not until_serve:
                until_serve = SERVE_EVERY_PACKETS
                now_ns = self.now_ns()
                if self._wake_ns <= now_ns:
                    self._serve(now_ns)
            until_serve -= 1
            arrived_at = self.queues[port]
            if arrived_at.queueing.loss and arrived_at.loses_arriving():
                continue
            egress_port, queue, carry = ingress(packet, port, now_ns // 1000)
            if egress_port == DROP_PORT:
                self.ingress_drops[port] += 1
                continue
            queues = by_port[egress_port]
            if queues is None:
                self.no_port += 1
            elif queues.enqueue(packet, carry, queue, now_ns):
                self._active.add(egress_port)
                wake_ns = queues.wake_ns()
                if wake_ns < self._wake_ns:
                    self._wake_ns = wake_ns
        if self._wake_ns <= now_ns:
            self._serve(now_ns)

    def _serve(self, now_ns: int) -> None:
        """Let everything depart and arrive that is due, and find out when the next thing is."""
        if now_ns - self._wake_ns > self._late_max_ns:
            self._late_max_ns = now_ns - self._wake_ns
        egress = self.program.egress
        next_ns = NEVER_NS
        for port in tuple(self._active):
            queues = self.queues[port]
            while departure := queues.dequeue(now_ns):
                packet, carry, queue, start_ns, enqueued_ns, enq_depth, deq_depth = departure
                start_us, enq_us = start_ns // 1000, enqueued_ns // 1000
                delta_us = start_us - enq_us
                if egress(packet, carry, port, enq_us, delta_us, enq_depth, deq_depth, start_us):
                    queues.transmit(packet, queue)
                else:
                    queues.discard(packet, queue)
            arrived = queues.arrivals(now_ns)
            if arrived:
                self._group_of[port].send(port, arrived)
            wake_ns = queues.wake_ns()
            if wake_ns == NEVER_NS:
                self._active.discard(port)
            elif wake_ns < next_ns:
                next_ns = wake_ns
        self._wake_ns = next_ns


def _sharpen_timers() -> None:
    """Ask the kernel to wake this thread within a microsecond of the time asked for; its default is 50."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
