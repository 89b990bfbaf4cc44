# SPDX-License-Identifier: Apache-2.0
"""The same DCTCP flows in ns-3 and in the simulator: slowdowns, with and without the time to open a connection.

Hosts around one switch, flows of web search, the same flows, marks, windows and timeouts in both. ns-3 is Debian's
(``apt-get install libns3-dev libgsl-dev``); ``dctcp.cc`` is compiled against it.

``ns3.SIZE.SHARE``: slowdowns of the flows of a size, from a message's first byte. The value is the simulator's, the
peer's ns-3's from when the connection is open, since the simulator's are always open. ``details`` have ns-3's
``with_opening``.
"""

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlcp.bench import BenchError, BenchResult, result, say, significant
from dlcp.inputs.configuration import Range
from dlcp.sim import Scenario, Simulation
from dlcp.sim.experiments.running import SLOWDOWN_SIZES, IdealTimes
from dlcp.sim.graphs.graph import NODE_RECORD, OWN_LANE, Graph, GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import EcnSpec, SwitchSpec, TrafficSpec, draw_sizes, mean_size
from dlcp.sim.transports.specs import DctcpTransport
from tests.bench.harness import SEED, Benchmark, float_option, int_option

_HOSTS, _RATE_GBPS, _BUFFER_PACKETS = 16, 10.0, 1000
_PACKAGES = ("ns3-core", "ns3-internet", "ns3-network", "ns3-point-to-point", "ns3-traffic-control")


def drawn_flows(count: int, load: float, seed: int) -> Graph:
    """Return flows between random hosts, which arrive as a Poisson process."""
    random = np.random.default_rng(seed)
    sizes = TrafficSpec(sizes="web_search").flow_sizes
    flows_per_s = load * _HOSTS * _RATE_GBPS * 1e9 / 8 / mean_size(sizes)
    source = random.integers(_HOSTS, size=count)
    target = (source + random.integers(1, _HOSTS, size=count)) % _HOSTS
    # Whole nanoseconds, as ns-3 counts.
    begin_ps = np.cumsum(random.exponential(1e9 / flows_per_s, count)).astype(np.int64) * 1000
    builder = GraphBuilder()
    builder.messages(
        source, target, draw_sizes(sizes, random.random(count)), transport=0, lane=OWN_LANE, delay_ps=begin_ps
    )
    return builder.build()


def simulated_ps(flows: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the times of flows in the simulator, and the times that they would take alone, int64 (flows,) each."""
    scenario = Scenario(
        topology=Star(hosts=_HOSTS, host_link=LinkSpec(rate_gbps=_RATE_GBPS)),
        switches=SwitchSpec(buffer="queue", buffer_packets=_BUFFER_PACKETS, ecn=EcnSpec()),
        transports={"dctcp": DctcpTransport()},
    )
    kept = np.zeros(0, NODE_RECORD)

    def keep(_: object, records: NDArray[np.void]) -> None:
        nonlocal kept
        kept = records

    simulation = Simulation(scenario, on_records=keep)
    simulation.submit(flows)
    simulation.run()
    return kept["end_ps"] - kept["begin_ps"], IdealTimes(simulation.plan).of(flows.nodes)


def compiled(folder: Path) -> Path:
    """Compile ``dctcp.cc``.

    Raises
    ------
    BenchError
        There is no compiler or no ns-3.
    """
    for tool, package in (("g++", "g++"), ("pkg-config", "pkg-config")):
        if shutil.which(tool) is None:
            raise BenchError(f"needs {tool}: apt-get install {package}")
    found = subprocess.run(
        ["pkg-config", "--cflags", "--libs", *_PACKAGES], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise BenchError("needs ns-3: apt-get install libns3-dev libgsl-dev")
    program = folder / "dctcp"
    source = str(Path(__file__).with_name("dctcp.cc"))
    command = ["g++", "-O2", "-std=c++17", "-o", str(program), source, *found.stdout.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"dctcp.cc does not compile (apt-get install libgsl-dev?): {done.stderr.strip()}")
    return program


def in_ns3(program: Path, flows: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the times of flows in ns-3 in picoseconds: to open the connection, and in all, int64 (flows,) each."""
    nodes = flows.nodes
    columns = (nodes["delay_ps"] // 1000, nodes["source"], nodes["target"], nodes["size_bytes"])
    text = "\n".join(" ".join(map(str, row)) for row in zip(*(column.tolist() for column in columns), strict=True))
    words = [f"--hosts={_HOSTS}", f"--rate={_RATE_GBPS}", f"--buffer={_BUFFER_PACKETS}"]
    done = subprocess.run([str(program), *words], input=text, capture_output=True, text=True, check=True)
    ends = np.array([line.split() for line in done.stdout.splitlines()], np.int64)
    if (ends < 0).any():
        raise BenchError(f"{(ends[:, 1] < 0).sum()} flows did not end in ns-3")
    since = ends * 1000 - nodes["delay_ps"][:, None]
    return since[:, 0], since[:, 1]


def measure(arguments: argparse.Namespace) -> Iterator[BenchResult]:
    """Run the flows in both."""
    flows = drawn_flows(arguments.flows, arguments.load, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        opening_ps, theirs_ps = in_ns3(compiled(Path(folder)), flows)
    ours_ps, ideal_ps = simulated_ps(flows)
    ours, theirs, with_opening = ours_ps / ideal_ps, (theirs_ps - opening_ps) / ideal_ps, theirs_ps / ideal_ps
    least = 0
    for name, most in SLOWDOWN_SIZES.items():
        sizes = flows.nodes["size_bytes"]
        own = (sizes > (0 if name == "all" else least)) & (sizes <= most)
        least = least if name == "all" else most
        if not own.any():
            continue
        say(f"{name}: {own.sum()} flows, mean {ours[own].mean():.3f}, in ns-3 {theirs[own].mean():.3f}")
        for share, value in (("mean", None), ("p90", 0.9), ("p99", 0.99)):
            here, there, opened = (
                float(each[own].mean() if value is None else np.quantile(each[own], value))
                for each in (ours, theirs, with_opening)
            )
            details = {"with_opening": significant(opened), "flows": int(own.sum())}
            yield result(f"ns3.{name}.{share}", "ratio", [here], [there], details=details)


BENCHMARK = Benchmark(
    measure,
    {
        "--flows": int_option(2000, "flows"),
        "--load": float_option(0.6, "of the hosts' links", Range(0.0, 1.0, above=True), "LOAD"),
        "--seed": int_option(SEED, "of the flows", least=0),
    },
)
