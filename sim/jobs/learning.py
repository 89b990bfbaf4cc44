# SPDX-License-Identifier: Apache-2.0
"""Training inside the simulation: a real model loses exactly the packets that the simulated network loses.

A job with ``learn`` trains a small model (:mod:`dlcp.examples.learning_tasks`) while its messages cross the network. In
each step, every worker has a gradient of its own batch. Replicas are identical, so one model stands for all of them.
`SimulatedLearning.finish_step` averages the gradients as real ranks do, from the records of the step:

- **Where values lie.** The gradient is one vector, the last parameter first, as DistributedDataParallel fills its
  buckets. The messages of a step divide it in the order in which the job's pieces and their shards follow one another.
  If the simulated model is the trained one (`TRAINED_MODEL`), a packet carries the values that a real packet would
  carry. With a ``scale``, or another model, packets carry the same part of the vector, proportionally.
- **Loss.** The engine knows which packets of a contribution were missing when it was complete, and their drop classes.
  It draws the classes without values; real ranks draw them by magnitude, in the same proportions. So within a message,
  the packet with the n-th largest magnitude takes the place of the n-th packet by drop class. Packets that hold values
  of a small parameter come first, as with real ranks.
- **Precision.** Encoded messages are rounded by `dlcp.values.planes`. A lost packet of the lower plane costs lower
  digits.
- **Error feedback.** Values missing from a contribution are added to the worker's next one. Without
  ``error_feedback`` they are lost, and sums are divided by the number of contributions that arrived.

Training has no influence on the simulated times. PyTorch is imported when a job begins to learn.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dlcp.inputs.error_text import nearest
from dlcp.sim.graphs.collectives import RESULT_MESSAGE
from dlcp.sim.jobs.models import TASK_LAYERS
from dlcp.sim.limits import VALUES_MAX, Count, Gain, Moment, SimulatorError
from dlcp.values.planes import PlaneLayout
from dlcp.values.tags import TagPolicy
from dlcp.wire.payloads import PLANE_BLOCK_VALUES

if TYPE_CHECKING:
    import torch

TRAINED_MODEL: Final = "trained"
"""The value of `TrainingJob.model` for the network that the job trains."""
_CODE_PAYLOAD: Final = 1440
"""Rounding does not depend on the payload of the packets that hold the code."""


class LearningError(SimulatorError):
    """A job cannot learn."""


def check_installed() -> None:
    """Check that jobs can learn.

    Raises
    ------
    LearningError
        PyTorch or scikit-learn is not installed.
    """
    for module, name in (("torch", "PyTorch"), ("sklearn", "scikit-learn")):
        if importlib.util.find_spec(module) is None:
            raise LearningError(f"jobs with `learn` need {name}, which is not installed: pip install 'dlcp[sim,demo]'")


class LearningSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The training of a job that learns.

    Parameters
    ----------
    task
        A name in `dlcp.sim.jobs.models.TASK_LAYERS`; :mod:`dlcp.examples.learning_tasks` has their data and networks.
    target
        The test accuracy whose time is measured.
    batch
        Training samples of each worker in a step.
    rate
        Learning rate; by default, the task's for the job's optimizer.
    warm_up
        Steps until the learning rate is reached; from then on it falls as a cosine, over all steps.
    scale
        Values that the simulated model ``trained`` has for each value of the network, so that messages are as long as a
        larger network's.
    compute_s
        Computing time of a step, for the model ``trained``.
    test_every
        Steps from one test of the accuracy to the next.
    """

    task: str
    target: Annotated[float, Meta(gt=0, lt=1)]
    batch: Count = 8
    rate: Gain | None = None
    warm_up: Count = 10
    scale: Annotated[int, Meta(ge=1, le=VALUES_MAX)] = 1
    compute_s: Moment = 0.01
    test_every: Count = 1

    def __post_init__(self) -> None:
        """Reject unknown tasks."""
        if self.task not in TASK_LAYERS:
            raise ValueError(f"there is no task {self.task!r}{nearest(self.task, TASK_LAYERS)}")


