# SPDX-License-Identifier: Apache-2.0
"""Training by four ranks in one process, with gradients that come late or never: no network, but the real rules.

What a switch drops first, how values are encoded, how an owner averages what it got, and what becomes residual are the
direct all-reduce's own functions (:mod:`dlcp.collectives.direct`). Only the network's part is played: it always drops
as much as it may, which a real one does while a port is congested.
"""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dlcp.collectives.reduction_rules import average
from dlcp.collectives.residual import Residual
from dlcp.collectives.shards import shard_bounds
from dlcp.examples.learning_tasks import (
    OPTIMIZER_MAKERS,
    TASKS,
    LabelledData,
    LearningTask,
    assign,
    batches_of,
    evaluate,
    loss_of,
    schedule_of,
    text_digest,
)
from dlcp.transport import LossBound
from dlcp.values.dtypes import ValueType
from dlcp.values.planes import CODED_BITS, FULL_BITS, PlaneLayout
from dlcp.values.tags import PacketTags, Segment, Tagger, layers_in_order, packet_magnitudes
from dlcp.wire.payloads import PLANE_BLOCK_VALUES

EMULATED_RANKS: Final = 4
_PER_PACKET: Final = 360
"""Float32 values of a packet that fits an MTU of 1500."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The gradients that do not arrive in their step. Parameters
    ----------
    lost
        The share of each contribution's packets that the network loses; with fewer bits, of the packets of its lower
        plane, at random.
    at_random
        Packets are chosen at random, not by value.
    feedback
        What is missing is residual, and comes with the next step. Else it is gone, and owners divide by how many ranks'
        packets came, not by how many there are.
    bits
        Bits of each value of contributions and averages, from the second step on.
    bf16_hook
        Gradients are averaged as by PyTorch's ``bf16_compress_hook`` instead: in bfloat16, without error feedback.
    """

    lost: float = 0.0
    at_random: bool = False
    feedback: bool = True
    bits: int = FULL_BITS
    bf16_hook: bool = False

    @property
    def share(self) -> float:
        """The share that does not come: of each value's bits, or of packets."""
        return 1 - self.bits / FULL_BITS or self.lost

    @property
    def name(self) -> str:
        """The name in results, such as ``bits8.lost0.2`` or ``lost0.1.random.gone``; ``whole`` without shortfall."""
        if self.bf16_hook:
            return "bf16.hook"
        if not self.share:
            return "whole"
        suffixes = {".random": self.at_random, ".gone": not self.feedback}
        amounts = {"bits": self.bits if self.bits < FULL_BITS else 0, "lost": self.lost}
        kinds = ".".join(f"{kind}{amount:g}" for kind, amount in amounts.items() if amount)
        return kinds + "".join(suffix for suffix, holds in suffixes.items() if holds)


# Averaging ------------------------------------------------------------------------------------------------------------


