# SPDX-License-Identifier: Apache-2.0
"""Training over Mininet: DLCP against Gloo over TCP (CUBIC) on the same links, in turns, pattern against pattern.

Each setting is a testbed of its own, brought up once; in each round every contender trains over it from the same seed,
in an order drawn anew. ``testbed.SETTING.step`` are seconds a step, ``testbed.SETTING.accuracy`` seconds of training to
the accuracy that all contenders of a round held (``dlcp.report.runs``). DLCP is held to the share that TCP flows of
the same pattern would have; with priority over the background it is in ``details``, as are what the background got,
the largest loss of a message, and how idle the machine was. The commands are those of README: ``dlcp testbed up | run
| down``. Takes root, Mininet and, for BMv2, ``simple_switch_grpc``; what is missing is left out, and said.

It takes some 20 minutes a round. The exit status is 1 if a bound was exceeded, replicas differed, or hosts and switches
counted differently.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dlcp.bench import BenchResult, median, result, say, significant
from dlcp.controller.fabric import SwitchKind
from dlcp.controller.testbed.requirements import missing
from dlcp.demo.testbed_runs import disagreements
from dlcp.report.runs import Run, progress_to, target_accuracy
from tests.bench.harness import SEED, Benchmark, FailedError, Samples, Turns, int_option, scratch

NAME: Final = "bench"
OURS, PEER, PRIORITY = "dlcp", "gloo", "dlcp_priority"
SETTINGS: Final[dict[str, tuple[SwitchKind, str, str]]] = {
    "builtin.allreduce": ("builtin", "star", "direct"),
    "builtin.ps": ("builtin", "star", "ps"),
    "bmv2.ps": ("bmv2", "star", "ps"),
    "leafspine.allreduce": ("builtin", "leaf-spine", "direct"),
}
"""Switch, shape of the fabric, and pattern."""


def testbed(*arguments: str) -> None:
    """Run ``dlcp testbed``; its output goes to standard error."""
    command = [sys.executable, "-m", "dlcp.cli", "testbed", *arguments, "--name", NAME]
    subprocess.run(command, check=True, stdout=sys.stderr)


@contextmanager
def up(kind: SwitchKind, shape: str, rate_mbps: float | None) -> Iterator[None]:
    """Hold a testbed up."""
    rate = [] if rate_mbps is None else ["--rate-mbps", str(rate_mbps)]
    testbed("up", "--switch", kind, "--fabric", shape, *rate)
    try:
        yield
    finally:
        testbed("down")


def train(collective: str, seed: int, steps: int, contender: str, runs: dict[str, list[Run]]) -> float:
    """Train once over the testbed that is up, keep the run, and return its seconds a step."""
    with scratch() as folder:
        training = ["--collective", collective, "--seed", str(seed), "--steps", str(steps)]
        testbed("run", *training, "--only", contender, "--out", str(folder))
        run: Run = json.loads((folder / "runs" / f"{contender}.json").read_text(encoding="utf-8"))
    runs[contender].append(run)
    return float(sum(run["steps"]) / len(run["steps"]))


def measure(setting: str, turns: Turns, *, steps: int, rate_mbps: float | None) -> tuple[list[BenchResult], list[str]]:
    """Measure one setting; return its results, and what was wrong in any of its runs."""
    kind, shape, collective = SETTINGS[setting]
    runs: dict[str, list[Run]] = {PEER: [], OURS: [], PRIORITY: []}
    contenders: dict[str, Callable[[], float]] = {
        name: partial(train, collective, turns.seed, steps, name, runs) for name in runs
    }
    with up(kind, shape, rate_mbps):
        samples = turns.take(contenders)
    results = [compared(f"testbed.{setting}.step", samples, described(runs))]
    times, targets = times_to_accuracy(runs)
    if times[OURS]:
        results.append(compared(f"testbed.{setting}.accuracy", times, {"targets": targets}))
    return results, wrong(runs)


def compared(name: str, samples: Samples, details: dict[str, Any]) -> BenchResult:
    """Return DLCP's seconds against Gloo's, with those of priority among the details."""
    by_priority = [theirs / ours for theirs, ours in zip(samples[PEER], samples[PRIORITY], strict=True)]
    priority = {"value": significant(median(samples[PRIORITY])), "ratio": significant(median(by_priority))}
    return result(name, "s", samples[OURS], samples[PEER], details={"with_priority": priority, **details})


def described(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Return further facts that a reader of the figures needs, by contender."""
    fabric = runs[OURS][0]["fabric"]
    return {
        "rate_mbps": fabric["rate_bps"] / 1e6,
        "depth_packets": fabric["depth_packets"],
        "fair_to_background_mbps": significant(runs[OURS][0]["background"]["fair_share_bps"] / 1e6),
        "background_mbps": {
            name: significant(median([run["background"]["bps"] for run in mine]) / 1e6) for name, mine in runs.items()
        },
        "idle": {name: significant(median([run["fabric"]["idle"] for run in mine])) for name, mine in runs.items()},
        "largest_loss_of_a_message": max(run["ledger"]["max_message_ratio"] for run in runs[OURS] + runs[PRIORITY]),
        "final_accuracy": {
            name: significant(median([run["final_accuracy"] for run in mine])) for name, mine in runs.items()
        },
    }


