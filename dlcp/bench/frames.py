# SPDX-License-Identifier: Apache-2.0
"""Frames from one host to another through whatever lies between, as fast as can be or at a given rate, and checked."""

import threading
import time
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlcp import native
from dlcp.closing import Closing
from dlcp.namespace import StarNetwork
from dlcp.switch import PacketPort, udp_headers
from dlcp.wire import HEADER_BYTES, UDP_PORT_BASE, Header, PacketType

_Rows: TypeAlias = NDArray[np.uint8]
_Numbers: TypeAlias = NDArray[np.int64]

FRAME_SIZE: Final = 1042
"""A gradient packet of 242 floats: what the comparison was first made with."""
NEXT_HOP: Final = "02:00:00:00:01:02"
"""Where the switch is to address frames: not the receiver's own address, so that its kernel ignores them."""
_TICK_S: Final = 200e-6
"""At a given rate, what falls due within this time is sent together. Chosen by us: more often costs the generator more
than the switch, and simple_switch bears longer bursts less well."""
_BURST_PACKETS_MIN: Final = 4
_FLOOD_PACKETS: Final = 64
"""Frames sent together as fast as can be."""
_QUEUES: Final = (2, 3, 4, 5, 6)
"""Queues that the frames are tagged with, in turn: those of gradients."""
_SETTLED_S: Final = 0.15
"""After this long without a frame, none is on its way."""
_DEADLINE_S: Final = 5.0
_TEMPLATES: Final = 320
_UDP_END: Final = 42
_STEP: Final = slice(_UDP_END + 8, _UDP_END + 12)
"""The number of the run stands here, so that what comes late does not count for the next one."""
_INDEX: Final = slice(_UDP_END + 16, _UDP_END + 20)
_TAIL: Final = slice(_UDP_END + 20, FRAME_SIZE)
_TAKEN_MAX: Final = 256
_POLL_S: Final = 0.0005


class TrafficError(RuntimeError):
    """Frames cannot be sent here, or came through other than they should; the message says how."""


@dataclass(frozen=True, slots=True)
class TrafficRun:
    """What became of the frames of one run; rates are in frames/s."""

    sent: int
    sent_pps: float
    received: int
    received_pps: float

    @property
    def lossless(self) -> bool:
        """Whether every frame has come through."""
        return self.received == self.sent


class Traffic(Closing):
    """A generator on host 0 and a receiver on host 1; a context manager. Takes the compiled library."""

    def __init__(self, network: StarNetwork) -> None:
        if native.library() is None:
            raise TrafficError(f"the frame generator needs the compiled library; {native.status()}")
        source, target = network.hosts
        self._out = source.namespace.call(lambda: PacketPort(1, "eth0"))
        try:
            self._in = target.namespace.call(lambda: PacketPort(2, "eth0"))
        except BaseException:
            self._out.close()
            raise
        headers = udp_headers(
            source.mac,
            NEXT_HOP,
            source.address,
            target.address,
            UDP_PORT_BASE,
            UDP_PORT_BASE,
            0,
            FRAME_SIZE - 42,
        )
        tail = np.random.default_rng(1).integers(0, 256, FRAME_SIZE - 42 - HEADER_BYTES, np.uint8).tobytes()
        self._frames: _Rows = np.empty((_TEMPLATES, FRAME_SIZE), np.uint8)
        for number in range(_TEMPLATES):
            tags = Header(PacketType.DATA, 0, _QUEUES[number % len(_QUEUES)], 0, 0, 1, 0, 1, 1, 0, 0, 1 << 20, 7)
            self._frames[number] = np.frombuffer(headers + tags.encode() + tail, np.uint8)
        self._expected = self._frames[0, _TAIL].copy()
        self._mac = np.frombuffer(bytes.fromhex(NEXT_HOP.replace(":", "")), np.uint8)
        self._run = 0
        self._lengths: _Numbers = np.full(_TEMPLATES, FRAME_SIZE)
        self._rows: _Rows = np.empty((_TAKEN_MAX, self._in.frame_max_bytes), np.uint8)

    def close(self) -> None:
        """Close both interfaces."""
        self._out.close()
        self._in.close()

    def run(self, seconds: float, rate_pps: float | None = None) -> TrafficRun:
        """Send for some seconds, at a rate or as fast as can be, and wait for what comes through.

        Raises
        ------
        TrafficError
            A frame came through damaged or twice.
        """
        self._begin()
        receiver = _Receiver(self._in, self._rows, self._expected, self._mac, self._frames[0, _STEP].copy())
        receiver.start()
        try:
            sent, took_s = self._send(seconds, rate_pps)
        finally:
            receiver.finish()
        if receiver.trouble:
            raise TrafficError(receiver.trouble)
        received, over_s = receiver.received, receiver.over_s
        return TrafficRun(sent, sent / took_s, received, (received - 1) / over_s if received > 1 and over_s else 0.0)

    def latency_s(self, count: int, pause_s: float) -> list[float]:
        """Return how long single frames took to come through, with pauses between them."""
        self._begin()
        slots, lengths, stamps = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
        run = self._frames[0, _STEP]
        took = []
        for number in range(count):
            began_ns = time.time_ns()
            self._out.send_rows(1, self._frames, np.array([number % _TEMPLATES]), self._lengths[:1])
            deadline = time.monotonic() + _DEADLINE_S
            while not (self._in.take(self._rows, slots, lengths, stamps) and _are_of(self._rows[:1], run).all()):
                if time.monotonic() > deadline:
                    raise TrafficError(f"frame {number} of {count} has not come through in {_DEADLINE_S:.0f} s")
                time.sleep(_POLL_S)
            took.append((int(stamps[0]) - began_ns) * 1e-9)
            time.sleep(pause_s)
        return took

    def _begin(self) -> None:
        """Give the frames the next run's number, and forget what has come since the last one."""
        self._run += 1
        self._frames[:, _STEP] = np.frombuffer(self._run.to_bytes(4, "big"), np.uint8)
        slots, cells = np.arange(_TAKEN_MAX), np.empty(_TAKEN_MAX, np.int64)
        while self._in.take(self._rows, slots, cells, cells.copy()):
            pass

    def _send(self, seconds: float, rate_pps: float | None) -> tuple[int, float]:
        burst = _FLOOD_PACKETS
        if rate_pps is not None:
            burst = min(max(_BURST_PACKETS_MIN, round(rate_pps * _TICK_S)), _FLOOD_PACKETS)
        frames, lengths, counters = self._frames, self._lengths[:burst], self._out.counters[1]
        indices = frames[:, _INDEX]
        before, number, index = counters.sent, 0, 0
        began = time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            if rate_pps is not None and (ahead_s := index / rate_pps - (now - began)) > 0:
                time.sleep(ahead_s)
            slots = np.arange(number, number + burst) % _TEMPLATES
            indices[slots] = np.arange(index, index + burst, dtype=">u4").view(np.uint8).reshape(burst, 4)
            self._out.send_rows(1, frames, slots, lengths)
            number, index = (number + burst) % _TEMPLATES, index + burst
        return counters.sent - before, time.perf_counter() - began


