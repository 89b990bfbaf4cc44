# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on scikit-learn's handwritten digits, in one process or several.

The structure follows PyTorch's published MNIST and ImageNet examples: ``train``, ``test``, a checkpoint to resume
from, ``main``. Run it with ``python image_classifier.py`` or ``torchrun --nproc-per-node 2 image_classifier.py``.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TEST_IMAGES = 360


class Net(nn.Module):
    """Two convolutions and two linear layers, for grey images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 16, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return log probabilities, shape (n, 10), of images of shape (n, 1, 8, 8)."""
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        x = functional.relu(self.fc1(x))
        return functional.log_softmax(self.fc2(x), dim=1)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test data, split in the same way in every process."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target[order]).long()
    return (
        TensorDataset(images[TEST_IMAGES:], labels[TEST_IMAGES:]),
        TensorDataset(images[:TEST_IMAGES], labels[:TEST_IMAGES]),
    )


def train(
    args: argparse.Namespace,
    model: nn.Module,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    epoch: int,
) -> None:
    """Train for one epoch."""
    model.train()
    for batch, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        optimizer.step()
        if args.rank == 0 and batch % args.log_interval == 0:
            print(f"epoch {epoch}, batch {batch}/{len(loader)}, loss {loss.item():.4f}", flush=True)
        if args.dry_run:
            break


def test(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Return the share of test images that are classified correctly, and print it."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += functional.nll_loss(output, labels, reduction="sum").item()
            correct += int((output.argmax(dim=1) == labels).sum())
            count += len(labels)
    print(f"test: average loss {loss / count:.4f}, accuracy {correct}/{count} ({correct / count:.1%})", flush=True)
    return correct / count


def main() -> None:
    """Read the arguments, train and test."""
    parser = argparse.ArgumentParser(description="Handwritten digits")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.7, help="the learning rate's factor after each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="one batch per epoch")
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint to FILE after each epoch")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="resume from the checkpoint in FILE")
    args = parser.parse_args()
    distributed = "RANK" in os.environ
    args.rank = int(os.environ.get("RANK", "0"))

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    training, testing = load_data()
    model: nn.Module = Net()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] | None = None
    if distributed:
        dist.init_process_group(args.backend)
        sampler = DistributedSampler(training, seed=args.seed)
        model = DistributedDataParallel(model)
    train_loader = DataLoader(training, args.batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)
    test_loader = DataLoader(testing, 360)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    start = 1
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        plain.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start = checkpoint["epoch"] + 1

    for epoch in range(start, args.epochs + 1):
        if sampler:
            sampler.set_epoch(epoch)
        train(args, model, train_loader, optimizer, epoch)
        scheduler.step()
        if args.rank == 0:
            test(plain, test_loader)
            if args.save:
                parts = {"model": plain, "optimizer": optimizer, "scheduler": scheduler}
                torch.save({"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}}, args.save)

    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
