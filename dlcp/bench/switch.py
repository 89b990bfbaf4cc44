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

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dlcp.bench.frames import FRAME_SIZE, NEXT_HOP, Traffic
from dlcp.bench.results import BenchResult, interleave, median, result, significant
from dlcp.closing import Closing, end
from dlcp.namespace import NetworkHost, StarNetwork
from dlcp.switch import PROGRAM_PATH, SwitchProcess

_DEPTH_PACKETS: Final = 1000
"""Of every queue: what simple_switch does best with."""
_FLOOD_S: Final = 1.0
_PACED_S: Final = 0.6
SLOWEST_PPS, FASTEST_PPS = 10_000.0, 240_000.0
"""The rates between which the best is looked for: more than simple_switch, and than the generator, can do."""
BISECTIONS: Final = 6
"""Halvings of that interval, in logarithms: to within 5 %."""
_TRIES: Final = 2
"""How often a rate is tried, for a machine that others use loses a frame now and then."""
_COST_S: Final = 1.0
"""How long frames are sent at the slowest rate to see what they cost."""
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


def measure(*, rounds: int, warm_up: int, progress: Callable[[str], None]) -> list[BenchResult]:
    """Measure both switches in turns; without simple_switch on PATH, the built-in one alone.

    Raises
    ------
    TrafficError
        The compiled library is missing, or a frame came through damaged.
    """
    contenders = {_OURS: MeasuredSwitch(builtin)}
    missing = [name for name in ("simple_switch", "simple_switch_CLI") if shutil.which(name) is None]
    if missing:
        progress(f"switch.veth: no peer: {' and '.join(missing)} not on PATH; package p4lang-bmv2 has both")
    else:
        contenders[_PEER] = MeasuredSwitch(SimpleSwitch)
    samples = interleave(
        {name: contender.measure for name, contender in contenders.items()},
        rounds=rounds,
        warm_up=warm_up,
        progress=progress,
    )
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
    """Run the built-in switch between two hosts, with what it chooses by itself."""
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
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlcp-bench-"))) / "entries.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        ports = [f"--port={host.port}=packet:{host.switch_interface}" for host in network.hosts]
        arguments = [*ports, "--entries", str(path), "--depth-packets", str(_DEPTH_PACKETS)]
        yield stack.enter_context(SwitchProcess(arguments, namespace=network.switch, counters_every_s=1.0))


class SimpleSwitchError(RuntimeError):
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
