# SPDX-License-Identifier: Apache-2.0
"""The DDP communication hook: buckets of gradients go out while backward still runs."""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, but its types do not say so
from torch.nn.parallel import DistributedDataParallel

from dlcp.collectives import ErrorFeedback
from dlcp.collectives.notice import segments_of as segments_of_notice
from dlcp.collectives.samples import check_samples
from dlcp.ledger import Ledger
from dlcp.session.joining import NotJoinedError, join, speaks
from dlcp.session.options import Options
from dlcp.session.recovery import Mode
from dlcp.session.steering import WEIGHS, all_weigh, piloted
from dlcp.tags import Layer, Segment, Tagger, layers_in_order
from dlcp.torch.agreement import agreement_of
from dlcp.torch.fallback import Exchange
from dlcp.torch.staging import VALUE_TYPES, as_array
from dlcp.transport import Endpoint
from dlcp.tuning.autotuner import Pilot

__all__ = [
    "State",
    "as_array",
    "enable",
    "hook",
    "noop_hook",
    "parameter_digest",
    "replicas_identical",
    "segments_of",
]

log = logging.getLogger("dlcp")

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
        self.tagger = Tagger(options.classes())
        self._sequence = 0
        self._pilot: Pilot | None = None
        self._told: torch.futures.Future[torch.Tensor] | None = None
        """What the ranks tell each other at the beginning of this step, until it has been heard."""
        self._device = torch.device("cpu")
        self._hosts = 0
        self._exchange: Exchange | None = None
        self._endpoint: Endpoint | None = None
        self._alone = False
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

        If they cannot all use DLCP, all go on over the framework's own all-reduce, and the lowest rank says why.

        Raises
        ------
        NotJoinedError
            They cannot, and ``options.fallback`` is off.
        """
        named = list(model.module.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in named}
        layers = layers_in_order(list(shapes), shapes)
        self._layers = {id(parameter): layers[name] for name, parameter in named}
        group = model.process_group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._alone = size == 1
        if self._alone:
            return
        self._device = named[0][1].device
        agreement = agreement_of(group, self.options.meet_s)
        self._exchange = Exchange(group, agreement, range(size), self.options.deadline_s, self.feedback)
        if self.options.weighted:
            agreement.tell(WEIGHS, True)
        try:
            joined = join(self.options, agreement, call="dlcp.torch.enable")
        except NotJoinedError as problem:
            if not self.options.fallback:
                self.close()
                raise
            if self.options.weighted and not all_weigh(agreement):
                self.close()
                raise NotJoinedError(
                    f"{problem}. Nor do all ranks say samples=..., so none can weigh by them"
                ) from None
            self._pilot = Pilot.of(self.options, rank, range(size))
            self._exchange.do_without(str(problem))
            if speaks(agreement):
                log.warning("DLCP is off: %s. Training goes on over the framework's own all-reduce.", problem)
            return
        if joined.remark and rank == 0:
            log.warning("DLCP: %s", joined.remark)
        self._endpoint = joined.endpoint
        self._hosts = len(joined.topology.ranks_by_host(range(size)))
        size_bytes = sum(p.numel() * p.element_size() for _, p in named if p.requires_grad)
        self._pilot = Pilot.of(
            joined.options, rank, range(size), gradient_bytes=size_bytes, ledger=self.ledger, joined=joined
        )
        reducer = piloted(
            self._pilot, joined, range(size), tagger=self.tagger, ledger=self.ledger, feedback=self.feedback
        )
        self._exchange.use(joined.endpoint, reducer, may_recover=self.options.fallback)

    @property
    def hosts(self) -> int:
        """On how many hosts the ranks are; 0 where DLCP could not be used."""
        return self._hosts

    @property
    def neighbours(self) -> int:
        """With how many other ranks this one exchanges packets through memory."""
        return len(self._endpoint.local_peers) if self._endpoint else 0

    @property
    def pilot(self) -> Pilot | None:
        """What chooses settings and weighs ranks; None before :meth:`attach` and in a group of one."""
        return self._pilot

    def samples(self, count: int) -> None:
        """Say how many samples this rank's gradients of the coming step will be the mean of.

        Every sample then counts the same, whichever rank has it; a rank may have none. It holds until another number is
        told. All ranks have to say ``Options(samples=...)``, for then they expect it. The sooner before the backward
        pass, the less others wait for it.

        Raises
        ------
        ValueError
            It is no whole number of samples, or the options do not say ``samples``.
        RuntimeError
            The step's backward pass has begun, or it has been told already.
        """
        if self._pilot is None:
            check_samples(count)
            return
        if self._sequence:
            raise RuntimeError(f"samples({count}) comes too late for step {self.step}: call it once, before backward")
        self._pilot.set_samples(count)
        if self._exchange and self._pilot.tells:
            self._tell(self._exchange, self._pilot)

    def _tell(self, exchange: Exchange, pilot: Pilot) -> None:
        """Begin the step with a notice to all ranks."""
        table = torch.from_numpy(pilot.table(self.step)).to(self._device)
        self._told = exchange.average(table, self.step, 0, segments_of_notice(table.numel()), _nothing)
        self._sequence = 1

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint; None before :meth:`attach`, in a group of one, and where DLCP could not be used."""
        return self._endpoint

    @property
    def active(self) -> bool:
        """Whether DLCP averages gradients; False when the framework does, see :attr:`reason`."""
        return self._exchange is not None and self._exchange.mode is Mode.DLCP

    @property
    def reason(self) -> str:
        """Why DLCP does not average gradients; ``""`` while it does."""
        if self._alone:
            return "a group of one has nothing to exchange"
        return self._exchange.reason if self._exchange else "not attached"

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        if self._exchange:
            self._exchange.close(reason)
        self._exchange = self._endpoint = None
        self._layers = {}
        self._sequence, self._told = 0, None

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks."""
        tensor = bucket.buffer()
        if not self._layers:
            raise RuntimeError("the state has been closed, or loaded and not attached: call state.attach(model)")
        if self._exchange is None:
            answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            answer.set_result(tensor)
            return answer
        pilot = self._pilot
        if self._sequence == 0:
            self._step_began_s = time.monotonic()
            if pilot and pilot.tells:
                self._tell(self._exchange, pilot)
        if pilot and self._told:
            self._step_began_s = time.monotonic()
            pilot.heard(self._told.wait().cpu().numpy())
            self._told = None
        if pilot and pilot.weighted:
            _weigh(tensor, pilot.weight)
        segments = segments_of(bucket, self._layers)
        noted = partial(self._note_time, segments, self._step_began_s)
        averaged = self._exchange.average(tensor, self.step, self._sequence, segments, noted)
        self._sequence += 1
        if bucket.is_last():
            if pilot:
                pilot.on_handed()
            self.step += 1
            self._sequence = 0
        return averaged

    def layer_seconds(self) -> dict[str, list[float]]:
        """Return when each layer's gradients were averaged, by layer position.

        Times are in seconds since the step's first bucket was ready, one for each of the latest steps.
        """
        return {str(position): list(seconds) for position, seconds in sorted(self._layer_seconds.items())}

    def _note_time(self, segments: Sequence[Segment], began_s: float) -> None:
        seconds = time.monotonic() - began_s
        for position in {segment.layer.position for segment in segments}:
            self._layer_seconds.setdefault(position, deque(maxlen=STEPS_KEPT)).append(seconds)


def _weigh(tensor: torch.Tensor, weight: float) -> None:
    """Multiply a bucket by a rank's weight; the gradient of no samples is 0 whatever it looks like, such as NaN."""
    if weight == 0:
        tensor.zero_()
    elif weight != 1:
        tensor.mul_(weight)


def _nothing() -> None:
    pass


def hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with DLCP; registered by :func:`enable`.

    Where that fails, ``backward`` raises a RuntimeError that quotes the :class:`dlcp.transport.TransportError`: DDP
    understands no error that is put into a future, only one that comes out of a callback.
    """
    return state.average(bucket).then(lambda averaged: averaged.value())


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
        A model on the CPU or on one CUDA device.
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
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. Otherwise all of them train as they would without.
    """
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and (
            parameter.dtype not in VALUE_TYPES or parameter.device.type not in ("cpu", "cuda")
        ):
            raise ValueError(
                f"parameter {name} is {parameter.dtype} on {parameter.device}; this version of DLCP exchanges "
                f"{', '.join(kind.value for kind in VALUE_TYPES.values())} on the CPU and on CUDA"
            )
    if state is None:
        state = State(options or Options.from_environment())
    elif options is not None:
        state.options = options
        state.tagger.policy = options.classes()
        state.ledger.job = options.job
    state.attach(model)
    model.register_comm_hook(state, hook)
    return state


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
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def replicas_identical(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether all ranks hold the same parameters, bit by bit; all ranks must call it."""
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, parameter_digest(model), group=group)
    return len(set(digests)) == 1
