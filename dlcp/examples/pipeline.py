# SPDX-License-Identifier: Apache-2.0
"""Train the digits network as a pipeline of replicated stages, on as many processes as there are replicas.

Each process runs one forward and one backward pass in turn (1F1B). Replicas of a stage take microbatches in rotation
and average their gradients with DistributedDataParallel. Because all microbatches of a step end before the optimizer's
step, the losses are those of one process::

    python -m dlcp.examples.pipeline                                            # one process
    torchrun --nproc-per-node 4 -m dlcp.examples.pipeline --replicas 3-1        # four, over Gloo
    dlcp train --nproc-per-node 4 -m dlcp.examples.pipeline --replicas 3-1 --backend dlcp

If all stages have the same number of replicas, PyTorch's own schedules do the same (``torch.distributed.pipelining``).
They have no stages with different numbers of replicas.
"""

import argparse
import contextlib
import json
import os
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlcp.examples.learning_tasks import SMALL_TASKS, LabelledData, evaluate

TASK = SMALL_TASKS["digits"]
MICROBATCHES = 12
IMAGES = 16
"""Microbatches of a step, and images in each; replicas have to share the microbatches evenly."""


class Stage:
    """The part of the pipeline on one process.

    Parameters
    ----------
    layers
        The stage's layers.
    ranks
        By stage, the processes that replicate it.
    number
        The number of this process's stage.
    shape
        Shape of one microbatch's input.
    """

    def __init__(self, layers: nn.Sequential, ranks: list[list[int]], number: int, shape: torch.Size) -> None:
        self.layers, self.ranks, self.number, self.shape = layers, ranks, number, shape
        self.is_first, self.is_last = number == 0, number == len(ranks) - 1
        replicas = len(ranks[number])
        place = ranks[number].index(dist.get_rank()) if dist.is_initialized() else 0
        self.own = range(place, MICROBATCHES, replicas)
        workers_from_here = sum(map(len, ranks[number:]))
        self.warm_up = min(len(self.own), -(-workers_from_here // replicas))
        # Every process has to make every group.
        groups = [dist.new_group(members) if len(members) > 1 else None for members in ranks]
        self.model = DistributedDataParallel(layers, process_group=groups[number]) if groups[number] else layers
        self._sending: list[dist.Work] = []
        self._begun: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
        """Run all passes of a step; return the losses of this process's microbatches, if its stage is the last."""
        losses: list[float] = []
        waiting = deque(self.own)
        for _ in range(self.warm_up):
            self._forward(waiting.popleft(), images, labels, losses)
        for microbatch in self.own:
            self._backward(microbatch, is_last=microbatch == self.own[-1])
            if waiting:
                self._forward(waiting.popleft(), images, labels, losses)
        for work in self._sending:
            work.wait()
        self._sending.clear()
        return losses

    def _forward(self, microbatch: int, images: torch.Tensor, labels: torch.Tensor, losses: list[float]) -> None:
        rows = slice(microbatch * IMAGES, (microbatch + 1) * IMAGES)
        inputs = images[rows] if self.is_first else self._receive(self.shape, self.number - 1, microbatch)
        inputs.requires_grad_(not self.is_first)
        with self._unsynchronized():
            outputs = self.model(inputs)
        if self.is_last:
            loss = nn.functional.cross_entropy(outputs, labels[rows])
            losses.append(loss.item())
            outputs = loss / len(self.own)  # replicas' gradients are averaged, their microbatches' are summed
        else:
            self._send(outputs.detach(), self.number + 1, microbatch)
        self._begun.append((inputs, outputs))

    def _backward(self, microbatch: int, *, is_last: bool) -> None:
        inputs, outputs = self._begun.popleft()
        gradient = None if self.is_last else self._receive(outputs.shape, self.number + 1, microbatch)
        if is_last and isinstance(self.model, DistributedDataParallel):
            self.model.reducer.prepare_for_backward([outputs])  # other passes came between this one's two
            torch.autograd.backward(outputs, gradient)
        else:
            with self._unsynchronized():
                torch.autograd.backward(outputs, gradient)
        if not self.is_first:
            assert inputs.grad is not None
            # The r replicas of a stage average gradients that should be summed over all microbatches.
            share = len(self.ranks[self.number]) / len(self.ranks[self.number - 1])
            self._send(inputs.grad / share, self.number - 1, microbatch)

    def _unsynchronized(self) -> contextlib.AbstractContextManager[None]:
        ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        return ddp.no_sync() if ddp else contextlib.nullcontext()

    def _peer(self, stage: int, microbatch: int) -> int:
        return self.ranks[stage][microbatch % len(self.ranks[stage])]

    def _send(self, values: torch.Tensor, stage: int, microbatch: int) -> None:
        work = dist.isend(values.contiguous(), self._peer(stage, microbatch), tag=microbatch)
        assert work is not None
        self._sending.append(work)

    def _receive(self, shape: torch.Size, stage: int, microbatch: int) -> torch.Tensor:
        values = torch.empty(shape)
        dist.recv(values, self._peer(stage, microbatch), tag=microbatch)
        return values


def divided(network: nn.Module, starts: list[str]) -> list[nn.Sequential]:
    """Return a sequential network's stages; ``starts`` names the first layer of each but the first."""
    stages = [nn.Sequential()]
    for name, layer in network.named_children():
        if name in starts:
            stages.append(nn.Sequential())
        stages[-1].add_module(name, layer)
    return stages


def train(replicas: list[int], starts: list[str], steps: int, seed: int) -> dict[str, object]:
    """Train this process's stage; return losses and accuracy on the first process, nothing on the others.

    Parameters
    ----------
    replicas
        Processes of each stage, which are those of the process group.
    starts
        First layer of each stage but the first.
    """
    torch.set_num_threads(1)
    stages = divided(TASK.network(seed), starts)
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = [list(range(sum(replicas[:at]), sum(replicas[: at + 1]))) for at in range(len(replicas))]
    number = next(at for at, members in enumerate(ranks) if rank in members)
    shape = torch.Size([IMAGES, 1, 8, 8])
    with torch.no_grad():
        for layers in stages[:number]:
            shape = layers(torch.empty(shape)).shape
    stage = Stage(stages[number], ranks, number, shape)
    optimizer = torch.optim.SGD(stages[number].parameters(), lr=0.05, momentum=0.9)
    data = TASK.data(seed)
    order = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randperm(len(data.train_labels), generator=order)[: MICROBATCHES * IMAGES]
        optimizer.zero_grad()
        losses.append(stage.step(data.train_inputs[chosen], data.train_labels[chosen]))
        optimizer.step()
    return _collect(stages, number, losses, data)


def _collect(
    stages: list[nn.Sequential], number: int, losses: list[list[float]], data: LabelledData
) -> dict[str, object]:
    """Collect all stages' parameters and the last stage's losses on the first process."""
    own = (number, stages[number].state_dict(), losses)
    every = [own]
    if dist.is_initialized():
        every = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
        if dist.get_rank():
            return {}
    for at, parameters, _ in every:
        stages[at].load_state_dict(parameters)
    parts = [found for at, _, found in every if at == len(stages) - 1]
    means = [sum(map(sum, step)) / MICROBATCHES for step in zip(*parts, strict=True)]
    share, loss = evaluate(nn.Sequential(*stages), data)
    return {"losses": means, "accuracy": share, "test_loss": loss}


def main() -> None:
    """Train, and print losses and accuracy as JSON."""
    names = [name for name, _ in TASK.network(0).named_children()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=_replicas, default=[1], help="processes of each stage, such as 3-1")
    parser.add_argument(
        "--cut", nargs="*", choices=names[1:], metavar="LAYER", help="first layer of each stage but the first"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="gloo")
    arguments = parser.parse_args()
    replicas: list[int] = arguments.replicas
    starts = arguments.cut if arguments.cut is not None else ["conv4"][: len(replicas) - 1]
    if len(starts) != len(replicas) - 1:
        parser.error(f"--cut names {len(starts)} layers; {len(replicas)} stages need {len(replicas) - 1}")
    if sum(replicas) != int(os.environ.get("WORLD_SIZE", "1")):
        parser.error(f"these stages need {sum(replicas)} processes: torchrun --nproc-per-node {sum(replicas)} ...")
    if sum(replicas) > 1:
        dist.init_process_group(arguments.backend)
    found = train(replicas, starts, arguments.steps, arguments.seed)
    if found:
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _replicas(text: str) -> list[int]:
    counts = [int(word) if word.isdecimal() else 0 for word in text.split("-")]
    if any(count < 1 or MICROBATCHES % count for count in counts):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write the processes of each stage as 3-1; each number has to divide {MICROBATCHES} microbatches"
        )
    return counts


if __name__ == "__main__":
    main()
