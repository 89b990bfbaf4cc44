# SPDX-License-Identifier: Apache-2.0
"""Frames a second through the built-in switch between two network interfaces, against BMv2's simple_switch.

Both run the same program with the same entries between the same veth pairs, offloads off, queues of 1000 packets. A
switch's rate is the best that it delivers: the highest paced rate without a loss (found by bisection, as RFC 2544
does), or what comes through when the generator sends as fast as it can, whichever is more.

Generator, switch and receiver share the machine. So the processor time that a packet costs is measured, too: on few
cores it is what bounds the rate, and it does not depend on who else computes. The peer is an optimised build without a
log where the package is one; it has a thread each for receiving, ingress and sending, and more ports only add egress
threads, so with fewer cores than threads it is at its best with two ports.
"""

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlcp.bench import BenchError, BenchResult, median, result, say, significant
from dlcp.host.closing import Closing
from dlcp.host.netlab import NetworkHost, StarNetwork
from dlcp.host.processes import end
from dlcp.switch import PROGRAM_PATH, PacketPort, SwitchProcess, udp_headers
from dlcp.wire import HEADER_BYTES, UDP_PORT_BASE, Header, PacketType
from tests.bench.harness import Benchmark, Turns

_Rows: TypeAlias = NDArray[np.uint8]
_Numbers: TypeAlias = NDArray[np.int64]

FRAME_SIZE: Final = 1042
"""A gradient packet of 242 floats, as in the first comparison."""
NEXT_HOP: Final = "02:00:00:00:01:02"
"""Where the switch is to address frames: not the receiver's own address, so that its kernel ignores them."""
_TICK_S: Final = 200e-6
"""At a given rate, what falls due within this time is sent together. More often costs the generator more
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


class TrafficError(BenchError):
    """Frames cannot be sent here, or came through other than they should; the message says how."""


@dataclass(frozen=True, slots=True)
class TrafficRun:
    """The fate of the frames of one run; rates are in frames/s."""

    sent: int
    sent_pps: float
    received: int
    received_pps: float

    @property
    def lossless(self) -> bool:
        """Whether every frame has come through."""
        return self.received == self.sent


class Traffic(Closing):
    """A generator on host 0 and a receiver on host 1; a context manager."""

    def __init__(self, network: StarNetwork) -> None:
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
            self._out.send_rows(self._frames, np.array([number % _TEMPLATES]), self._lengths[:1])
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
            self._out.send_rows(frames, slots, lengths)
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
        """Wait for frames on their way, and end."""
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


_DEPTH_PACKETS: Final = 1000
"""Depth of every queue: simple_switch's best."""
_FLOOD_S: Final = 1.0
_PACED_S: Final = 0.6
SLOWEST_PPS, FASTEST_PPS = 10_000.0, 240_000.0
"""The rates between which the best is looked for: more than simple_switch, and than the generator, can do."""
BISECTIONS: Final = 6
"""Halvings of that interval, in logarithms: to within 5 %."""
_TRIES: Final = 2
"""How often a rate is tried, for a machine that others use loses a frame now and then."""
_COST_S: Final = 1.0
"""How long frames are sent at the slowest rate, to measure their cost."""
_LATENCY_FRAMES: Final = 100
_LATENCY_PAUSE_S: Final = 0.002
_OURS, _PEER = "built-in", "simple_switch"
_START_DEADLINE_S: Final = 20.0
_STOP_DEADLINE_S: Final = 5.0
_THRIFT_PORT: Final = 9090
_REFUSALS: Final = ("Error:", "Invalid", "Exception", "Unknown")


