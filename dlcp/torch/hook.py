# SPDX-License-Identifier: Apache-2.0
"""The DDP communication hook: buckets of gradients go out while backward still runs."""

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, but its types do not say so
from torch.nn.parallel import DistributedDataParallel

from dlcp.collectives import Bucket, DirectAllReduce, ErrorFeedback, ReduceOptions
from dlcp.dtypes import ValueType
from dlcp.ledger import Ledger
from dlcp.tags import Layer, Segment, Tagger, layers_in_order
from dlcp.torch.options import Options
from dlcp.torch.rendezvous import meet
from dlcp.transport import Endpoint

_VALUE_TYPES = {
    torch.float32: ValueType.FLOAT32,
    torch.float64: ValueType.FLOAT64,
    torch.float16: ValueType.FLOAT16,
    torch.bfloat16: ValueType.BFLOAT16,
}

STEPS_KEPT = 10_000
"""Steps of which the times are kept."""


class State:
    """What the hook keeps between steps. It can be pickled with a checkpoint: what is owed and the step travel along.

    Attributes
    ----------
    options
        The options in force.
    ledger
        What was sent, delivered and lost.
    step
        Number of the step that is being communicated.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ledger = Ledger(options.job)
        self.step = 0
        self.feedback = ErrorFeedback()
        self.tagger = Tagger(options.tag_policy)
        self._sequence = 0
        self._endpoint: Endpoint | None = None
        self._reducer: DirectAllReduce | None = None
        self._layers: dict[int, Layer] = {}
        self._layer_seconds: dict[int, deque[float]] = {}
        self._step_began_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("options", "step", "feedback", "tagger")}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__init__(kept["options"])  # type: ignore[misc]  # sockets and threads start afresh
        self.step, self.feedback, self.tagger = kept["step"], kept["feedback"], kept["tagger"]

    def attach(self, model: DistributedDataParallel) -> None:
        """Join the other ranks and learn the layers of ``model``; all ranks must call it.

        Raises
        ------
        OSError, PeerSilentError
            See :func:`dlcp.torch.rendezvous.meet`.
        """
        options = self.options
        named = list(model.module.named_parameters())
        layers = layers_in_order([name for name, _ in named])
        self._layers = {id(parameter): layers[name] for name, parameter in named}
        ranks = range(dist.get_world_size(model.process_group))
        if len(ranks) == 1:
            return
        self._endpoint = meet(options, model.process_group)
        self._reducer = DirectAllReduce(
            self._endpoint,
            ranks,
            weights={len(ranks): 1.0} if options.collective == "server" else None,
            options=ReduceOptions(
                options.bound(),
                options.error_feedback,
                options.rescale,
                options.adaptive_shards,
            ),
            tagger=self.tagger,
            ledger=self.ledger,
            feedback=self.feedback,
        )

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint; None before :meth:`attach` and in a group of one."""
        return self._endpoint

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        if self._endpoint:
            self._endpoint.close(reason)
        self._endpoint = self._reducer = None
        self._layers = {}

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks."""
        tensor = bucket.buffer()
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if self._reducer is None:
            if not self._layers:
                raise RuntimeError("the state has been closed, or loaded and not attached: call state.attach(model)")
            answer.set_result(tensor)
            return answer
        if self._sequence == 0:
            self._reducer.begin_step(self.step)
            self._step_began_s = time.monotonic()
        flat, value_type = as_array(tensor)
        segments = segments_of(bucket, self._layers)
        started = self._reducer.start(self.step, self._sequence, Bucket(flat, value_type, segments))
        started.add_done_callback(partial(self._note_time, segments, self._step_began_s))
        started.add_done_callback(partial(_resolve, answer, tensor))
        self._sequence += 1
        if bucket.is_last():
            self.step += 1
            self._sequence = 0
        return answer

    def layer_seconds(self) -> dict[str, list[float]]:
        """Return when each layer's gradients were averaged, by layer position.

        Times are in seconds since the step's first bucket was ready, one for each of the latest steps.
        """
        return {str(position): list(seconds) for position, seconds in sorted(self._layer_seconds.items())}

    def _note_time(self, segments: Sequence[Segment], began_s: float, done: "Future[Any]") -> None:
        seconds = time.monotonic() - began_s
        for position in {segment.layer.position for segment in segments}:
            self._layer_seconds.setdefault(position, deque(maxlen=STEPS_KEPT)).append(seconds)


def hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with DLCP; registered by :func:`enable`."""
    return state.average(bucket)


def noop_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank its own gradients; shows how fast steps would be if communication took no time."""
    answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    answer.set_result(bucket.buffer())
    return answer


def enable(model: DistributedDataParallel, options: Options | None = None, *, state: State | None = None) -> State:
    """Let DLCP average the gradients of a DDP model; all ranks must call it, before the first backward.

    Parameters
    ----------
    model
        A model on the CPU.
    options
        By default :meth:`Options.from_environment`.
    state
        A state from a checkpoint, to go on from; ``options`` replace its own when given.

    Returns
    -------
    The state; call its ``close`` when training is over.

    Raises
    ------
    ValueError
        A parameter is of a type or on a device that cannot be exchanged; the message names it.
    """
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and (parameter.dtype not in _VALUE_TYPES or parameter.device.type != "cpu"):
            raise ValueError(
                f"parameter {name} is {parameter.dtype} on {parameter.device}; this version of DLCP exchanges "
                f"{', '.join(kind.value for kind in ValueType)} on the CPU"
            )
    if state is None:
        state = State(options or Options.from_environment())
    elif options is not None:
        state.options = options
        state.tagger.policy = options.tag_policy
        state.ledger.job = options.job
    state.attach(model)
    model.register_comm_hook(state, hook)
    return state


def as_array(tensor: torch.Tensor) -> tuple[NDArray[np.generic], ValueType]:
    """Return a flat tensor's memory as an array, and its format."""
    value_type = _VALUE_TYPES[tensor.dtype]
    plain = tensor.detach()
    if value_type is ValueType.BFLOAT16:
        return plain.view(torch.int16).numpy().view(np.uint16), value_type
    return plain.numpy(), value_type


def segments_of(bucket: GradBucket, layers: dict[int, Layer]) -> Sequence[Segment]:
    """Return where each parameter lies in a bucket. DDP regroups its buckets, so this is asked anew every time."""
    base, size = bucket.buffer().data_ptr(), bucket.buffer().element_size()
    found = [
        Segment(layers[id(parameter)], start := (gradient.data_ptr() - base) // size, start + gradient.numel())
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
    return sorted(found, key=lambda segment: segment.start)


def parameter_digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all parameters' bits, in order of definition."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def replicas_identical(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether all ranks hold the same parameters, bit by bit; all ranks must call it."""
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, parameter_digest(model), group=group)
    return len(set(digests)) == 1


def _resolve(
    answer: "torch.futures.Future[torch.Tensor]", tensor: torch.Tensor, done: "Future[NDArray[np.generic]]"
) -> None:
    error = done.exception()
    if error is None:
        answer.set_result(tensor)
    else:
        answer.set_exception(error)  # type: ignore[arg-type]  # torch annotates the result's type
