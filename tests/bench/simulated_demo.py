# SPDX-License-Identifier: Apache-2.0
"""Time to accuracy in the simulator, compared with runs of ``dlcp demo``.

The simulated ranks train the demo's model on the same batches. Their network has the demo's rates, queues, program and
background bursts; their computing time is what the demo's ranks measured. Not simulated: the processors of the
machine, which the demo's four ranks, its switch and its background share, and shares of ports. So the run ``dlcp``,
which is held to its fair share, has no counterpart.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import simpy

from dlcp.bench import BenchError, BenchResult, result, say
from dlcp.demo.background import BackgroundBurst
from dlcp.demo.variants import DemoSetup
from dlcp.report.runs import RunFileError, load_runs, progress_to, target_accuracy
from dlcp.sim.arithmetic import seconds_to_ps
from dlcp.sim.experiments.experiment import RunSetting
from dlcp.sim.graphs.graph import GraphBuilder
from dlcp.sim.jobs.learning import LearningSpec
from dlcp.sim.jobs.step_graph import class_shares
from dlcp.sim.jobs.training import PlacedJob, TrainingJob, place_jobs
from dlcp.sim.jobs.training_run import training
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.simulation import Process, Simulation
from dlcp.sim.transports.specs import CubicTransport, DlcpTransport
from tests.bench.harness import Benchmark

_PACKET_BYTES: Final = 1500
_FRAME_BYTES: Final = _PACKET_BYTES + 14
"""The demo's switch limits frames; the simulator's links count packets."""
_BUCKET_BYTES: Final = 2**19
"""``bucket_cap_mb`` of the demo's ranks."""
_WARM_UP_STEPS: Final = 4
"""Of the demo's learning rate."""
_CHUNK_BYTES: Final = 1 << 16
_CHUNKS_IN_FLIGHT: Final = 2
"""Of each background flow, so that it always has something to send."""
_RTO_MIN_US: Final = 200_000.0
"""Linux' ``TCP_RTO_MIN``."""
SIMULATED_RUNS: Final[dict[str, dict[str, Any]]] = {
    "gloo": {"collective": "ring", "scheduler": "fifo", "transport": "tcp"},
    "plain": {"collective": "direct", "scheduler": "fifo", "transport": "plain"},
    "dlcp_priority": {
        "collective": "direct",
        "scheduler": "dlcp",
        "transport": "dlcp",
        "loss_bound": 0.1,
        "precision": "auto",
    },
}
"""Settings of the simulated job, by run of the demo."""
_BACKGROUND_FLOWS: Final = {"plain": 3}
"""Flows of each background source, if not 1. The three flows of DLCP's transport into a port have the weight of one TCP
flow together, and the simulator's have one each."""


def setting_of(run: dict[str, Any], target: float) -> RunSetting:
    """Return the simulator's setting of a run of the demo."""
    fabric, setup = run["fabric"], DemoSetup(seed=run["seed"], steps=len(run["steps"]))
    job = TrainingJob(
        name="job",
        model="trained",
        workers=setup.workers,
        piece_bytes=_BUCKET_BYTES,
        steps=setup.steps,
        optimizer="adamw",
        learn=LearningSpec(
            task="digits",
            target=target,
            batch=64,
            rate=0.002,
            warm_up=_WARM_UP_STEPS,
            compute_s=median(run["compute_seconds"]),
        ),
        **SIMULATED_RUNS[run["name"]],
    )
    rate_gbps = fabric["rate_bps"] / 1e9 * _PACKET_BYTES / _FRAME_BYTES
    return RunSetting(
        topology=Star(hosts=setup.hosts, host_link=LinkSpec(rate_gbps=rate_gbps, delay_us=20.0)),
        switches=SwitchSpec(discipline="dlcp", buffer="queue", buffer_packets=fabric["depth_packets"]),
        transports={
            "tcp": CubicTransport(min_timeout_us=_RTO_MIN_US),
            "plain": CubicTransport(),
            "dlcp": DlcpTransport(),
        },
        training=(job,),
        seed=run["seed"],
    )


def simulated(setting: RunSetting, bursts: list[BackgroundBurst], sources: list[int], flows: int) -> PlacedJob:
    """Simulate a job beside bursts of background traffic of ``flows`` flows from each source."""
    simulation = Simulation(setting, class_shares=class_shares())
    (progress,) = place_jobs(setting.training, simulation.topology.hosts, setting.seed)
    job = simulation.process(training(simulation, progress))
    for source, flow in product(sources, range(flows)):
        simulation.process(_background(simulation, bursts, source, flow, job))
    simulation.run()
    return progress


def _background(
    simulation: Simulation, bursts: list[BackgroundBurst], source: int, flow: int, job: simpy.Process
) -> Process:
    """Send to each burst's target while the burst lasts and the job runs."""
    env, transport = simulation.env, simulation.transports["tcp"]
    for burst in bursts:
        start_ps, stop_ps = seconds_to_ps(burst.start_s), seconds_to_ps(burst.stop_s)
        yield env.timeout(max(0, start_ps - int(env.now)))
        sending: list[simpy.Event] = []
        while job.is_alive and env.now < stop_ps:
            while len(sending) < _CHUNKS_IN_FLIGHT:
                builder = GraphBuilder()
                builder.messages(source, burst.target, _CHUNK_BYTES, transport=transport, job=1, lane=flow)
                sending.append(simulation.submit(builder.build()).done)
            yield sending.pop(0)
        if not job.is_alive:
            return


def _figures(run: dict[str, Any], target: float) -> Iterator[tuple[str, float]]:
    """Yield the seconds and the steps to the target."""
    for unit in ("seconds", "step"):
        reached = progress_to(run, target, unit)
        if reached is None:
            raise BenchError(f"a run never held {target:.1%}; train for more steps")
        yield unit, reached


def _compare(arguments: argparse.Namespace) -> list[BenchResult]:
    try:
        runs = load_runs(arguments.demo)
    except RunFileError as error:
        raise BenchError(f"{error}") from None
    target = target_accuracy(runs)
    if target is None:
        raise BenchError(f"the runs in {arguments.demo} reached no accuracy in common; run the demo again")
    found = []
    for name in SIMULATED_RUNS:
        if name not in runs:
            continue
        run = runs[name]
        setup = DemoSetup(seed=run["seed"], steps=len(run["steps"]))
        flows = _BACKGROUND_FLOWS.get(name, 1)
        progress = simulated(setting_of(run, target), setup.bursts(), setup.sources, flows)
        mine = dict(_figures({"curve": msgspec.to_builtins(progress.curve)}, target))
        theirs = dict(_figures(run, target))
        details = {"target": target, "steps": mine["step"], "measured_steps": theirs["step"]}
        details["relative_error"] = round(mine["seconds"] / theirs["seconds"] - 1, 3)
        say(f"{name}: simulated {mine['seconds']:.2f} s, measured {theirs['seconds']:.2f} s to {target:.1%}")
        found.append(result(f"demo.{name}", "s", [mine["seconds"]], [theirs["seconds"]], details=details))
    return found


BENCHMARK = Benchmark(
    _compare,
    {
        "--demo": {
            "type": Path,
            "default": Path("out/demo"),
            "metavar": "FOLDER",
            "help": "results of `dlcp demo` (default: %(default)s)",
        }
    },
)
