# SPDX-License-Identifier: Apache-2.0
"""Train a classifier on processes of unequal speed, with batches in proportion to speed and equally weighted samples.

Run it with ``torchrun --nproc-per-node 2 -m dlcp.examples.mixed_speeds``. The last process simulates a slow machine: it
repeats its work ``--slowness`` times. ``--equal`` gives all processes the same batch, for comparison.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dlcp.torch
from dlcp.examples.image_classifier import Net, load_data


@dataclass(frozen=True)
class TrainingSetup:
    """Settings common to all processes.

    Parameters
    ----------
    global_batch
        Images of all processes in a step.
    epochs, seed, rate
        Number of epochs; seed of the images' order and of the initial weights; learning rate.
    slowness
        Number of times that each process does its work, by rank.
    """

    global_batch: int = 96
    epochs: int = 8
    seed: int = 1
    rate: float = 0.05
    slowness: Sequence[int] = (1, 3)


@dataclass(frozen=True)
class TrainingOutcome:
    """Results: batch sizes by rank, seconds of training, steps, accuracy, a digest of the model, and lost packets."""

    sizes: list[int]
    seconds: float
    steps: int
    accuracy: float
    digest: str
    lost: int


def backward(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, times: int) -> None:
    """Compute gradients ``times`` times, to simulate a machine that is slower by this factor."""
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    for _ in range(times - 1):
        torch.autograd.grad(functional.nll_loss(plain(images), labels), list(plain.parameters()))
    functional.nll_loss(model(images), labels).backward()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it


def measured_sizes(setup: TrainingSetup, training: TensorDataset) -> list[int]:
    """Measure the speed of each process, and return batch sizes in proportion."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    probe = setup.global_batch // ranks
    images, labels = training.tensors[0][:probe], training.tensors[1][:probe]
    model = Net()
    dist.barrier()  # all are busy at the same time, as in training
    speed = dlcp.torch.samples_per_s(lambda: backward(model, images, labels, setup.slowness[rank]), probe)
    return dlcp.torch.balanced_batches(setup.global_batch, speed)


def train(setup: TrainingSetup, sizes: Sequence[int], options: dlcp.torch.Options) -> TrainingOutcome:
    """Train with these batch sizes by rank, in a process group. Global batches do not depend on the sizes."""
    rank = dist.get_rank()
    training, testing = load_data()
    torch.manual_seed(setup.seed)
    model = DistributedDataParallel(Net().eval())  # eval: without dropout, so that only the division differs
    state = dlcp.torch.enable(model, options.with_(samples=sizes[rank]))
    batches = dlcp.torch.BalancedBatches(len(training), sizes, rank, seed=setup.seed)
    loader = DataLoader(training, batch_sampler=batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.rate, momentum=0.9)
    dist.barrier()
    began_s = time.perf_counter()
    for epoch in range(setup.epochs):
        batches.set_epoch(epoch)
        for images, labels in loader:
            state.samples(len(labels))
            optimizer.zero_grad()
            backward(model, images, labels, setup.slowness[rank])
            optimizer.step()
    seconds = time.perf_counter() - began_s
    with torch.no_grad():
        found = model.module(testing.tensors[0]).argmax(dim=1)
    accuracy = float((found == testing.tensors[1]).float().mean())
    digest = dlcp.torch.parameter_digest(model.module)
    lost = state.ledger.summary()["lost"]
    state.close()
    return TrainingOutcome(list(sizes), seconds, setup.epochs * len(batches), accuracy, digest, lost)


def main() -> None:
    """Read the arguments, train, and print the results."""
    parser = argparse.ArgumentParser(description="Training on processes of unequal speed")
    parser.add_argument("--batch-size", type=int, default=96, help="images of all processes in a step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--slowness", type=int, default=3, help="how much slower the last process is")
    parser.add_argument("--equal", action="store_true", help="give all processes the same batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    setup = TrainingSetup(arguments.batch_size, arguments.epochs, slowness=(*[1] * (ranks - 1), arguments.slowness))
    training, _ = load_data()
    even = [arguments.batch_size // ranks] * ranks
    outcome = train(setup, even if arguments.equal else measured_sizes(setup, training), dlcp.torch.Options())
    if dist.get_rank() == 0:
        print(
            f"batches of {', '.join(map(str, outcome.sizes))} images: {outcome.steps} steps in {outcome.seconds:.2f} "
            f"s, accuracy {outcome.accuracy:.1%}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
