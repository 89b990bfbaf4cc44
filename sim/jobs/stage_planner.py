# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism as in PipeDream: which layers form a stage, how many workers replicate it, and how they run.

The planner is that of Harlap et al., arXiv 1806.03377, section 3.2; networks with levels are planned level by level, as
in Narayanan et al., SOSP 2019, section 3.1. Replicas of a stage take minibatches in rotation, and each worker runs a
forward and a backward pass in turn (1F1B). A stage keeps the weights that a minibatch began with until it ends (weight
stashing), so that no pass has to wait for another minibatch's update.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.jobs.models import VALUE_BYTES, StepProfile

SYNC_FACTOR: Final = 4
"""To average weights of w bytes, each of m replicas sends and receives 4 (m - 1) / m w bytes (arXiv 1806.03377)."""
CUT_FACTOR: Final = 2
"""A cut passes activations one way, and gradients of the same size the other way."""


class NetworkLevel(NamedTuple):
    """A level of the network: the number of components that it joins, and the rate of each.

    Components of the first level are workers; those of the next are whole first levels, such as servers.
    """

    components: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Successive layers, and the number of workers that replicate them.

    Parameters
    ----------
    begin, end
        Its layers are ``layers[begin:end]`` of the profile.
    in_flight
        Minibatches that each replica has begun and not ended, and so the versions of the weights that it keeps.
    """

    begin: int
    end: int
    replicas: int
    in_flight: int = 1


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Stages from the input to the output.

    Parameters
    ----------
    minibatch_s
        The planner's estimate of the time between two minibatches, in seconds.
    """

    profile: StepProfile
    stages: tuple[PipelineStage, ...]
    minibatch_s: float

    @property
    def replicas(self) -> str:
        """Return the number of replicas of each stage, such as ``7-1``."""
        return "-".join(str(stage.replicas) for stage in self.stages)

    @property
    def speedup(self) -> float:
        """Return the estimated throughput relative to that of one worker."""
        return self.profile.compute_s / self.minibatch_s

    @property
    def bytes_per_minibatch(self) -> float:
        """Return the bytes that all workers send for a minibatch: activations, their gradients, and averages."""
        layers = self.profile.layers
        cuts = sum(CUT_FACTOR * layers[stage.end - 1].output_bytes for stage in self.stages[:-1])
        return cuts + sum(
            2 * (stage.replicas - 1) / stage.replicas * VALUE_BYTES * self.parameters(stage) for stage in self.stages
        )

    def parameters(self, stage: PipelineStage) -> int:
        """Return the number of values that each replica of a stage trains."""
        return sum(layer.parameters for layer in self.profile.layers[stage.begin : stage.end])

    def compute_s(self, stage: PipelineStage) -> float:
        """Return the time of a minibatch's both passes through a stage."""
        return sum(layer.forward_s + layer.backward_s for layer in self.profile.layers[stage.begin : stage.end])


class StagesError(ValueError):
    """The model cannot be divided as asked."""


def parse_replicas(text: str) -> tuple[int, ...]:
    """Return the replicas of each stage, given as ``7-1``.

    Raises
    ------
    StagesError
        It is not a list of positive numbers.
    """
    words = text.split("-")
    if not all(re.fullmatch("0*[1-9][0-9]{0,5}", word) for word in words):
        raise StagesError(f"{text!r} does not name the replicas of each stage; write them as 7-1")
    return tuple(map(int, words))


