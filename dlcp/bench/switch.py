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
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dlcp.bench import bmv2
from dlcp.bench.frames import FRAME_BYTES, NEXT_HOP, Traffic
from dlcp.bench.interleave import interleave, median
from dlcp.bench.report import Result, result, significant
from dlcp.namespace import NetworkHost, StarNetwork
from dlcp.switch import PROGRAM_PATH, SwitchProcess

DEPTH_PACKETS: Final = 1000
"""Of every queue: what simple_switch does best with."""
FLOOD_S: Final = 1.0
PACED_S: Final = 0.6
SLOWEST_PPS, FASTEST_PPS = 10_000.0, 240_000.0
"""The rates between which the best is looked for: more than simple_switch, and than the generator, can do."""
STEPS: Final = 6
"""Halvings of that interval, in logarithms: to within 5 %."""
TRIES: Final = 2
"""How often a rate is tried, for a machine that others use loses a frame now and then."""
COST_S: Final = 1.0
"""How long frames are sent at the slowest rate to see what they cost."""
LATENCY_FRAMES: Final = 100
LATENCY_PAUSE_S: Final = 0.002
OURS, PEER = "built-in", "simple_switch"


@dataclass
class Contender:
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
            run = traffic.run(COST_S, SLOWEST_PPS)
            self.costs_s.append((processor_s(switch.pid) - before_s) / max(1, run.received))
            self.latencies_s.append(median(traffic.latency_s(LATENCY_FRAMES, LATENCY_PAUSE_S)))
            self.floods.append(traffic.run(FLOOD_S).received_pps)
            self.paced.append(best_paced(traffic))
        return max(self.floods[-1], self.paced[-1])


def measure(*, rounds: int, warm_up: int, progress: Callable[[str], None]) -> list[Result]:
    """Measure both switches in turns; without simple_switch on PATH, the built-in one alone.

    Raises
    ------
    TrafficError
        The compiled library is missing, or a frame came through damaged.
    """
    contenders = {OURS: Contender(builtin)}
    works, reason = bmv2.available()
    if works:
        contenders[PEER] = Contender(simple_switch)
    else:
        progress(f"switch.veth: no peer: {reason}")
    samples = interleave(
        {name: contender.measure for name, contender in contenders.items()},
        rounds=rounds,
        warm_up=warm_up,
        progress=progress,
    )
    ours, peer = contenders[OURS], contenders.get(PEER)

    def rates(name: str, values: list[float], peer_values: list[float] | None, **details: Any) -> Result:
        return result(
            name,
            "packets/s",
            values[-rounds:],
            None if peer_values is None else peer_values[-rounds:],
            smaller_is_better=False,
            details={"frame_bytes": FRAME_BYTES, "depth_packets": DEPTH_PACKETS, **details},
        )

    latencies_us = [1e6 * value for value in ours.latencies_s[-rounds:]]
    peer_us = None if peer is None else [1e6 * value for value in peer.latencies_s[-rounds:]]
    named = {} if peer is None else {"peer": PEER}
    return [
        rates("switch.veth", samples[OURS], samples.get(PEER), **named, **_extremes(samples)),
        rates("switch.veth.paced", ours.paced, peer.paced if peer else None, **named),
        rates("switch.veth.flood", ours.floods, peer.floods if peer else None, **named),
        result("switch.veth.latency", "us", latencies_us, peer_us, details={"frame_bytes": FRAME_BYTES, **named}),
        result(
            "switch.veth.cost",
            "us of processor time/packet",
            [1e6 * value for value in ours.costs_s[-rounds:]],
            None if peer is None else [1e6 * value for value in peer.costs_s[-rounds:]],
            details={"frame_bytes": FRAME_BYTES, "rate_pps": SLOWEST_PPS, **named},
        ),
    ]


def processor_s(pid: int) -> float:
    """Return how long the threads of a process have computed, in seconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9


def best_paced(traffic: Traffic) -> float:
    """Return the highest rate found at which no frame is lost; 0 if even the slowest loses some."""
    low, high, best = SLOWEST_PPS, FASTEST_PPS, 0.0
    rate = low
    for _ in range(STEPS + 1):
        reached = _lossless(traffic, rate)
        if reached:
            low, best = rate, max(best, reached)
        else:
            high = rate
        rate = (low * high) ** 0.5
    return best


def _lossless(traffic: Traffic, rate_pps: float) -> float:
    """Return the rate that was in fact sent at without a loss; 0 if there was one each time."""
    for _ in range(TRIES):
        run = traffic.run(PACED_S, rate_pps)
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
        arguments = [*ports, "--entries", str(path), "--depth-packets", str(DEPTH_PACKETS)]
        yield stack.enter_context(SwitchProcess(arguments, namespace=network.switch, counters_every_s=1.0))


def simple_switch(network: StarNetwork) -> bmv2.SimpleSwitch:
    """Run simple_switch between two hosts, with the same entries."""
    interfaces = {host.port: host.switch_interface for host in network.hosts}
    return bmv2.SimpleSwitch(PROGRAM_PATH, network.switch, interfaces, _commands(network.hosts))


def _commands(hosts: list[NetworkHost]) -> list[str]:
    """Return the entries of :func:`builtin` for simple_switch_CLI; members and groups count from 0."""
    selector, target = "DlcpIngress.route.route_selector", hosts[1]
    return [
        f"set_queue_depth {DEPTH_PACKETS}",
        f"act_prof_create_member {selector} DlcpIngress.route.to_next_hop {target.port} {NEXT_HOP}",
        f"act_prof_create_group {selector}",
        f"act_prof_add_member_to_group {selector} 0 0",
        *(f"table_add DlcpIngress.trust.port_trust DlcpIngress.trust.trust {host.port} =>" for host in hosts),
        f"table_indirect_add_with_group DlcpIngress.route.ipv4_route {target.address}/32 => 0",
    ]
