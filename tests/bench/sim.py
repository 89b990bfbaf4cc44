# SPDX-License-Identifier: Apache-2.0
"""Packet-hops a second of the simulator, data and acknowledgements, on one core; also of ns.py where installed.

Rates are per second of the processor's time, for neither side waits for anything; the ring is timed by the clock.

``sim.ps64``: 64 workers push 25 MB each to 8 parameter servers and pull it back, over 9 leaves and 4 spines at
100 Gbit/s, DLCP with a bound of 10 %. ``sim.ring1024``: a ring all-reduce of 25 MB over 1,024 ranks in 32 racks, DCTCP.
``sim.perm1024``: each of 1,024 hosts in a fat tree sends 8 MB to another one, NDP with packets of 9,000 bytes.
``sim.nspy``: eight hosts send 10 Gbit/s through one switch to eight others, the same packets here and in ns.py
(``pip install ns.py``).
"""

import argparse
import importlib
import importlib.util
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import simpy

from dlcp.bench import BenchResult, result, say
from dlcp.sim import CollectiveJob, Scenario, Simulation, simulate
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.graphs.graph import GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import FatTree, LeafSpine, Star
from dlcp.sim.scenario import FlowPattern, SwitchSpec
from dlcp.sim.transports.specs import DctcpTransport, DlcpTransport, NdpTransport, NewRenoTransport
from tests.bench.harness import Benchmark, int_option

SERVERS = tuple(range(0, 64, 8))


def parameter_server(size_bytes: int) -> Scenario:
    """Return 64 workers and 8 servers, one server in each of 8 racks; a message crosses 2 leaves and 4 spines."""
    workers = tuple(host for host in range(72) if host not in SERVERS)
    job = CollectiveJob(
        name="job",
        hosts=SERVERS + workers,
        servers=len(SERVERS),
        size_bytes=size_bytes,
        collective="parameter_server",
        transport="dlcp",
        loss_bound=0.1,
    )
    return Scenario(
        topology=LeafSpine(leaves=9, spines=4, hosts_per_leaf=8),
        switches=SwitchSpec(discipline="dlcp"),
        transports={"dlcp": DlcpTransport(switch_hops=6)},
        jobs=(job,),
    )