@dataclass
class MeasuredSwitch:
    """A switch, and what it delivered round by round, in frames/s and seconds."""

    start: Callable[[StarNetwork], Any]
    floods: list[float] = field(default_factory=list)
    paced: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    costs_s: list[float] = field(default_factory=list)

    def measure(self) -> float:
        """Start the switch, measure it once, and return the best rate."""
        with StarNetwork(2) as network, self.start(network) as switch, Traffic(network) as traffic:
            # The first frames meet cold caches.
            traffic.run(0.2, SLOWEST_PPS)
            before_s = processor_s(switch.pid)
            run = traffic.run(_COST_S, SLOWEST_PPS)
            self.costs_s.append((processor_s(switch.pid) - before_s) / max(1, run.received))
            self.latencies_s.append(median(traffic.latency_s(_LATENCY_FRAMES, _LATENCY_PAUSE_S)))
            self.floods.append(traffic.run(_FLOOD_S).received_pps)
            self.paced.append(best_paced(traffic))
        return max(self.floods[-1], self.paced[-1])


def measure(turns: Turns) -> list[BenchResult]:
    """Measure both switches in turns; without simple_switch on PATH, the built-in one alone.

    Raises
    ------
    TrafficError
        A frame came through damaged.
    """
    contenders = {_OURS: MeasuredSwitch(builtin)}
    missing = [name for name in ("simple_switch", "simple_switch_CLI") if shutil.which(name) is None]
    if missing:
        say(f"switch.veth: no peer: {' and '.join(missing)} not on PATH; package p4lang-bmv2 has both")
    else:
        contenders[_PEER] = MeasuredSwitch(SimpleSwitch)
    samples = turns.take({name: contender.measure for name, contender in contenders.items()})
    rounds = turns.rounds
    ours, peer = contenders[_OURS], contenders.get(_PEER)

    def rates(name: str, values: list[float], peer_values: list[float] | None, **details: Any) -> BenchResult:
        return result(
            name,
            "packets/s",
            values[-rounds:],
            None if peer_values is None else peer_values[-rounds:],
            smaller_is_better=False,
            details={"frame_bytes": FRAME_SIZE, "depth_packets": _DEPTH_PACKETS, **details},
        )

    latencies_us = [1e6 * value for value in ours.latencies_s[-rounds:]]
    peer_us = None if peer is None else [1e6 * value for value in peer.latencies_s[-rounds:]]
    named = {} if peer is None else {"peer": _PEER}
    return [
        rates("switch.veth", samples[_OURS], samples.get(_PEER), **named, **_extremes(samples)),
        rates("switch.veth.paced", ours.paced, peer.paced if peer else None, **named),
        rates("switch.veth.flood", ours.floods, peer.floods if peer else None, **named),
        result("switch.veth.latency", "us", latencies_us, peer_us, details={"frame_bytes": FRAME_SIZE, **named}),
        result(
            "switch.veth.cost",
            "us of processor time/packet",
            [1e6 * value for value in ours.costs_s[-rounds:]],
            None if peer is None else [1e6 * value for value in peer.costs_s[-rounds:]],
            details={"frame_bytes": FRAME_SIZE, "rate_pps": SLOWEST_PPS, **named},
        ),
    ]