def plan_pipeline(
    profile: StepProfile, levels: Sequence[NetworkLevel], replicas: Sequence[int] | None = None
) -> PipelinePlan:
    """Return the stages with the least time between two minibatches.

    Parameters
    ----------
    levels
        The network, from the innermost level outwards.
    replicas
        Replicas of each stage, if only the cuts are to be found; for a network with one level.

    Raises
    ------
    StagesError
        ``replicas`` has more stages than the model can be cut into.
    """
    planner = _Planner(profile)
    if replicas is None:
        for level in levels:
            planner.add(level)
        stages, minibatch_s = planner.stages()
    else:
        stages, minibatch_s = planner.cut(replicas, levels[0].bytes_per_s)
    behind = itertools.accumulate(count for _, _, count in reversed(stages))
    in_flight = [-(-workers // stage[2]) for workers, stage in zip(behind, reversed(stages), strict=True)][::-1]
    every = tuple(PipelineStage(*stage, ahead) for stage, ahead in zip(stages, in_flight, strict=True))
    return PipelinePlan(profile, every, minibatch_s)


_Times = NDArray[np.float64]
_Span = tuple[int, int, int]
"""A stage: its first layer, its end, and its replicas."""


@dataclass(slots=True)
class _Choices:
    """A level's best divisions: by the number of components, where the last stage begins, and its replicas."""

    begin: list[NDArray[np.int64]]
    replicas: list[NDArray[np.int64]]


@dataclass(slots=True)
class _Planner:
    """Dynamic programming over spans of layers; matrices have a row per first layer, a column per end."""

    profile: StepProfile
    times: _Times = field(init=False)
    weights: _Times = field(init=False)
    outputs: _Times = field(init=False)
    levels: list[_Choices] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Sum up times and weights of every span."""
        layers = self.profile.layers
        times = _sums([layer.forward_s + layer.backward_s for layer in layers])
        self.times = np.where(np.tri(len(times), dtype=bool), np.inf, times)  # a span has at least one layer
        self.weights = _sums([layer.parameters * VALUE_BYTES for layer in layers])
        # The bytes that a cut before each layer sends; infinite where the model cannot be cut.
        sizes = [float(layer.output_bytes) or np.inf for layer in layers]
        self.outputs = np.array([np.inf, *sizes[:-1], np.inf])

    def replicated(self, count: int, bytes_per_s: float) -> _Times:
        """Return the time per minibatch of every span as one stage on ``count`` components: T of the paper."""
        sync = SYNC_FACTOR * (count - 1) / count * self.weights / bytes_per_s
        return np.maximum(self.times, sync) / count

    def add(self, level: NetworkLevel) -> None:
        """Divide every span over a level's components: A of the paper, for all numbers of components up to its own."""
        passing = CUT_FACTOR * self.outputs / level.bytes_per_s
        alone = [self.replicated(count, level.bytes_per_s) for count in range(1, level.components + 1)]
        best: list[_Times] = []
        choices = _Choices([], [])
        for count in range(1, level.components + 1):
            least = alone[count - 1].copy()
            begin, replicas = np.zeros(least.shape, np.int64), np.full(least.shape, count)
            for last in range(1, count):
                before, after = best[count - last - 1], alone[last - 1]
                for cut in np.flatnonzero(np.isfinite(passing)):
                    slowest = np.maximum.outer(np.maximum(before[:, cut], passing[cut]), after[cut])
                    # Ties go to fewer stages and earlier cuts. Times that differ only by rounding errors are ties.
                    better = slowest < least * (1 - 1e-9)
                    least[better], begin[better], replicas[better] = slowest[better], cut, last
            best.append(least)
            choices.begin.append(begin)
            choices.replicas.append(replicas)
        self.times = best[-1]
        self.levels.append(choices)

    def stages(self) -> tuple[list[_Span], float]:
        """Return the stages of the whole model on the whole network, and its time per minibatch."""
        last = len(self.profile.layers)
        return self._divided(len(self.levels), 0, last), float(self.times[0, last])

    def _divided(self, level: int, first: int, end: int) -> list[_Span]:
        """Return the stages of a span on all components of a level, with the replicas among workers."""
        if level == 0:
            return [(first, end, 1)]
        choices = self.levels[level - 1]
        count, found = len(choices.begin), list[_Span]()
        while count:
            begin = max(int(choices.begin[count - 1][first, end]), first)
            last = int(choices.replicas[count - 1][first, end])
            inner = self._divided(level - 1, begin, end)
            found = [(one, other, last * copies) for one, other, copies in inner] + found
            count, end = count - last, begin
        return found

    def cut(self, replicas: Sequence[int], bytes_per_s: float) -> tuple[list[_Span], float]:
        """Return the best stages with the given replicas, and their time per minibatch."""
        passing = CUT_FACTOR * self.outputs / bytes_per_s
        last = len(self.profile.layers)
        least = self.replicated(replicas[0], bytes_per_s)[0]
        begins: list[NDArray[np.int64]] = []
        for count in replicas[1:]:
            slowest = np.maximum(np.maximum(least, passing)[:, None], self.replicated(count, bytes_per_s))
            begins.append(slowest.argmin(axis=0))
            least = slowest.min(axis=0)
        if not np.isfinite(least[last]):
            words = "-".join(map(str, replicas))
            places = int(np.isfinite(self.outputs).sum())
            raise StagesError(
                f"{self.profile.name} cannot be cut into the stages {words}: it has {places} places to cut"
            )
        found, end = list[_Span](), last
        for count, begin in zip(reversed(replicas[1:]), reversed(begins), strict=True):
            found.insert(0, (int(begin[end]), end, count))
            end = found[0][0]
        return [(0, end, replicas[0]), *found], float(least[last])


def _sums(values: Sequence[float]) -> _Times:
    """Return the sum of every span of layers."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    sums: _Times = ends[None, :] - ends[:, None]
    return sums