def ring(ranks: int, size_bytes: int) -> Scenario:
    """Return a ring over racks of 32."""
    job = CollectiveJob(name="job", hosts=tuple(range(ranks)), size_bytes=size_bytes, collective="ring")
    return Scenario(
        topology=LeafSpine(leaves=ranks // 32, spines=16, hosts_per_leaf=32),
        transports={"dctcp": DctcpTransport()},
        jobs=(job,),
    )


def permutation() -> Scenario:
    """Return the permutation that is compared with htsim's, with flows four times as long."""
    return Scenario(
        topology=FatTree(ports=16),
        switches=SwitchSpec(packet_bytes=9000, discipline="trim"),
        transports={"ndp": NdpTransport(packet_bytes=9000, initial_window_packets=23)},
        patterns=(FlowPattern(size_bytes=8_000_000, transport="ndp"),),
    )


def hops_per_s(scenario: Scenario) -> float:
    """Run a scenario, return its packet-hops a second."""
    began = time.process_time()
    outcome = simulate(scenario, engine="kernel", keep_messages=False)
    return outcome.hops / (time.process_time() - began)


def ours_beside_nspy(packets: int) -> float:
    """Run eight flows of single packets through a switch, return packet-hops a second."""
    scenario = Scenario(
        topology=Star(hosts=16, host_link=LinkSpec(rate_gbps=10.0)),
        transports={"t": NewRenoTransport(max_window_packets=64.0)},
    )
    simulation = Simulation(scenario, engine="kernel")
    builder = GraphBuilder()
    builder.messages(np.arange(8), np.arange(8, 16), packets * 1440, transport=0)
    simulation.submit(builder.build())
    began = time.process_time()
    simulation.run()
    counts = simulation.engine.counts
    return float(counts[EngineCounter.HOPS_DATA] + counts[EngineCounter.HOPS_CONTROL]) / (time.process_time() - began)


def nspy(packets: int) -> float:
    """Run the same in ns.py: generator, port and wire of each host, switch, wires, sinks."""
    # Not imported by name: who type-checks or reads this may not have it.
    generator, port, wire, sink, switches = (
        importlib.import_module(f"ns.{name}")
        for name in ("packet.dist_generator", "port.port", "port.wire", "packet.sink", "switch.switch")
    )
    env = simpy.Environment()
    switch = switches.SimplePacketSwitch(env, 8, 10e9, 240)
    switch.demux.fib = {flow: flow for flow in range(8)}
    for flow in range(8):
        source = generator.DistPacketGenerator(
            env, f"host{flow}", lambda: 1.2e-6, lambda: 1500, size=packets * 1500, flow_id=flow
        )
        out, up, down = port.Port(env, 10e9), wire.Wire(env, lambda: 1e-6), wire.Wire(env, lambda: 1e-6)
        source.out, out.out, up.out = out, up, switch
        switch.ports[flow].out, down.out = down, sink.PacketSink(env, rec_arrivals=False, rec_waits=False)
    began = time.process_time()
    env.run()
    taken = time.process_time() - began
    received = sum(int(item.packets_received) for item in switch.ports)
    if received != 8 * packets:
        raise RuntimeError(f"ns.py delivered {received} of {8 * packets} packets")
    return 2 * received / taken


def measure_ring(ranks: int, size_bytes: int) -> tuple[float, dict[str, float]]:
    """Run the ring, return seconds by the clock, and further figures; in a process of its own, for memory."""
    hops_per_s(parameter_server(100_000))  # compiles
    began, processor = time.perf_counter(), time.process_time()
    outcome = simulate(ring(ranks, size_bytes), engine="kernel", keep_messages=False)
    seconds, processor_s = time.perf_counter() - began, time.process_time() - processor
    details = {
        "processor_s": round(processor_s, 1),
        "packet_hops_per_processor_s": round(outcome.hops / processor_s),
        "memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }
    return seconds, details


def measure(arguments: argparse.Namespace) -> list[BenchResult]:
    """Measure all; the kernel gets fifty times as many packets as ns.py."""
    turns = replace(arguments.turns, warm_up=1)
    hops_per_s(parameter_server(100_000))  # compiles
    contenders: dict[str, Callable[[], float]] = {"ours": lambda: ours_beside_nspy(arguments.packets * 50)}
    if importlib.util.find_spec("ns") is not None:
        contenders["ns.py"] = lambda: nspy(arguments.packets)
    else:
        say("ns.py is not installed: pip install ns.py")
    samples = turns.take(contenders)
    scenario = parameter_server(arguments.bytes)
    alone_turns = replace(turns, warm_up=0)
    rates = alone_turns.take({"ours": lambda: hops_per_s(scenario)})["ours"]
    permuted = alone_turns.take({"ours": lambda: hops_per_s(permutation())})["ours"]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        seconds, details = alone.submit(measure_ring, arguments.ranks, arguments.bytes).result()
    return [
        result("sim.ps64", "packet-hops/s", rates, smaller_is_better=False),
        result("sim.perm1024", "packet-hops/s", permuted, smaller_is_better=False),
        result("sim.ring1024", "s", [seconds], details=details),
        result("sim.nspy", "packet-hops/s", samples["ours"], samples.get("ns.py"), smaller_is_better=False),
    ]


BENCHMARK = Benchmark(
    measure,
    {
        "--bytes": int_option(25_000_000, "of each worker or rank"),
        "--ranks": int_option(1024, "of the ring", least=2, most=10_000),
        "--packets": int_option(2000, "of each flow, beside ns.py"),
    },
    rounds=3,
    warm_up=None,
)