class EmulatedRanks:
    """Averages the gradients of four ranks, step by step.

    Parameters
    ----------
    segments
        The layers of the one bucket.
    shortfall
        The gradients that do not arrive in their step. seed
        Of what is chosen at random.

    Attributes
    ----------
    residuals
        What each rank has still to send.
    """

    def __init__(self, segments: Sequence[Segment], shortfall: Shortfall, seed: int) -> None:
        ranks = range(EMULATED_RANKS)
        self.shortfall = shortfall
        self.residuals = [Residual() for _ in ranks]
        self._segments, self._size = segments, segments[-1].stop
        self._bounds = shard_bounds(self._size, _PER_PACKET, dict.fromkeys(ranks, 1.0))
        self._taggers = [Tagger() for _ in ranks]
        self._random = np.random.default_rng(seed)
        self._step = 0

    def average(self, gradients: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the average of a step's gradients, the same on all ranks.

        Parameters
        ----------
        gradients
            One of each rank, of the size of the bucket; changed in place.
        """
        for values, residual in zip(gradients, self.residuals, strict=True):
            residual.apply(values, self._segments)
        loses_values = self.shortfall.lost and self.shortfall.bits == FULL_BITS
        tags = [self._tag(rank, values) for rank, values in enumerate(gradients)] if loses_values else None
        averaged = np.empty(self._size, np.float32)
        for owner, (start, stop) in self._bounds.items():
            averaged[start:stop] = self._average_shard(owner, [values[start:stop] for values in gradients], tags)
        self._step += 1
        return averaged

    def _average_shard(
        self, owner: int, shard: list[NDArray[np.float32]], tags: list[PacketTags] | None
    ) -> NDArray[np.floating]:
        """Return the average of a shard, given each rank's contribution, which becomes what the owner receives."""
        delivered = {}
        for rank, values in enumerate(shard):
            missing = np.zeros(-(-len(values) // _PER_PACKET), np.bool_)
            if rank != owner and tags is not None:
                missing = self._lost(tags[rank], owner)
            self._take_out(missing, values, rank, owner)
            if rank != owner:
                self._round(values, rank, owner, lower_lost=self.shortfall.lost)
            delivered[rank] = ~missing
        if self.shortfall.bf16_hook:
            return _bf16_average(shard)
        contributions, rescale = dict(enumerate(shard)), not self.shortfall.feedback
        mean = average(contributions, delivered, ValueType.FLOAT32, _PER_PACKET, rescale=rescale)
        self._round(mean, owner, owner, EMULATED_RANKS)
        return mean

    def _tag(self, rank: int, values: NDArray[np.float32]) -> PacketTags:
        return self._taggers[rank].tag(values, ValueType.FLOAT32, self._segments, _PER_PACKET)

    def _lost(self, tags: PacketTags, owner: int) -> NDArray[np.bool_]:
        """Return which packets of a contribution are lost: those of the highest drop classes, or any."""
        classes = tags.drop_class[self._packets(owner)]
        if self.shortfall.at_random:
            classes = np.ones_like(classes)
        count = min(LossBound(self.shortfall.lost).allowed(len(classes)), np.count_nonzero(classes))
        lost = np.zeros(len(classes), np.bool_)
        lost[np.lexsort((self._random.random(len(classes)), -classes.astype(int)))[:count]] = True
        return lost

    def _take_out(self, packets: NDArray[np.bool_], values: NDArray[np.floating], rank: int, owner: int) -> None:
        """Replace packets of a shard by zeros, and add them to a rank's residual."""
        if not packets.any():
            return
        positions = np.flatnonzero(np.repeat(packets, _PER_PACKET)[: len(values)])
        if self.shortfall.feedback:
            self.residuals[rank].add_at(positions + self._bounds[owner][0], values[positions], self._segments)
        values[positions] = 0

    def _round(
        self, values: NDArray[np.floating], rank: int, owner: int, factor: int = 1, lower_lost: float = 0.0
    ) -> None:
        """Replace a shard's values by those that receivers decode; a rank owes the rest, multiplied."""
        bits = self.shortfall.bits
        if bits == FULL_BITS or not self._step:
            return
        exact = values.copy()
        if bits in CODED_BITS:
            layout = PlaneLayout(len(values), bits, values.itemsize * _PER_PACKET)
            code, delivered = np.empty(layout.bytes, np.uint8), np.ones(layout.planes * layout.packets, np.bool_)
            delivered[layout.packets :] = self._random.random(len(delivered) - layout.packets) >= lower_lost
            layout.encode(values, code)
            layout.decode(code, values, delivered)
        else:
            values[:] = rounded(values, bits)
        if self.shortfall.feedback:
            rest = (exact - values) * np.float32(factor)
            self.residuals[rank].add_range(self._bounds[owner][0], rest, self._segments)

    def _packets(self, owner: int) -> slice:
        start, stop = self._bounds[owner]
        return slice(start // _PER_PACKET, -(-stop // _PER_PACKET))


def rounded(values: NDArray[np.floating], bits: int) -> NDArray[np.floating]:
    """Return values rounded to integers of ``bits`` bits in units of a power of two, which blocks share.

    Blocks are as in :mod:`dlcp.values.planes`, which does not encode 3 bits.
    """
    blocks = np.pad(values, (0, -len(values) % PLANE_BLOCK_VALUES)).reshape(-1, PLANE_BLOCK_VALUES)
    limit = 2 ** (bits - 1) - 0.5  # in units: a larger value would round to an integer that does not fit
    _, exponents = np.frexp(np.abs(blocks).max(axis=1, keepdims=True) / limit)
    found: NDArray[np.floating] = np.ldexp(np.rint(np.ldexp(blocks, -exponents)), exponents).ravel()[: len(values)]
    return found


def _bf16_average(gradients: Sequence[NDArray[np.float32]]) -> NDArray[np.floating]:
    """Return the average by PyTorch's ``bf16_compress_hook``: cast, divided, and summed in bfloat16."""
    total, *others = (torch.from_numpy(values).to(torch.bfloat16).div_(len(gradients)) for values in gradients)
    for part in others:
        total += part
    found: NDArray[np.floating] = total.float().numpy()
    return found


# Training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The result of one training: a line in the file of runs.

    Parameters
    ----------
    sources
        :func:`sources_digest` of what was run.
    task, optimizer, shortfall, seed, length
        What was trained, how and for how long; ``shortfall`` by its name.
    accuracy
        The share of test samples that were right after the last step.
    losses
        The test loss, every ``test_every`` steps of the task.
    """

    sources: str
    task: str
    optimizer: str
    shortfall: str
    seed: int
    length: int
    accuracy: float
    losses: list[float]

    @property
    def key(self) -> tuple[str, str, str, str, int, int]:
        """The key that distinguishes it from other runs."""
        return self.sources, self.task, self.optimizer, self.shortfall, self.seed, self.length


def train(task: str, optimizer: str, shortfall: Shortfall, seed: int, length: int = 1) -> TrainingRun:
    """Train a task once, on one thread: the same arguments give the same run.

    Parameters
    ----------
    task, optimizer
        By name.
    seed
        Of the data, the initialisation, the batches, and what is missing at random.
    length
        Multiple of the task's number of steps.
    """
    torch.set_num_threads(1)
    learned = TASKS[task]
    steps = length * learned.steps
    data = learned.data(seed)
    model = learned.network(seed)
    parameters = list(model.parameters())[::-1]  # as DistributedDataParallel fills its buckets
    stepper = OPTIMIZER_MAKERS[optimizer](parameters, learned.rates[optimizer])
    schedule = schedule_of(stepper, steps)
    ranks = EmulatedRanks(segments_of(model), shortfall, seed)
    accuracy, losses = 0.0, list[float]()
    for step, batches in enumerate(batches_of(steps, learned.batch, len(data.train_labels), seed, EMULATED_RANKS), 1):
        gradients = [gradient(model, parameters, data, batch) for batch in batches]
        assign(parameters, ranks.average(gradients))
        stepper.step()
        schedule.step()
        if step % learned.test_every == 0:
            accuracy, loss = evaluate(model, data)
            losses.append(loss)
    return TrainingRun(sources_digest(), task, optimizer, shortfall.name, seed, length, accuracy, losses)


def segments_of(model: nn.Module) -> list[Segment]:
    """Return where a model's parameters lie in the one bucket of its gradients: the last one first."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = layers_in_order(list(sizes))
    stops = np.cumsum(list(sizes.values())[::-1]).tolist()
    starts = [0, *stops]
    return [Segment(layers[name], *ends) for name, *ends in zip(reversed(sizes), starts, stops, strict=False)]


def gradient(
    model: nn.Module, parameters: Sequence[nn.Parameter], data: LabelledData, batch: torch.Tensor
) -> NDArray[np.float32]:
    """Return the gradient of the mean loss of a batch, flat, in the order of ``parameters``."""
    loss = loss_of(model(data.train_inputs[batch]), data.train_labels[batch])
    found = torch.autograd.grad(loss, list(parameters))
    values: NDArray[np.float32] = torch.cat([each.reshape(-1) for each in found]).numpy()
    return values


@cache
def sources_digest() -> str:
    """Return a hash of the sources that decide how a run ends, of the text that ships with Python, and of PyTorch."""
    rules = (
        *(EmulatedRanks, LearningTask, average, Residual, shard_bounds),
        *(Tagger, packet_magnitudes, PlaneLayout),
    )
    found = hashlib.sha256(f"{torch.__version__} {text_digest()}".encode())
    for rule in rules:
        found.update(Path(inspect.getfile(rule)).read_bytes())
    return found.hexdigest()[:16]
