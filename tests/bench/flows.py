# SPDX-License-Identifier: Apache-2.0
"""The flow-level engine of the simulator against packets: how far step times differ, and how long both take.

``sim.flows.NAME``: one of ten settings of up to 256 hosts. The value is the mean time of all steps with flows, the
peer's that with packets. ``details`` have the share of a step that is communication, which alone can differ, the
seconds of both, and the ``steady_error`` without the first step, as ``step_s`` in result files.
``sim.flows.mean_error``: mean of the errors' sizes, and the worst. ``sim.flows.step8192``: seconds for a step of
ResNet-50 over 8,192 GPUs in a fat tree.
"""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean

from msgspec.structs import replace

from dlcp.bench import BenchResult, result, say, significant
from dlcp.sim.experiments.experiment import ExperimentRun, RunSetting
from dlcp.sim.experiments.running import run, steady
from dlcp.sim.jobs.training import TrainingJob
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import FatTree, LeafSpine, RailOptimised, Star, TopologySpec
from dlcp.sim.scenario import Fidelity, SwitchSpec, TrafficSpec
from dlcp.sim.transports.specs import DctcpTransport, DlcpTransport
from tests.bench.harness import SEED, Benchmark

_SLOW, _FAST = LinkSpec(rate_gbps=25.0), LinkSpec(rate_gbps=100.0)
_RACKS = LeafSpine(leaves=4, spines=2, hosts_per_leaf=10, host_link=_SLOW, fabric_link=_FAST)
"""Forty hosts; 250 Gbit/s of hosts share 200 Gbit/s of uplinks."""
_FULL_RACKS = LeafSpine(leaves=8, spines=2, hosts_per_leaf=8, host_link=_SLOW, fabric_link=_SLOW)
"""Sixty-four hosts; four share an uplink."""
_RAILS = RailOptimised(servers=8, servers_per_pod=4, spines=2, host_link=_SLOW, fabric_link=_SLOW)
_LARGE_RAILS = RailOptimised(servers=32, servers_per_pod=8, spines=4, host_link=_SLOW, fabric_link=_SLOW)
_ENGINES: tuple[Fidelity, ...] = ("packets", "flows")


def _setting(
    topology: TopologySpec, transport: str, *, background: float = 0.0, steps: int = 3, **training: object
) -> RunSetting:
    """Return a training job on a network, with DCTCP or DLCP; ``background``: load of other flows over DCTCP."""
    dlcp = transport == "dlcp"
    traffic = TrafficSpec(name="other", load=background or 0.1, sizes="web_search", stop_s=10.0, transport="dctcp")
    own: dict[str, object] = {"scheduler": "dlcp", "loss_bound": 0.1} if dlcp else {}
    job = TrainingJob(
        **{"name": "job", "transport": transport, "steps": steps, "jitter": 0.02, "batch": 8, **own, **training}
    )
    return RunSetting(
        topology=topology,
        switches=SwitchSpec(discipline="dlcp" if dlcp else "fifo"),
        transports={"dctcp": DctcpTransport(), **({"dlcp": DlcpTransport()} if dlcp else {})},
        training=(job,),
        traffic=(traffic,) if background else (),
        seed=SEED,
    )


SETTINGS = {
    "ring_star": _setting(Star(hosts=16, host_link=_SLOW), "dctcp", collective="ring", workers=16),
    "direct_racks": _setting(_FULL_RACKS, "dctcp", collective="direct", workers=32, placement="spread"),
    "direct_racks_dlcp": _setting(_FULL_RACKS, "dlcp", collective="direct", workers=32, placement="spread"),
    "servers_dlcp": _setting(_RACKS, "dlcp", collective="parameter_server", workers=32, servers=8),
    "servers_background": _setting(
        _RACKS, "dctcp", collective="parameter_server", workers=24, servers=8, background=0.2
    ),
    "tree": _setting(FatTree(ports=4, host_link=_SLOW, fabric_link=_SLOW), "dctcp", collective="tree", workers=16),
    "halving_fat_tree": _setting(
        FatTree(ports=8, host_link=_SLOW, fabric_link=_SLOW), "dctcp", collective="halving_doubling", workers=128
    ),
    "rails": _setting(_RAILS, "dctcp", collective="hierarchical", workers=64, group=8),
    "rails_dlcp": _setting(
        _LARGE_RAILS, "dlcp", collective="hierarchical", workers=256, group=8, bytes_per_value=2, steps=2
    ),
    "ring_256": _setting(
        LeafSpine(leaves=8, spines=16, hosts_per_leaf=32, host_link=_SLOW, fabric_link=_FAST),
        "dctcp",
        collective="ring",
        workers=256,
        bytes_per_value=2,
        steps=2,
    ),
}

SCALE = _setting(
    FatTree(ports=32, host_link=_FAST), "dctcp", collective="halving_doubling", workers=8192, steps=1, jitter=0.0
)


def step_of(setting: RunSetting, engine: Fidelity) -> tuple[list[float], float, float]:
    """Run a setting; return the times of its steps, their computing time, and the seconds that the run took."""
    item = ExperimentRun(experiment="flows", point={}, setting=replace(setting, engine=engine), convergence="published")
    began = time.perf_counter()
    job = run(item)["jobs"][0]
    return job["step_s"], job["compute_s"], time.perf_counter() - began


def compare(name: str) -> BenchResult:
    """Run a setting with both engines."""
    (packets_steps, compute_s, packets_s), (flows_steps, _, flows_s) = (
        step_of(SETTINGS[name], engine) for engine in _ENGINES
    )
    packets, flows = fmean(packets_steps), fmean(flows_steps)
    error = flows / packets - 1
    say(f"{name}: {packets * 1e3:.2f} ms with packets, {error:+.2%} with flows")
    details = {
        "error": significant(error),
        "steady_error": significant(fmean(steady(flows_steps)) / fmean(steady(packets_steps)) - 1),
        "communication_ratio": significant(1 - compute_s / packets),
        "packets_wall_s": significant(packets_s),
        "flows_wall_s": significant(flows_s),
    }
    return result(f"sim.flows.{name}", "s", [flows], [packets], details=details)


def measure(arguments: argparse.Namespace) -> Iterator[BenchResult]:
    """Compare all settings and measure the large one, or compare some."""
    step_of(SETTINGS["ring_star"], "flows")  # compiles
    names = arguments.settings or SETTINGS
    results = [compare(name) for name in names]
    yield from results
    errors = [abs(each.details["error"]) for each in results]
    yield result("sim.flows.mean_error", "ratio", [fmean(errors)], details={"worst": significant(max(errors))})
    if not arguments.settings:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            yield alone.submit(measure_scale).result()


def measure_scale() -> BenchResult:
    """Run a step of 8,192 GPUs; in a process of its own, for memory. The time includes building graph and network."""
    step_of(SETTINGS["ring_star"], "flows")  # loads or compiles
    (step_s,), compute_s, wall_s = step_of(SCALE, "flows")
    details = {
        "step_s": significant(step_s),
        "communication_ratio": significant(1 - compute_s / step_s),
        "memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }
    return result("sim.flows.step8192", "s", [wall_s], details=details)


BENCHMARK = Benchmark(
    measure,
    {"--settings": {"nargs": "+", "choices": list(SETTINGS), "metavar": "NAME", "help": "only these settings"}},
)
