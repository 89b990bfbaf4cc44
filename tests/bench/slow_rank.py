# SPDX-License-Identifier: Apache-2.0
"""Whether ``dlcp.torch.watch`` names the slow rank and the cause, and the cost of watching.

Four ranks in network namespaces train with DDP over Gloo, around a router with links of one rate. In each round every
cause has its turn, with another rank: computing (a layer's forward pass sleeps), data loading (a sleep before the
forward pass), the link (both directions of its port have a fraction of the rate), and none, where no rank may be named.
Every run is a new model and a new watch. A verdict is right if it names rank and cause.

Costs are of the same ranks with nothing slow: steps with and without a watch, in turns in the same processes. The time
of a step is that of its slowest rank. What hooks take of a step is measured alone, on one rank whose layers are tiny.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from dlcp.bench import BenchResult, median, result, say
from dlcp.commands.common import DURATIONS
from dlcp.session.slowness import LEAST_STEPS, UNCOMPARED_STEPS, Cause
from dlcp.torch.watching import StepClock, StepWatch
from tests.bench.harness import Benchmark, Turns, float_option, int_option, mean, rate_option, scratch
from tests.bench.paths import LINK_BURST_BYTES, QUEUE_S, RoutedPath
from tests.bench.ranks import Ranks, join_gloo

WIDTH, LAYERS, BATCH = 256, 6, 128
SLOW_LAYER: Final = 2
CAUSES: Final = (Cause.COMPUTING, Cause.LOADING, Cause.LINK, None)
WARM_UP: Final = 5
NOTED_STEPS: Final = 2000


class Sleepy(torch.nn.Module):
    """A layer that may be slow."""

    def __init__(self, width: int, sleep_s: float) -> None:
        super().__init__()
        self.layer, self.sleep_s = torch.nn.Linear(width, width), sleep_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, later."""
        if self.sleep_s:
            time.sleep(self.sleep_s)
        output: torch.Tensor = self.layer(values).relu()
        return output


def network(width: int = WIDTH, layers: int = LAYERS, sleep_s: float = 0.0) -> torch.nn.Sequential:
    """Return a model of equal layers; one may be slow."""
    return torch.nn.Sequential(*(Sleepy(width, sleep_s if layer == SLOW_LAYER else 0.0) for layer in range(layers)))


class Trainee:
    """A rank; see :class:`tests.bench.ranks.Ranks`."""

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        join_gloo(rank, ranks, store, "eth0")
        self.rank = rank
        self.inputs = torch.randn(BATCH, WIDTH)

    def judged(self, slow: int | None, cause: str | None, sleep_s: float, steps: int) -> dict[str, Any]:
        """Train with one slow rank; return the verdict."""
        mine = slow == self.rank
        model = DistributedDataParallel(network(sleep_s=sleep_s if mine and cause == Cause.COMPUTING.value else 0.0))
        watch = StepWatch(model)
        self._train(model, steps, sleep_s if mine and cause == Cause.LOADING.value else 0.0)
        watch.close()
        verdict: dict[str, Any] = watch.overall()["verdict"]
        return verdict

    def timed(self, watched: bool, steps: int) -> float:
        """Return the median duration of a step, in seconds, with or without a watch."""
        model = DistributedDataParallel(network())
        watch = StepWatch(model) if watched else None
        durations = self._train(model, steps + WARM_UP, 0.0)[WARM_UP:]
        if watch:
            watch.close()
        return median(durations)

    def _train(self, model: DistributedDataParallel, steps: int, loading_s: float) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        durations = []
        for _ in range(steps):
            began_s = time.monotonic()
            if loading_s:
                time.sleep(loading_s)
            optimizer.zero_grad()
            model(self.inputs).square().mean().backward()
            optimizer.step()
            durations.append(time.monotonic() - began_s)
        return durations


class Alone:
    """One rank that measures the time of the hooks."""

    def __init__(self, rank: int, store: str) -> None:
        join_gloo(rank, 1, store, "lo")

    def noted_us(self) -> float:
        """Return the processor time of the hooks of a step with eight groups of layers, in microseconds."""
        model = DistributedDataParallel(network(width=2, layers=8))
        inputs = torch.randn(2, 2)

        def step_us() -> float:
            began_s = time.thread_time()
            for _ in range(NOTED_STEPS):
                model(inputs).mean().backward()
            return 1e6 * (time.thread_time() - began_s) / NOTED_STEPS

        step_us()
        without_us = step_us()
        clock = StepClock(model)
        with_us = step_us()
        clock.close()
        return with_us - without_us