def processor_s(pid: int) -> float:
    """Return how long the threads of a process have computed, in seconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9


def best_paced(traffic: Traffic) -> float:
    """Return the highest rate found at which no frame is lost; 0 if even the slowest loses some."""
    low, high, best = SLOWEST_PPS, FASTEST_PPS, 0.0
    rate = low
    for _ in range(BISECTIONS + 1):
        reached = _lossless(traffic, rate)
        if reached:
            low, best = rate, max(best, reached)
        else:
            high = rate
        rate = (low * high) ** 0.5
    return best


def _lossless(traffic: Traffic, rate_pps: float) -> float:
    """Return the rate that was in fact sent at without a loss; 0 if there was one each time."""
    for _ in range(_TRIES):
        run = traffic.run(_PACED_S, rate_pps)
        if run.lossless:
            return run.sent_pps
    return 0.0


def _extremes(samples: dict[str, list[float]]) -> dict[str, Any]:
    return {"range": {name: [significant(min(values)), significant(max(values))] for name, values in samples.items()}}


@contextmanager
def builtin(network: StarNetwork) -> Iterator[SwitchProcess]:
    """Run the built-in switch between two hosts, with its own choices."""
    target = network.hosts[1]
    document = {
        "profiles": [
            {
                "profile": "route_selector",
                "members": [{"id": 1, "action": "to_next_hop", "params": {"port": target.port, "mac": NEXT_HOP}}],
                "groups": [{"id": 1, "members": [1]}],
            }
        ],
        "entries": [
            *({"table": "port_trust", "match": {"ig_port": host.port}, "action": "trust"} for host in network.hosts),
            {"table": "ipv4_route", "match": {"ipv4_dst": f"{target.address}/32"}, "group": 1},
        ],
    }
    ports = [f"--port={host.port}=packet:{host.switch_interface}" for host in network.hosts]
    arguments = [*ports, "--depth-packets", str(_DEPTH_PACKETS)]
    with SwitchProcess(
        arguments, namespace=network.switch, documents={"--entries": document}, counters_every_s=1.0
    ) as switch:
        yield switch


class SimpleSwitchError(BenchError):
    """simple_switch did not start or refused a command; the message says which."""


class SimpleSwitch(Closing):
    """BMv2's simple_switch between two hosts, with the same entries; a context manager.

    It runs at its fastest: no log, eight priority queues a port, deep ones.

    Raises
    ------
    SimpleSwitchError
        It did not start, or refused a command.
    """

    def __init__(self, network: StarNetwork) -> None:
        self._namespace = network.switch
        self._folder = tempfile.TemporaryDirectory(prefix="dlcp-bmv2-")
        ports = [word for host in network.hosts for word in ("-i", f"{host.port}@{host.switch_interface}")]
        self._process = self._namespace.popen(
            [
                *("simple_switch", *ports, "--thrift-port", str(_THRIFT_PORT), "--log-level", "off"),
                *("--notifications-addr", f"ipc://{self._folder.name}/notifications", str(PROGRAM_PATH)),
                *("--", "--priority-queues", "8"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._await_thrift()
            self._configure(_commands(network.hosts))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        end(self._process, _STOP_DEADLINE_S)
        self._folder.cleanup()

    def _await_thrift(self) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            if self._process.poll() is not None:
                raise SimpleSwitchError(f"simple_switch ended with status {self._process.returncode} at its start")
            try:
                self._namespace.call(lambda: socket.create_connection(("127.0.0.1", _THRIFT_PORT), 1).close())
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SimpleSwitchError(f"simple_switch does not listen on its Thrift port: {error}") from error
            time.sleep(0.05)

    def _configure(self, commands: Sequence[str]) -> None:
        done = self._namespace.run(
            ["simple_switch_CLI", "--thrift-port", str(_THRIFT_PORT)],
            input="\n".join(commands),
            capture_output=True,
            text=True,
            timeout=_START_DEADLINE_S,
        )
        refused = [line for line in done.stdout.splitlines() if any(word in line for word in _REFUSALS)]
        if done.returncode or refused:
            raise SimpleSwitchError(f"simple_switch_CLI refused: {'; '.join(refused) or done.stderr.strip()}")


def _commands(hosts: list[NetworkHost]) -> list[str]:
    """Return the entries of :func:`builtin` for simple_switch_CLI; members and groups count from 0."""
    selector, target = "DlcpIngress.route.route_selector", hosts[1]
    return [
        f"set_queue_depth {_DEPTH_PACKETS}",
        f"act_prof_create_member {selector} DlcpIngress.route.to_next_hop {target.port} {NEXT_HOP}",
        f"act_prof_create_group {selector}",
        f"act_prof_add_member_to_group {selector} 0 0",
        *(f"table_add DlcpIngress.trust.port_trust DlcpIngress.trust.trust {host.port} =>" for host in hosts),
        f"table_indirect_add_with_group DlcpIngress.route.ipv4_route {target.address}/32 => 0",
    ]


BENCHMARK: Final = Benchmark(lambda arguments: measure(arguments.turns), rounds=7, root=True)
