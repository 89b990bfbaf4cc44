# SPDX-License-Identifier: Apache-2.0
"""Train on handwritten digits with processes that come and go.

``dlcp train --elastic 2:4 elastic.py`` starts four. Kill any of them: the others go on, and it comes back.
"""

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import dlcp.torch


def main() -> None:
    """Read the arguments, train, and test."""
    parser = argparse.ArgumentParser(description="Handwritten digits, with processes that come and go")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images per step of each process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, as if it took longer")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().flatten(1) / 16
    labels = torch.from_numpy(digits.target).long()
    known, unseen = TensorDataset(images[:-360], labels[:-360]), (images[-360:], labels[-360:])

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = dlcp.torch.ElasticSampler(len(known), args.batch_size, seed=args.seed)
    with dlcp.torch.Elastic(model, optimizer, sampler=sampler) as training:
        group, loader = training.group, DataLoader(known, batch_sampler=sampler)
        print(f"rank {group.rank} (process {os.getpid()}) begins with step {group.step}", flush=True)
        for epoch in range(sampler.epoch, args.epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
                optimizer.step()
                time.sleep(args.pause)
            if group.rank == group.ranks[0]:
                share = (model(unseen[0]).argmax(1) == unseen[1]).float().mean().item()
                print(f"epoch {epoch + 1}: {share:.1%} right, {group.size} ranks", flush=True)
        print(f"rank {group.rank} ends after step {group.step}: {dlcp.torch.parameter_digest(model)[:12]}", flush=True)


if __name__ == "__main__":
    main()