class _Receiver(threading.Thread):
    """Fetches, counts and checks a run's frames until none comes any more."""

    def __init__(self, port: PacketPort, rows: _Rows, expected: _Rows, mac: _Rows, run: _Rows) -> None:
        super().__init__(name="frames", daemon=True)
        self._port, self._rows, self._expected, self._mac, self._run = port, rows, expected, mac, run
        self._sent = threading.Event()
        self.received = 0
        self.over_s = 0.0
        """Between the first and the last frame."""
        self.trouble = ""

    def finish(self) -> None:
        """Wait for what is on its way, and end."""
        self._sent.set()
        self.join(_DEADLINE_S)
        if self.is_alive():
            self.trouble = f"frames still come {_DEADLINE_S:.0f} s after the last was sent"

    def run(self) -> None:
        """Receive."""
        slots, lengths, stamps = np.arange(_TAKEN_MAX), np.empty(_TAKEN_MAX, np.int64), np.empty(_TAKEN_MAX, np.int64)
        seen = np.zeros(1 << 20, np.uint8)
        first_ns, last_ns = 0, 0
        quiet_since = time.monotonic()
        while True:
            taken = self._port.take(self._rows, slots, lengths, stamps)
            now = time.monotonic()
            if not taken:
                quiet_since = quiet_since or now
                if self._sent.is_set() and now - quiet_since > _SETTLED_S:
                    break
                time.sleep(_POLL_S)
                continue
            quiet_since = 0.0
            current = np.flatnonzero(_are_of(self._rows[:taken], self._run))
            if not len(current):
                continue
            first_ns, last_ns = first_ns or int(stamps[current[0]]), int(stamps[current[-1]])
            self.received += len(current)
            chosen = slice(taken) if len(current) == taken else current  # a slice copies nothing
            self._check(self._rows[chosen], lengths[chosen], seen)
        self.over_s = (last_ns - first_ns) * 1e-9

    def _check(self, rows: _Rows, lengths: _Numbers, seen: _Rows) -> None:
        whole = (lengths == FRAME_SIZE).all() and (rows[:, _TAIL] == self._expected).all()
        if not whole or not (rows[:, :6] == self._mac).all():
            self.trouble = "a frame came through damaged"
        index = np.ascontiguousarray(rows[:, _INDEX]).view(">u4")[:, 0].astype(np.int64)
        if index.max() >= len(seen) or seen[index].any() or len(np.unique(index)) < len(index):
            self.trouble = "a frame came through twice"
        else:
            seen[index] = 1


def _are_of(rows: _Rows, run: _Rows) -> NDArray[np.bool_]:
    """Return which frames are of a run, and not late ones of an earlier."""
    found: NDArray[np.bool_] = (rows[:, _STEP] == run).all(axis=1)
    return found
