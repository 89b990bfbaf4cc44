# SPDX-License-Identifier: Apache-2.0
"""Long trainings in the simulator with and without skipped steps: how far results differ, and speed.

``sim.skip.NAME``: a setting of ``sim-flows`` with gradients a fiftieth as large, so that all steps can be simulated.
The value is the mean time of all steps with steps skipped, the peer's that of all simulated. ``details`` have the
``error``, that of the 99th percentile, the number of simulated steps, and how many times faster the run was.
``sim.skip.worst_error`` and ``sim.skip.speedup``: the largest error and the geometric mean of the speed-ups.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
from msgspec.structs import replace

from dlcp.bench import BenchResult, result, say, significant
from dlcp.sim.experiments.experiment import ExperimentRun, RunSetting
from dlcp.sim.experiments.running import run
from tests.bench.flows import SETTINGS
from tests.bench.harness import Benchmark, int_option

_COMPRESSION = 50.0
_NAMES = ("ring_star", "direct_racks", "direct_racks_dlcp", "servers_dlcp", "tree", "rails")
_ERROR = 0.01


def long_setting(name: str, steps: int) -> RunSetting:
    """Return a setting with more steps and smaller gradients."""
    setting = SETTINGS[name]
    training = tuple(replace(job, steps=steps, compression=_COMPRESSION) for job in setting.training)
    return replace(setting, training=training)


def timed(setting: RunSetting) -> tuple[dict[str, Any], float]:
    """Run a setting; return its job's part of the result file and the seconds of processor time."""
    item = ExperimentRun(experiment="skip", point={}, setting=setting, convergence="published")
    began = time.process_time()
    document = run(item)
    return document["jobs"][0], time.process_time() - began


def compare(name: str, steps: int) -> BenchResult:
    """Run a setting with and without skipping."""
    setting = long_setting(name, steps)
    skipping, skipping_s = timed(replace(setting, skip_steady=_ERROR))
    whole, whole_s = timed(setting)
    ours, theirs = skipping["step_s"], whole["step_s"]
    error = fmean(ours) / fmean(theirs) - 1
    tail = float(np.quantile(ours, 0.99) / np.quantile(theirs, 0.99)) - 1
    say(f"{name}: {error:+.2%} with {steps - skipping.get('skipped_steps', 0)} of {steps} steps simulated")
    details = {
        "error": significant(error),
        "p99_error": significant(tail),
        "simulated_steps": steps - skipping.get("skipped_steps", 0),
        "speedup": significant(whole_s / skipping_s),
        "processor_s": significant(skipping_s),
        "whole_processor_s": significant(whole_s),
    }
    return result(f"sim.skip.{name}", "s", [fmean(ours)], [fmean(theirs)], details=details)


def measure(arguments: argparse.Namespace) -> Iterator[BenchResult]:
    """Compare all settings, or some."""
    timed(long_setting("ring_star", 1))  # compiles
    results = [compare(name, arguments.steps) for name in arguments.settings or _NAMES]
    yield from results
    yield result("sim.skip.worst_error", "ratio", [max(abs(each.details["error"]) for each in results)])
    speedups = [each.details["speedup"] for each in results]
    yield result("sim.skip.speedup", "ratio", [geometric_mean(speedups)], smaller_is_better=False)


BENCHMARK = Benchmark(
    measure,
    {
        "--settings": {"nargs": "+", "choices": list(SETTINGS), "metavar": "NAME", "help": "only these settings"},
        "--steps": int_option(1000, "training steps"),
    },
)
