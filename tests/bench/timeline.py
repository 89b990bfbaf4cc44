# SPDX-License-Identifier: Apache-2.0
"""The cost of notes for a trace: each where it is taken in training, each where it is written, and all of a step's.

Two ranks train a small model with DDP over loopback. In the middle of a step the caches hold other things, so that a
note costs more there than in a loop of nothing but notes.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from dlcp.bench import BenchResult, median, result
from dlcp.host.timeline import Timeline
from tests.bench.harness import Benchmark
from tests.torch.workers import Worker, launch, values

WIDTH, BATCH = 300, 32
STEPS = 20
"""Steps of a round."""


class TimedTimeline(Timeline):
    """Adds up how long notes take those who take them."""

    taken, spent_ns = 0, 0

    def note(self, *what: Any) -> None:
        """Take a note, and add."""
        self._add(super().note, what)

    def note_message(self, *what: Any) -> None:
        """Take a note, and add."""
        self._add(super().note_message, what)

    def _add(self, note: Any, what: tuple[Any, ...]) -> None:
        began_ns = time.perf_counter_ns()
        note(*what)
        type(self).spent_ns += time.perf_counter_ns() - began_ns
        type(self).taken += 1


def training(worker: Worker, folder: str, rounds: int) -> list[tuple[float, float, float]]:
    """Return of each round a step's time and a note's, both in us, and the notes of a step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch
    from dlcp.host import timeline

    timeline.Timeline = TimedTimeline  # type: ignore[misc]
    layers = [torch.nn.Linear(1000, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 10)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    state = dlcp.torch.enable(model, worker.options(trace=folder))
    inputs = torch.randn(BATCH, 1000)
    clock_us = min(-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(1000)) / 1e3
    found = []
    for _ in range(1 + rounds):
        TimedTimeline.taken = TimedTimeline.spent_ns = 0
        began_s = time.perf_counter()
        for _ in range(STEPS):
            model.zero_grad()
            model(inputs).square().mean().backward()
        step_us, taken = 1e6 * (time.perf_counter() - began_s) / STEPS, TimedTimeline.taken
        found.append((step_us, TimedTimeline.spent_ns / 1e3 / taken - clock_us, taken / STEPS))
    state.close()
    return found[1:]


def written_us(notes: int = 100_000) -> float:
    """Return the processor time of a note that is written, in us, less that of taking it."""
    with tempfile.TemporaryDirectory() as folder:
        timeline, began_s, own_s = Timeline(Path(folder), 0, 0), time.process_time(), time.thread_time()
        for step in range(notes):
            timeline.note_message("sent", step, 3, 1, (1.5, 2.5), 100, 3, 4, 20, 10**9, 700, "layer1.0.conv1.weight")
        own_s = time.thread_time() - own_s
        timeline.close()
        return 1e6 * (time.process_time() - began_s - own_s) / notes


def _timeline(arguments: argparse.Namespace) -> list[BenchResult]:
    rounds = arguments.rounds
    with tempfile.TemporaryDirectory() as folder:
        found, *_ = values(launch(2, training, folder, rounds))
    steps_us, notes_us, counts = zip(*found, strict=True)
    written = [written_us() for _ in range(rounds)]
    cost = [count * (note_us + median(written)) for _, note_us, count in found]
    shares = [each / step_us for each, step_us in zip(cost, steps_us, strict=True)]
    return [
        result("timeline.taken", "us", notes_us),
        result("timeline.written", "us", written),
        result("timeline.step", "share", shares, details={"step_us": median(steps_us), "notes": median(counts)}),
    ]


BENCHMARK = Benchmark(_timeline, rounds=9, warm_up=None)
