# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on handwritten digits with PyTorch's DDP, on any number of ranks.

Comments mark the lines for DLCP. Run it on two ranks with
``dlcp launch -n 2 python -m dlcp.examples.frameworks.torch_digits``, or with torchrun.
"""

import argparse
import os
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch  # DLCP
from dlcp.examples.frameworks import Digits, load, parser


def network(seed: int) -> nn.Module:
    """Return a network for images of shape (1, 8, 8)."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def as_tensors(digits: Digits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, shape (n, 1, 8, 8), and labels as tensors."""
    return torch.from_numpy(digits.images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(digits.labels).long()


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the share of images that are classified correctly."""
    images, labels = as_tensors(digits)
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(model: DistributedDataParallel, training: Digits, args: argparse.Namespace) -> None:
    """Train a network."""
    images, labels = as_tensors(training.shard(dist.get_rank(), dist.get_world_size()))
    batches = len(labels) // args.batch_size
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * batches)
    generator = np.random.default_rng(args.seed)
    for _ in range(args.epochs):
        order = torch.from_numpy(generator.permutation(len(labels)))
        for chosen in order[: batches * args.batch_size].view(batches, args.batch_size):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
            optimizer.step()
            schedule.step()


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    options = parser("PyTorch", rate=0.1)
    options.add_argument("--save", metavar="FILE", help="write the model to FILE")
    return options.parse_args(given)


def main() -> None:
    """Join the other ranks, train, save."""
    args = arguments()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group("gloo")
    training, testing = load()
    model = DistributedDataParallel(network(args.seed))
    state = dlcp.torch.enable(model)  # DLCP: averages gradients from here on
    train(model, training, args)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy(model.module, testing):.1%}")
        if args.save:
            torch.save(model.module.state_dict(), args.save)
    state.close()  # DLCP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
