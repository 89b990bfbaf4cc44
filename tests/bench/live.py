# SPDX-License-Identifier: Apache-2.0
"""The cost of being watched: processor time of ranks that write snapshots, of ranks that do not, and of a server.

Two ranks train a small model with DDP over loopback, 200 steps at a time, watched and unwatched in turns.
"""

import argparse
import tempfile
import time
from pathlib import Path

from dlcp.bench import BenchResult, median, result
from tests.bench.harness import Benchmark
from tests.live.snapshots import snapshot, write
from tests.torch.workers import Worker, launch, values

WIDTH, BATCH = 300, 32
STEPS, WARM_UP = 200, 20
RANKS_SERVED = 8


def training(worker: Worker, folder: str, rounds: int) -> list[dict[str, float]]:
    """Return of each round processor seconds for the steps, unwatched and watched, and how long a step took."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch

    layers = [torch.nn.Linear(1000, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 10)]
    inputs, found = torch.randn(BATCH, 1000), []

    def steps(model: torch.nn.Module, count: int) -> None:
        for _ in range(count):
            model.zero_grad()
            model(inputs).square().mean().backward()

    for number in range(rounds):
        used = {}
        for watched in (False, True) if number % 2 else (True, False):
            model = DistributedDataParallel(torch.nn.Sequential(*layers))
            state = dlcp.torch.enable(model, worker.options(live=folder if watched else ""))
            steps(model, WARM_UP)
            began_s, before_s = time.monotonic(), time.process_time()
            steps(model, STEPS)
            used["watched" if watched else "unwatched"] = time.process_time() - before_s
            used["step_s"] = (time.monotonic() - began_s) / STEPS
            state.close()
        found.append(used)
    return found


def noted_us(steps: int = 20_000) -> float:
    """Return the processor time of recording a step of one bucket with four ranks, with warm caches."""
    from dlcp.session.snapshots import StepMeter

    meter, began_s = StepMeter(), time.thread_time()
    for step in range(steps):
        meter.on_ready(step, ())
        for message in range(12):
            meter.on_message(1 + message % 3, time.monotonic())
        meter.on_averaged(step)
    return 1e6 * (time.thread_time() - began_s) / steps


def snapshot_ms(count: int = 300) -> float:
    """Return the processor time of a snapshot of 100 layers and 63 peers, without the queries to the endpoint."""
    import numpy as np

    from dlcp.collectives import Residual
    from dlcp.session import Options
    from dlcp.session.averager import StepAverager
    from dlcp.session.snapshots import SnapshotWriter
    from dlcp.session.training_session import Fallback, TrainingSession
    from dlcp.transport import Delivery, LossBound, Membership, MessageKey
    from dlcp.transport.ledger import Ledger
    from dlcp.values.tags import PacketTags, Tagger

    options, ledger = Options(), Ledger()
    layers = np.repeat(np.arange(100, dtype=np.uint8), 10)
    plain = np.zeros(len(layers), np.uint8)
    tags = PacketTags(queue=plain, drop_class=plain, protected=plain.astype(bool), layer=layers)
    for peer in range(1, 64):
        delivery = Delivery(np.ones(len(layers), bool), len(layers), 0, 0.01)
        ledger.record(MessageKey(0, peer), peer, "fc", tags, LossBound(0.1), delivery)
    tagger = Tagger(options.tag_policy)
    averager = StepAverager(
        options, Membership(0, ranks=tuple(range(64))), ledger=ledger, feedback=Residual(), tagger=tagger
    )
    session = TrainingSession(averager, Fallback("nothing"))
    with tempfile.TemporaryDirectory() as folder:
        writer = SnapshotWriter(session, Path(folder))
        began_s = time.thread_time()
        for _ in range(count):
            writer._write()
        spent_s = time.thread_time() - began_s
        writer.close("ready", None)
    return 1e3 * spent_s / count


def served_ms(rounds: int = 40) -> float:
    """Return the processor time in which a server takes in, and puts together, what eight ranks tell in a second."""
    from dlcp.live.http_server import LiveServer

    with tempfile.TemporaryDirectory() as folder, LiveServer([Path(folder)], "0") as server:
        server._closing.set()  # from here on the test does what its thread does
        server._refresher.join()
        spent_s = 0.0
        for steps in range(1, rounds + 1):
            write(Path(folder), *(snapshot(rank, ranks=RANKS_SERVED, steps=steps) for rank in range(RANKS_SERVED)))
            began_s = time.thread_time()
            server._training.refresh()
            server._publish()
            spent_s += time.thread_time() - began_s
    return 1e3 * spent_s / rounds


def _live(arguments: argparse.Namespace) -> list[BenchResult]:
    rounds = arguments.rounds
    with tempfile.TemporaryDirectory() as folder:
        found = [used for rank in values(launch(2, training, folder, rounds, limit_s=60 * rounds)) for used in rank]
    ratios = [used["watched"] / used["unwatched"] for used in found]
    details = {
        "step_ms": 1e3 * median([used["step_s"] for used in found]),
        "step_cpu_ms": 1e3 * median([used["unwatched"] for used in found]) / STEPS,
    }
    return [
        result("live.rank", "ratio of processor time", ratios, details=details),
        result("live.noted", "us", [noted_us() for _ in range(rounds)]),
        result("live.snapshot", "ms", [snapshot_ms() for _ in range(rounds)]),
        result("live.served", "ms", [served_ms() for _ in range(rounds)]),
    ]


BENCHMARK = Benchmark(_live, rounds=9, warm_up=None)