def named(path: RoutedPath, ranks: Ranks, arguments: argparse.Namespace) -> Iterator[BenchResult]:
    """Yield for each cause the share of verdicts that are right."""
    count = len(path.hosts)
    answers: dict[Cause | None, list[dict[str, Any]]] = {cause: [] for cause in CAUSES}
    for number in range(arguments.rounds):
        slow = number % count
        for cause in CAUSES:
            with _slow_port(path, slow, arguments.slow_mbps) if cause is Cause.LINK else nullcontext():
                of_whom = None if cause is None else slow
                told = ranks.call("judged", of_whom, cause and cause.value, arguments.slow_ms / 1e3, arguments.steps)
            (verdict,) = {each["text"]: each for each in told}.values()  # the same on all ranks
            right = verdict["rank"] == of_whom and verdict["cause"] == (cause and cause.value)
            answers[cause].append(verdict | {"right": right})
            name = f"{cause.value if cause else 'nothing'} {'right' if right else 'WRONG'}"
            say(f"round {number + 1}, {name}: {verdict['text']}")
    for cause, verdicts in answers.items():
        right = [float(each["right"]) for each in verdicts]
        details = {
            "right": round(sum(right)),
            "wrong": [each["text"] for each in verdicts if not each["right"]],
            "first": verdicts[0]["text"],
            "step_ms": 1e3 * median([each["step_s"] for each in verdicts]),
            "lost_ms": 1e3 * median([each["lost_s"] for each in verdicts]),
        }
        name = f"slow_rank.{cause.value.replace(' ', '_') if cause else 'none'}"
        yield BenchResult(name, mean(right), "share named rightly", None, None, len(right), 0.0, details)


@contextmanager
def _slow_port(path: RoutedPath, rank: int, rate_mbps: float) -> Iterator[None]:
    """Slow both directions of a rank's port down."""

    def limit(mbps: float) -> None:
        rate_bps = round(1e6 * mbps)
        more = {"burst_bytes": LINK_BURST_BYTES, "limit_bytes": round(rate_bps * QUEUE_S / 8) + LINK_BURST_BYTES}
        path.router.limit_rate(f"port{rank}", rate_bps, **more)
        path.hosts[rank].limit_rate("eth0", rate_bps, **more)

    assert path.rate_bps
    limit(rate_mbps)
    try:
        yield
    finally:
        limit(path.rate_bps / 1e6)


def cost(ranks: Ranks, arguments: argparse.Namespace) -> BenchResult:
    """Return the times of a step with a watch and without."""

    def step_ms(watched: bool) -> float:
        steps_s: list[float] = ranks.call("timed", watched, arguments.cost_steps)
        return 1e3 * max(steps_s)

    turns: Turns = arguments.turns
    samples = turns.take({"unwatched": partial(step_ms, False), "watched": partial(step_ms, True)})
    return result("slow_rank.step", "ms", samples["watched"], samples["unwatched"])


def _measure(arguments: argparse.Namespace) -> list[BenchResult]:
    count = arguments.ranks
    with scratch() as folder:
        with Ranks(Alone, [str(folder / "alone")], [None]) as alone:
            noted = [alone.call("noted_us")[0] for _ in range(arguments.rounds)]
        path = RoutedPath(count, rate_bps=round(1e6 * arguments.link_mbps), offloads=True)
        with path, Ranks(Trainee, [count, str(folder / "store")], path.namespaces) as ranks:
            return [
                *named(path, ranks, arguments),
                cost(ranks, arguments),
                result("slow_rank.hooks", "us", noted),
            ]


BENCHMARK: Final = Benchmark(
    _measure,
    {
        "--ranks": int_option(4, "that train", least=3, most=64),
        "--steps": int_option(25, "of a run with a verdict", least=LEAST_STEPS + UNCOMPARED_STEPS),
        "--cost-steps": int_option(60, "of a run without"),
        "--slow-ms": float_option(20.0, "that the slow rank sleeps in a step", DURATIONS, "MS"),
        "--link-mbps": rate_option(400.0, "of each link"),
        "--slow-mbps": rate_option(100.0, "of the slow link"),
    },
    rounds=20,
    warm_up=1,
    root=True,
)
