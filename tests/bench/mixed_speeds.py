# SPDX-License-Identifier: Apache-2.0
"""Two ranks, one three times as slow because it does its work that much more often: equal batches, and balanced ones.

Both do all work several times over, so that a step takes as long as with a model of some size, and it is computing that
counts and not how soon a busy machine wakes a process up.

Both ways train the same model on the same global batches over loopback with DLCP, an epoch of one and of the other in
turn, in the same processes. Speeds are measured by the ranks themselves. Accuracies are of the whole training.
"""

import argparse
from functools import partial

import dlcp.torch
from dlcp.bench import BenchResult, result, say
from dlcp.examples.image_classifier import load_data
from dlcp.examples.mixed_speeds import TrainingOutcome, TrainingSetup, measured_sizes, train
from tests.bench.harness import Benchmark, int_option, scratch
from tests.bench.paths import loopback
from tests.bench.ranks import Ranks, join_gloo

SLOWNESS = (8, 24)
EQUAL, BALANCED = "equal batches", "balanced batches"


class Trainee:
    """A rank that trains for some epochs with some batch sizes; see :class:`tests.bench.ranks.Ranks`."""

    def __init__(self, rank: int, hosts: list[str], store: str, setup: TrainingSetup) -> None:
        join_gloo(rank, len(hosts), store, "lo")
        self.rank, self.setup = rank, setup
        self.options = dlcp.torch.Options(bind=f"{hosts[rank]}:0", fallback=False)

    def measure(self) -> list[int]:
        """Return batch sizes in proportion to the ranks' speeds."""
        return measured_sizes(self.setup, load_data()[0])

    def train(self, sizes: list[int]) -> TrainingOutcome:
        """Train from the beginning with batches of these sizes."""
        return train(self.setup, sizes, self.options)


def measure(arguments: argparse.Namespace) -> list[BenchResult]:
    """Train in both ways in turn; return seconds of training and the accuracies."""
    setup = TrainingSetup(epochs=arguments.epochs, slowness=SLOWNESS)
    ranks = len(SLOWNESS)
    outcomes: dict[str, list[TrainingOutcome]] = {EQUAL: [], BALANCED: []}
    with scratch() as folder, loopback(ranks) as path:
        hosts = [path.address(rank) for rank in range(ranks)]
        with Ranks(Trainee, [hosts, str(folder / "store"), setup], path.namespaces) as trainees:
            sizes = {EQUAL: [setup.global_batch // ranks] * ranks, BALANCED: trainees.call("measure")[0]}
            say(f"balanced batches: {sizes[BALANCED]}")

            def once(name: str) -> float:
                found: list[TrainingOutcome] = trainees.call("train", sizes[name])
                if len({outcome.digest for outcome in found}) > 1:
                    raise RuntimeError(f"{name}: ranks have different parameters")
                outcomes[name].append(found[0])
                return max(outcome.seconds for outcome in found)

            samples = arguments.turns.take({name: partial(once, name) for name in (EQUAL, BALANCED)})
    details = {
        "path": path.words,
        "slowness": list(SLOWNESS),
        "global_batch": setup.global_batch,
        "sizes": {name: sizes[name] for name in sizes},
        "steps": outcomes[EQUAL][0].steps,
        "accuracy": {name: found[-1].accuracy for name, found in outcomes.items()},
        "possible": max(SLOWNESS) * sum(1 / each for each in SLOWNESS) / ranks,
        "packets_lost": {name: sum(outcome.lost for outcome in found) for name, found in outcomes.items()},
    }
    return [result("mixed_speeds.training", "s", samples[BALANCED], samples[EQUAL], details=details)]


BENCHMARK = Benchmark(measure, {"--epochs": int_option(8, "of each training")}, rounds=5, warm_up=1)
