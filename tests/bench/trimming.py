# SPDX-License-Identifier: Apache-2.0
"""Incasts in the simulator: DLCP over a switch that trims packets beside one that drops them.

``sim.trimming.SENDERSxSIZE.BOUND``: 99th percentile of the messages' completion times with trimming; the peer's with
dropping. ``details`` have both medians, and for both the time from the moment when the switch gives a packet up until
the receiver knows that: its headers or a probe arrive, or the message is complete. The fast engine gives the completion
times of all seeds, the slow one times the losses of the first ones.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.bench import BenchResult, result, say, significant
from dlcp.sim import Scenario, Simulation
from dlcp.sim.engines.network_tables import PacketKind
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.engines.reference import Message, ReferenceEngine, SimulatedPacket
from dlcp.sim.graphs.graph import GraphBuilder
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.transports.specs import DlcpTransport
from tests.bench.harness import Benchmark, int_option

BURSTS = 2
"""Incasts of a run; the second one begins with the windows that the first has left."""
START_PS = 10_000_000
"""Senders begin within this time."""


class Incast(NamedTuple):
    """One setting: all senders send a message of this size to one host."""

    senders: int
    size_bytes: int
    loss_bound: float

    def run(self, seed: int, *, trimming: bool, timed: bool = False) -> tuple[NDArray[np.float64], list[int]]:
        """Return the messages' completion times, and if ``timed`` how long receivers did not know of losses, in ps."""
        records: list[NDArray[Any]] = []
        scenario = Scenario(
            topology=Star(hosts=self.senders + 1),
            switches=SwitchSpec(discipline="dlcp"),
            transports={"dlcp": DlcpTransport(trimming=trimming)},
            seed=seed,
        )
        simulation = Simulation(scenario, engine="kernel", on_records=lambda _, found: records.append(found))
        if timed:
            simulation.engine = TimedEngine(simulation.plan)
        builder, senders, before = GraphBuilder(), np.arange(1, self.senders + 1), None
        for burst in range(BURSTS):
            messages = builder.messages(
                senders,
                0,
                self.size_bytes,
                transport=0,
                queue=4,
                loss_bound=self.loss_bound,
                step=burst,
                sender=senders,
                delay_ps=simulation.random(burst).integers(START_PS, size=self.senders),
            )
            if before is not None:
                builder.follow(before, messages)
            before = builder.barrier(messages)
        simulation.submit(builder.build())
        simulation.run()
        sent = records[0][records[0]["packets"] > 0]
        return sent["end_ps"] - sent["begin_ps"], simulation.engine.known_ps if timed else []


class TimedEngine(ReferenceEngine):
    """Measures how long receivers do not know of the packets that switches give up by policy."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.known_ps: list[int] = []
        self._given_up_ps: dict[Message, dict[int, int]] = defaultdict(dict)

    def arrive(self, node: int, packet: SimulatedPacket) -> None:
        """Deliver a packet at the end of a link."""
        was_trimmed = packet.trimmed
        super().arrive(node, packet)
        if packet.trimmed and not was_trimmed:
            self._give_up(packet)
        elif node < self.plan.hosts and packet.trimmed:
            self._learn(packet.message, packet.index)
        elif node < self.plan.hosts and packet.kind is PacketKind.PROBE:
            self._learn(packet.message, *self._given_up_ps[packet.message])

    def drop(self, packet: SimulatedPacket, reason: EngineCounter) -> None:
        """Lose a packet."""
        if reason is EngineCounter.DROPS_POLICY:
            self._give_up(packet)
        super().drop(packet, reason)

    def complete_node(self, message: Message) -> None:
        """Mark a node as done."""
        super().complete_node(message)
        self._learn(message, *self._given_up_ps[message])

    def _give_up(self, packet: SimulatedPacket) -> None:
        if not packet.message.done:
            self._given_up_ps[packet.message][packet.index] = self.now_ps

    def _learn(self, message: Message, *indices: int) -> None:
        given_up_ps = self._given_up_ps[message]
        self.known_ps += [self.now_ps - given_up_ps.pop(index) for index in indices if index in given_up_ps]


def seconds(times_ps: Any, percent: int) -> float | None:
    """Return a percentile of times in picoseconds; None if there are none."""
    return significant(float(np.percentile(times_ps, percent)) / 1e12) if len(times_ps) else None


def compare(incast: Incast, seeds: int, timed: int) -> BenchResult:
    """Run one setting with trimming and with dropping, on the same traffic."""
    details: dict[str, Any] = {"seeds": seeds, "timed_seeds": timed}
    p99_s = {}
    for trimming, name in ((True, "trimming"), (False, "dropping")):
        took = np.concatenate([incast.run(seed, trimming=trimming)[0] for seed in range(1, seeds + 1)])
        known = [ps for seed in range(1, timed + 1) for ps in incast.run(seed, trimming=trimming, timed=True)[1]]
        p99_s[name] = float(np.percentile(took, 99)) / 1e12
        details[name] = {"p50_s": seconds(took, 50), "p99_s": seconds(took, 99), "given_up": len(known)}
        details[name] |= {"known_p50_s": seconds(known, 50), "known_p99_s": seconds(known, 99)}
    name = f"sim.trimming.{incast.senders}x{incast.size_bytes // 1000}kB.{incast.loss_bound:g}"
    say(f"{name}: {details}")
    return result(name, "s", [p99_s["trimming"]], [p99_s["dropping"]], details=details)


def measure(arguments: argparse.Namespace) -> Iterator[BenchResult]:
    """Compare the incast of 16 with a bound of 10 %, and with ``--sweep`` all others."""
    yield compare(Incast(16, 1_000_000, 0.1), arguments.seeds, arguments.timed)
    if arguments.sweep:
        for senders in (4, 16, 62):  # the switch program has 63 ports
            for size_bytes in (64_000, 500_000, 4_000_000):
                for loss_bound in (0.01, 0.1):
                    yield compare(Incast(senders, size_bytes, loss_bound), arguments.seeds, 1)


BENCHMARK = Benchmark(
    measure,
    {
        "--seeds": int_option(20, "of completion times"),
        "--timed": int_option(5, "of them whose losses are timed"),
        "--sweep": {"action": "store_true", "help": "also 4 and 62 senders, other sizes and a bound of 1 %"},
    },
)