class TestedAccuracy(msgspec.Struct, frozen=True):
    """A test of the model: the number of steps before it, its time since the job's start, and its result."""

    __test__ = False

    step: int
    seconds: float
    accuracy: float
    loss: float


# The model ------------------------------------------------------------------------------------------------------------


class TaskTrainer:
    """The model of a task, its data and its optimizer, on one thread: the same arguments give the same training.

    Parameters
    ----------
    steps
        Steps of the training, which the learning rate depends on.

    Attributes
    ----------
    sizes
        Numbers of values of the parameters, the last one first, as in a gradient.

    Raises
    ------
    LearningError
        PyTorch or scikit-learn is not installed.
    """

    def __init__(self, spec: LearningSpec, optimizer: str, workers: int, steps: int, seed: int) -> None:
        check_installed()
        import torch

        from dlcp.examples import learning_tasks  # needs PyTorch

        torch.set_num_threads(1)  # the order of additions must not depend on the number of cores
        self._tasks, task = learning_tasks, learning_tasks.TASKS[spec.task]
        self._data, self._network = task.data(seed), task.network(seed)
        named = list(self._network.named_parameters())[::-1]
        self._names, self._parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self.sizes = [parameter.numel() for parameter in self._parameters]
        self._optimizer = learning_tasks.OPTIMIZER_MAKERS[optimizer](
            self._parameters, spec.rate or task.rates[optimizer]
        )
        self._schedule = learning_tasks.schedule_of(self._optimizer, steps, spec.warm_up)
        samples = len(self._data.train_labels)
        self._batches = learning_tasks.batches_of(steps, spec.batch, samples, seed, workers)

    def gradients(self) -> NDArray[np.float32]:
        """Return the gradients of the next step, float32 (workers, values)."""
        import torch

        batches = next(self._batches)
        inputs, labels = self._data.train_inputs[batches], self._data.train_labels[batches]
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in self._network.modules()):
            # Batch normalisation has statistics of its own, which cannot be vectorised over workers.
            rows = [self._gradient(*worker) for worker in zip(inputs, labels, strict=True)]
        else:
            rows = self._vectorised(inputs, labels)
        values: NDArray[np.float32] = torch.cat([row.reshape(len(batches), -1) for row in rows], 1).numpy()
        return values

    def _gradient(self, inputs: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        import torch

        found = torch.autograd.grad(self._tasks.loss_of(self._network(inputs), labels), self._parameters)
        return torch.cat([each.reshape(-1) for each in found])

    def _vectorised(self, inputs: "torch.Tensor", labels: "torch.Tensor") -> "list[torch.Tensor]":
        """Return the gradients by parameter, each of shape (workers, ...)."""
        import torch
        from torch.func import functional_call, grad, vmap

        def loss(parameters: dict[str, torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self._tasks.loss_of(functional_call(self._network, parameters, (inputs,)), labels)
            return found

        parameters = dict(zip(self._names, (each.detach() for each in self._parameters), strict=True))
        # The faster kernels of attention are not vectorised.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found = vmap(grad(loss), (None, 0, 0))(parameters, inputs, labels)
        return [found[name] for name in self._names]

    def step(self, average: NDArray[np.float32]) -> None:
        """Update the model."""
        self._tasks.assign(self._parameters, average)
        self._optimizer.step()
        self._schedule.step()

    def test(self) -> tuple[float, float]:
        """Return the accuracy and the loss on the test samples."""
        return self._tasks.evaluate(self._network, self._data)


# The messages of a step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardMessages:
    """A shard of the gradient, and the messages that carry it in a step.

    Parameters
    ----------
    first_byte, size_bytes
        Its place in the simulated gradient.
    owner
        The rank that owns it, or -1 for a server.
    contributions, ranks
        Their nodes, and the rank of each one's sender.
    results
        Nodes of its averages.
    """

    first_byte: int
    size_bytes: int
    owner: int
    contributions: NDArray[np.int64]
    ranks: NDArray[np.int64]
    results: NDArray[np.int64]


def shards_of(nodes: NDArray[Any], step: int, workers: Sequence[int]) -> list[ShardMessages]:
    """Return the shards of a step of a graph in which ranks send contributions to owners, and owners send averages.

    Parameters
    ----------
    nodes
        `dlcp.sim.graphs.graph.NODE_ROW` (n,). Messages of a shard are adjacent, and shards lie one after another in the
        gradient.
    workers
        Hosts of the ranks.
    """
    messages = np.flatnonzero((nodes["size_bytes"] > 0) & (nodes["step"] == step))
    rank_of = {host: rank for rank, host in enumerate(workers)}
    number = nodes["message"][messages] & ~RESULT_MESSAGE
    found, first_byte = [], 0
    for own in np.split(messages, np.flatnonzero(np.diff(number)) + 1):
        results = (nodes["message"][own] & RESULT_MESSAGE) != 0
        contributions, size = own[~results], int(nodes["size_bytes"][own[0]])
        ranks = np.array([rank_of[host] for host in nodes["source"][contributions].tolist()])
        owner = rank_of.get(int(nodes["target"][contributions[0]]), -1)
        found.append(ShardMessages(first_byte, size, owner, contributions, ranks, own[results]))
        first_byte += size
    return found


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The fate of a step's messages.

    Parameters
    ----------
    sizes
        `dlcp.sim.engines.packet_engine.MESSAGE_SIZE` of each node.
    bits
        Bits per value of encoded messages.
    lacking
        `dlcp.sim.engines.packet_engine.PACKET_OUTCOME` by node, of messages that lack packets.
    """

    sizes: NDArray[Any]
    bits: int
    lacking: Mapping[int, NDArray[Any]]

    def planes(self, node: int) -> int:
        """Return the planes of a message; 0 if it is not encoded."""
        upper = int(self.sizes["upper"][node])
        return int(self.sizes["packets"][node]) // upper if upper else 0


@dataclass(frozen=True, slots=True)
class _PacketValues:
    """The values in the packets of a message, or of each of its planes.

    Parameters
    ----------
    starts
        Each packet's first value within the shard, and the number of values, int64 (packets + 1,).
    small
        Packets that hold values of a small parameter.
    """

    starts: NDArray[np.int64]
    small: NDArray[np.bool_]

    def magnitudes(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the root mean square of each packet's values, as `dlcp.values.tags.packet_magnitudes`.

        Parameters
        ----------
        values
            A message in each row.
        """
        sums = np.zeros((len(values), values.shape[1] + 1))
        np.cumsum(np.square(values, dtype=np.float64), axis=1, out=sums[:, 1:])
        squares = np.diff(sums[:, self.starts]) / np.maximum(np.diff(self.starts), 1)
        found: NDArray[np.float64] = np.sqrt(np.maximum(squares, 0))
        return found

    def of(self, packets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask of the values in some packets, bool (messages, values)."""
        return np.repeat(packets, np.diff(self.starts), axis=1)

    def lost(self, values: NDArray[np.floating], outcomes: NDArray[Any]) -> NDArray[np.bool_]:
        """Return the mask of lost packets: those that take the places of the simulated ones that were lost.

        Parameters
        ----------
        values
            A message in each row.
        outcomes
            Of the simulated packets, `dlcp.sim.engines.packet_engine.PACKET_OUTCOME` (messages, packets).
        """
        magnitudes = self.magnitudes(values)
        by_value = np.lexsort((-magnitudes, np.broadcast_to(~self.small, magnitudes.shape)))
        by_class = np.argsort(outcomes["drop_class"], axis=1, kind="stable")
        found: NDArray[np.bool_] = np.zeros(magnitudes.shape, np.bool_)
        np.put_along_axis(found, by_value, ~np.take_along_axis(outcomes["delivered"], by_class, 1), axis=1)
        return found


# Averaging ------------------------------------------------------------------------------------------------------------


class GradientExchange:
    """Averages the gradients of all workers, without missing values.

    Parameters
    ----------
    sizes
        Values of each parameter, in the order of the gradient.
    workers
        Number of workers.
    value_bytes
        Bytes of a simulated value in full precision.
    payload_bytes
        Payload of a packet.
    error_feedback
        Whether missing values are added to the next step.

    Attributes
    ----------
    residual
        The values that each worker has yet to send, float32 (workers, values).
    rounded_off
        Rounding errors of the servers' averages, float32 (values,).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        workers: int,
        *,
        value_bytes: int,
        payload_bytes: int,
        error_feedback: bool = True,
    ) -> None:
        count = sum(sizes)
        self._value_bytes, self._payload_bytes, self._feedback = value_bytes, payload_bytes, error_feedback
        self._total_bytes = 0
        self.residual = np.zeros((workers, count), np.float32)
        self.rounded_off = np.zeros(count, np.float32)
        small = np.repeat([size < TagPolicy().small_layer_values for size in sizes], sizes)
        self._small_before = np.concatenate([[0], np.cumsum(small)])
        self._packet_values: dict[tuple[int, int, int], _PacketValues] = {}

    def average(
        self, gradients: NDArray[np.float32], shards: Sequence[ShardMessages], outcome: StepOutcome
    ) -> NDArray[np.float32]:
        """Return the average of a step's gradients, float32 (values,).

        Parameters
        ----------
        gradients
            Float32 (workers, values); changed in place.
        """
        self._total_bytes = sum(shard.size_bytes for shard in shards)
        gradients += self.residual
        self.residual[:] = 0
        averaged = np.empty(gradients.shape[1], np.float32)
        for shard in shards:
            own = slice(self._value_at(shard.first_byte), self._value_at(shard.first_byte + shard.size_bytes))
            averaged[own] = self._average_shard(gradients[:, own], own, shard, outcome)
        return averaged

    def _average_shard(
        self, received: NDArray[np.float32], own: slice, shard: ShardMessages, outcome: StepOutcome
    ) -> NDArray[np.float32]:
        """Return a shard's average, given each worker's values, which become what the owner receives."""
        planes = outcome.planes(int(shard.contributions[0]))
        packets = self._packets_of(shard, planes, outcome.bits)
        missing, lower_lost = np.zeros((2, *received.shape), np.bool_)
        lacking = [place for place, node in enumerate(shard.contributions.tolist()) if node in outcome.lacking]
        if lacking:
            outcomes = np.stack([outcome.lacking[node] for node in shard.contributions[lacking].tolist()])
            upper, ranks = outcomes.shape[1] // planes if planes else 0, shard.ranks[lacking]
            lost = lower_lost if planes else missing
            lost[ranks] = packets.of(packets.lost(received[ranks], outcomes[:, upper:]))
        if self._feedback:
            self.residual[:, own] += np.where(missing, received, np.float32(0))
        received[missing] = 0
        if planes:
            self._round_contributions(received, own, shard.ranks, outcome.bits, lower_lost)
        total = received.sum(0, dtype=np.float32)
        mean: NDArray[np.float32] = total / np.float32(len(received))
        if not self._feedback:
            mean = total / np.maximum(len(received) - missing.sum(0), 1).astype(np.float32)
        return self._send_average(mean, own, shard, outcome)

    def _round_contributions(
        self,
        received: NDArray[np.float32],
        own: slice,
        ranks: NDArray[np.int64],
        bits: int,
        lower_lost: NDArray[np.bool_],
    ) -> None:
        """Replace contributions by their decoded values; ``lower_lost`` is the mask of values without lower digits."""
        exact = received[ranks]
        whole, upper = decoded(exact, bits)
        received[ranks] = np.where(lower_lost[ranks], upper, whole)
        if self._feedback:
            self.residual[ranks, own] += exact - received[ranks]

    def _send_average(
        self, mean: NDArray[np.float32], own: slice, shard: ShardMessages, outcome: StepOutcome
    ) -> NDArray[np.float32]:
        """Return an average as all workers receive it."""
        mean = mean + self.rounded_off[own]
        sent = decoded(mean[np.newaxis], outcome.bits)[0][0] if outcome.planes(int(shard.results[0])) else mean
        rest = mean - sent
        if self._feedback and shard.owner < 0:
            self.rounded_off[own] = rest
        elif self._feedback:
            # The owner's next contribution is divided by the number of workers.
            self.residual[shard.owner, own] += rest * np.float32(len(self.residual))
        return sent

    def _value_at(self, byte: int) -> int:
        """Return the first value at or after a byte of the simulated gradient."""
        return -(-byte * self.residual.shape[1] // self._total_bytes)

    def _packets_of(self, shard: ShardMessages, planes: int, bits: int) -> _PacketValues:
        """Return the values in the packets of a shard's messages."""
        key = (shard.first_byte, planes, bits)
        if key not in self._packet_values:
            size, step_bytes = shard.size_bytes, self._payload_bytes
            if planes:
                layout = PlaneLayout(size // self._value_bytes, bits, self._payload_bytes)
                step_bytes = layout.per_packet * self._value_bytes
            count = layout.packets if planes else -(-size // step_bytes)
            ends = [shard.first_byte + min(packet * step_bytes, size) for packet in range(count)]
            starts = np.array([self._value_at(end) for end in (*ends, shard.first_byte + size)])
            small = np.diff(self._small_before[starts]) > 0
            self._packet_values[key] = _PacketValues(starts - starts[0], small)
        return self._packet_values[key]


def decoded(values: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the decoded values of messages with all digits, and of their upper planes alone.

    Parameters
    ----------
    values
        A message in each row, float32 (messages, values).
    """
    messages, count = values.shape
    padded = np.pad(values, ((0, 0), (0, -count % PLANE_BLOCK_VALUES))).ravel()
    layout = PlaneLayout(len(padded), bits, _CODE_PAYLOAD)
    code, whole, upper = np.empty(layout.bytes, np.uint8), np.empty_like(padded), np.empty_like(padded)
    layout.encode(padded, code)
    layout.decode(code, whole)
    layout.decode(code, upper, np.arange(layout.planes * layout.packets) < layout.packets)
    return whole.reshape(messages, -1)[:, :count], upper.reshape(messages, -1)[:, :count]


# A job ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SimulatedLearning:
    """The training of one job.

    Parameters
    ----------
    workers
        Hosts of the workers.
    exchange
        None if nothing can be missing.

    Attributes
    ----------
    curve
        The tests of the model so far, the first one before any step.
    """

    spec: LearningSpec
    trainer: TaskTrainer
    workers: Sequence[int]
    exchange: GradientExchange | None
    curve: list[TestedAccuracy] = field(default_factory=list)
    _steps: int = 0

    def __post_init__(self) -> None:
        """Test the untrained model."""
        self._test(0.0)

    def finish_step(
        self, nodes: NDArray[Any], outcome: StepOutcome | None, step: int, seconds: float, *, last: bool
    ) -> None:
        """Train a step, and test the model if its turn has come or the step is the last one.

        Parameters
        ----------
        nodes, outcome
            The graph that has the step, and what became of its messages; without an exchange, neither is used.
        seconds
            When the step ended, counted from the job's start.
        """
        gradients = self.trainer.gradients()
        if self.exchange is None or outcome is None:
            average = gradients.sum(0, dtype=np.float32) / np.float32(len(gradients))
        else:
            shards = shards_of(nodes, step, self.workers)
            average = self.exchange.average(gradients, shards, outcome)
        self.trainer.step(average)
        self._steps += 1
        if last or self._steps % self.spec.test_every == 0:
            self._test(seconds)

    def _test(self, seconds: float) -> None:
        accuracy, loss = self.trainer.test()
        self.curve.append(TestedAccuracy(self._steps, seconds, accuracy, loss))