def times_to_accuracy(runs: dict[str, list[Run]]) -> tuple[Samples, list[float]]:
    """Return each contender's seconds to the target of each round, and the targets; rounds without one are left out."""
    times: Samples = {name: [] for name in runs}
    targets = []
    for number in range(len(runs[OURS])):
        of_round = {name: mine[number] for name, mine in runs.items()}
        target = target_accuracy(of_round)
        reached = {name: progress_to(run, target, "seconds") for name, run in of_round.items()}
        if target is None or None in reached.values():
            continue
        targets.append(target)
        for name, seconds in reached.items():
            assert seconds is not None
            times[name].append(seconds)
    return times, targets


def wrong(runs: dict[str, list[Run]]) -> list[str]:
    """Return what should not be, a line each."""
    lines = []
    for number in range(len(runs[OURS])):
        of_round = {name: mine[number] for name, mine in runs.items()}
        lines += disagreements(of_round)
        lines += [f"{name}: replicas differ" for name, run in of_round.items() if not run["replicas_identical"]]
        lines += [
            f"{name}: {run['ledger']['violations']} messages lost more than the bound"
            for name, run in of_round.items()
            if run["ledger"] is not None and run["ledger"]["violations"]
        ]
    return lines


def _testbed(arguments: argparse.Namespace) -> list[BenchResult]:
    results: list[BenchResult] = []
    failed: dict[str, str] = {}
    for setting in arguments.settings:
        lacking = missing(SETTINGS[setting][0])
        if lacking:
            say(f"testbed.{setting}: left out: {'; '.join(lacking)}")
            continue
        turns = replace(arguments.turns, seed=arguments.seed, progress=lambda words, at=setting: say(f"{at}: {words}"))
        try:
            found, lines = measure(setting, turns, steps=arguments.steps, rate_mbps=arguments.rate_mbps)
        except subprocess.CalledProcessError as error:  # which has said why; the other settings count all the same
            failed[f"testbed.{setting}"] = f"`{' '.join(error.cmd)}` ended with status {error.returncode}"
            continue
        results += found
        if lines:
            failed[f"testbed.{setting}"] = "; ".join(lines)
    if failed:
        raise FailedError(results, failed)
    return results


BENCHMARK: Final = Benchmark(
    _testbed,
    {
        "--seed": int_option(SEED, "of everything", least=0),
        "--steps": int_option(24, "of each training"),
        "--rate-mbps": {"type": float, "help": "of a port (default: the testbed's)"},
        "--settings": {"nargs": "+", "choices": list(SETTINGS), "default": list(SETTINGS), "help": "(default: all)"},
    },
    rounds=3,
    warm_up=None,
)
