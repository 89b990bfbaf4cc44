# SPDX-License-Identifier: Apache-2.0
"""Train on handwritten digits, and resume from the last checkpoint after any interruption.

It can resume with another number of processes, because a step's images depend on the step only, and the processes
divide them. ``torchrun --nproc-per-node 2 --max-restarts 3 resumable.py --checkpoint digits.pt`` restarts all processes
when one of them fails. It also resumes when started again by hand.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def batch_of(step: int, size: int, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process's share of a step's images and labels."""
    a_pass = len(labels) // size
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step // a_pass))
    first = step % a_pass * size
    mine = order[first : first + size][dist.get_rank() :: dist.get_world_size()]
    return images[mine], labels[mine]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint atomically, because a process may be killed while it writes."""
    part = path.with_suffix(".part")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
    part.replace(path)


def main() -> None:
    """Read the arguments, and train from the last checkpoint to the last step."""
    parser = argparse.ArgumentParser(description="Handwritten digits, with checkpoints")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="FILE", help="file on a disk that all nodes share"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--batch-size", type=int, default=96, help="images per step, of all processes together")
    parser.add_argument("--backend", default="gloo")
    args = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().flatten(1) / 16
    labels = torch.from_numpy(digits.target).long()

    dist.init_process_group(args.backend)
    plain = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if args.checkpoint.exists():
        found = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        plain.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    model = DistributedDataParallel(plain, bucket_cap_mb=1)
    if dist.get_rank() == 0:
        print(f"from step {first} on, {dist.get_world_size()} processes", flush=True)

    for step in range(first, args.steps):
        part, wanted = batch_of(step, args.batch_size, images, labels)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(part), wanted)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % args.save_every == 0:
            save(args.checkpoint, step + 1, plain, optimizer)
            print(f"step {step + 1} of {args.steps}, loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        with torch.no_grad():
            right = int((plain(images).argmax(dim=1) == labels).sum())
        print(f"{right} of {len(labels)} recognised ({right / len(labels):.1%})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
