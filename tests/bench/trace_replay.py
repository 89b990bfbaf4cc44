# SPDX-License-Identifier: Apache-2.0
"""The time of a real job's step in the simulator, and its measured time.

`dlcp train` runs a script on hosts in namespaces, whose links have a limited rate and a queue without marks. The trace
that its ranks leave is replayed by the simulator on such a network. The simulator does not have the hosts' processors,
which also send and receive packets here. So the network has to be the bottleneck for the two to agree.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Final

from dlcp.bench import BenchError, BenchResult, result, say
from dlcp.host.timeline import find_timelines, write_trace
from dlcp.sim import Scenario, simulate
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import SwitchSpec, TraceJob
from dlcp.sim.traces.traced_jobs import read_trace
from dlcp.sim.transports.specs import DlcpTransport
from tests.bench.harness import Benchmark, int_option, rate_option, scratch
from tests.bench.paths import QUEUE_S, RoutedPath

_TRAINING_S: Final = 200.0
_PACKET_BYTES: Final = 1500
_FRAME_BYTES: Final = _PACKET_BYTES + 14
"""The links limit frames; the simulator's count packets."""
_PORT: Final = 29_511
_HALF_DELAY_US: Final = 20.0
"""Of each of a path's two links here, about what an idle host needs for a packet; not measured."""
PRECISIONS: Final = ("auto", "32")


def traced(path: RoutedPath, precision: str, folder: Path) -> Path:
    """Train with a rank on each host, and return the trace."""
    words = ["--option", f"trace={folder}", "--option", f"precision={precision}", "--nnodes", str(len(path.hosts))]
    words += ["--nproc-per-node", "1", "--master-addr", path.address(0), "--master-port", str(_PORT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": path.interface}
    ranks = [
        host.popen(
            [
                *(sys.executable, "-m", "dlcp.cli", "train", *words, "--node-rank", str(rank)),
                *("-m", "tests.bench.traced_training"),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(path.hosts)
    ]
    try:
        for rank, process in enumerate(ranks):
            said, _ = process.communicate(timeout=_TRAINING_S)
            if process.returncode:
                raise BenchError(f"rank {rank} failed:\n{said[-2000:]}")
    except subprocess.TimeoutExpired:
        raise BenchError(f"training took longer than {_TRAINING_S:g} s") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    file = folder / "run.json"
    write_trace(file, find_timelines([folder]))
    return file


def simulated(file: Path, ranks: int, rate_bps: int) -> list[float]:
    """Return the simulated duration of each step of a trace, in seconds."""
    rate_gbps = rate_bps / 1e9 * _PACKET_BYTES / _FRAME_BYTES
    link = LinkSpec(rate_gbps=rate_gbps, delay_us=_HALF_DELAY_US)
    scenario = Scenario(
        topology=Star(hosts=ranks, host_link=link),
        switches=SwitchSpec(discipline="fifo", ecn=None, buffer_packets=round(rate_bps * QUEUE_S / 8 / _FRAME_BYTES)),
        transports={"dlcp": DlcpTransport()},
        traces=(TraceJob(name="job", file=str(file), transport="dlcp"),),
    )
    (steps,) = simulate(scenario, keep_messages=False).steps
    return steps.step_s


def _replay(arguments: argparse.Namespace) -> list[BenchResult]:
    ranks, rate_bps = arguments.ranks, round(arguments.rate_mbps * 1e6)
    found = []
    for precision in PRECISIONS:
        pairs = []
        for _ in range(arguments.rounds):
            with RoutedPath(ranks, rate_bps=rate_bps) as path, scratch() as folder:
                file = traced(path, precision, folder)
                words = path.words
                measured_s = read_trace(TraceJob(name="job", file=str(file))).measured_s
                # The first step begins with small windows; every figure of the simulator leaves it out.
                pairs.append((fmean(simulated(file, ranks, rate_bps)[1:]), fmean(measured_s[1:])))
            say(f"precision {precision}: simulated {1e3 * pairs[-1][0]:.1f} ms, measured {1e3 * pairs[-1][1]:.1f} ms")
        mine, theirs = zip(*pairs, strict=True)
        errors = [one / other - 1 for one, other in pairs]
        details = {"ranks": ranks, "path": words, "relative_errors": errors}
        found.append(result(f"trace.replay.{precision}", "s", mine, theirs, details=details))
    return found


BENCHMARK = Benchmark(
    _replay,
    {"--ranks": int_option(2, "one on each host", least=2), "--rate-mbps": rate_option(200.0, "of each host's link")},
    rounds=3,
    warm_up=None,
    root=True,
)
