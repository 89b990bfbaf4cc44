# SPDX-License-Identifier: Apache-2.0
"""The DDP communication hook: buckets of gradients are sent while backward still runs. FSDP2 has its own module."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, but without types
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel

from dlcp.collectives import Bucket, Residual
from dlcp.collectives.reduction_rules import check_samples
from dlcp.ledger import Ledger
from dlcp.session.joining import Agreement, NotJoinedError
from dlcp.session.options import Options
from dlcp.session.session import Fallback, TrainingSession
from dlcp.tags import Layer, Segment, Tagger, layers_in_order
from dlcp.torch.framework import (
    FrameworkFallback,
    StagedBucket,
    TensorFuture,
    add_residual,
    agreement_of,
    leave_with_group,
)
from dlcp.torch.profiling import profiled
from dlcp.torch.staging import VALUE_TYPES, Staged, Stager, stager_for
from dlcp.transport import Endpoint, TransportError

STEPS_KEPT = 10_000
"""How many steps' times are kept."""


@dataclass(slots=True, eq=False)
class TimedBucket(StagedBucket):
    """A bucket of DDP's that calls ``on_averaged`` when its average has arrived."""

    on_averaged: Callable[[], None] = lambda: None

    def resolve(self) -> None:
        """Copy the average back to the tensor."""
        self.on_averaged()
        StagedBucket.resolve(self)


class State:
    """The hook's state between steps.

    Pickle it with a checkpoint: it includes the step and the residual. If training continues with another number of
    ranks, :meth:`redistributed` divides all ranks' residual.

    Attributes
    ----------
    options
        The options in force.
    ledger
        What was sent, delivered and lost.
    step
        Number of the step in progress.
    attached
        Whether it averages a model's gradients: after :meth:`attach`, until :meth:`close`.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ledger = Ledger(options.job)
        self.step = 0
        self.feedback = Residual()
        self.tagger = Tagger(options.classes())
        self._session: TrainingSession | None = None
        self._fallback: FrameworkFallback | None = None
        self._stager: Stager | None = None
        self._sequence = 0
        self.attached = self._alone = False
        self._layers: dict[int, Layer] = {}
        self._layer_seconds: dict[int, deque[float]] = {}
        self._step_began_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("options", "step", "feedback", "tagger")}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__init__(kept["options"])  # type: ignore[misc]  # creates new sockets and threads
        self.step, self.feedback, self.tagger = kept["step"], kept["feedback"], kept["tagger"]

    @classmethod
    def redistributed(cls, states: "Sequence[State]", rank: int, ranks: int) -> "State":
        """Return a rank's state from those of all former ranks, whatever their number.

        Every residual goes to one new rank, so that none is lost or sent twice. It is scaled to keep its weight in the
        average, which now divides by another number of ranks.

        Parameters
        ----------
        states
            The states of all former ranks, rank 0 first, the same on all new ranks.
        rank, ranks
            This rank, and the new number of ranks.

        Raises
        ------
        ValueError
            There are no states, or the rank is not in 0..ranks-1.
        """
        if not states or not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks} cannot continue from {len(states)} states")
        state = cls(states[0].options)
        state.step, state.tagger = states[0].step, states[0].tagger
        factor = ranks / len(states) if state.options.combine == "average" else 1.0
        for former in states[rank::ranks]:
            state.feedback.take_over(former.feedback, factor)
        return state

    def attach(self, model: torch.nn.Module) -> None:
        """Join the other ranks and learn the layers of ``model``; all ranks must call it.

        If not all can use DLCP, all continue with the framework's own collectives, and the lowest rank says why.

        Raises
        ------
        TypeError, ValueError
            See :func:`enable`.
        RuntimeError
            The state or the model is already in use.
        NotJoinedError
            Not all ranks can use DLCP, and ``options.fallback`` is off.
        """
        if self.attached:
            raise RuntimeError("this state is already attached to a model: close() it first, or make another one")
        if isinstance(model, DistributedDataParallel):
            self._attach_replicated(model)
            return
        from dlcp.torch import fsdp  # most jobs do not need it

        if not fsdp.is_sharded(model):
            raise TypeError(f"enable takes a DistributedDataParallel or fully_shard model, got {type(model).__name__}")
        fsdp.attach(self, model)

    def _attach_replicated(self, model: DistributedDataParallel) -> None:
        self.attach_tensors(dict(model.module.named_parameters()), model.process_group)

    def attach_tensors(self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Join a group's other ranks to average buckets of these tensors' gradients; all ranks must call it.

        Parameters
        ----------
        tensors
            By name, first layers first; all on one device.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        layers = layers_in_order(list(shapes), shapes)
        self._layers = {id(tensor): layers[name] for name, tensor in tensors.items()}
        device = next(iter(tensors.values())).device

        def fallback(agreement: Agreement) -> Fallback:
            self._stager = stager_for(device)
            self._fallback = FrameworkFallback(group, agreement, self.feedback, device, self.options.deadline_s)
            return self._fallback

        self.join(group, [tensor for tensor in tensors.values() if tensor.requires_grad], fallback, self.options)

    def join(
        self,
        group: dist.ProcessGroup | None,
        parameters: Sequence[torch.Tensor],
        fallback: Callable[[Agreement], Fallback],
        options: Options,
    ) -> TrainingSession | None:
        """Join the other ranks of a group; return the session, or None in a group of one.

        Parameters
        ----------
        parameters
            The parameters whose gradients are exchanged.
        fallback
            Makes the fallback, for ranks that have an agreement.
        options
            The session's options, if a model needs other ones than the state's.
        """
        size = dist.get_world_size(group)
        self.attached, self._alone = True, size == 1
        if self._alone:
            return None
        agreement = agreement_of(group, options)
        self._session = TrainingSession(
            options,
            agreement.rank,
            range(size),
            fallback(agreement),
            ledger=self.ledger,
            feedback=self.feedback,
            tagger=self.tagger,
            gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        )
        try:
            self._session.join(agreement, call="dlcp.torch.enable")
        except NotJoinedError:
            self.close()
            raise
        leave_with_group(self._session, group)
        return self._session

    def adopt(self, session: TrainingSession | None) -> None:
        """Register a session that averages on this state's behalf but not through it; None in a group of one."""
        self._session, self._alone = session, session is None

    @property
    def session(self) -> TrainingSession | None:
        """The session; None before :meth:`attach`, and in a group of one."""
        return self._session

    @property
    def hosts(self) -> int:
        """Number of hosts that the ranks are on; 0 without DLCP."""
        return self._session.hosts if self._session else 0

    @property
    def local_peers(self) -> int:
        """Number of other ranks that this one reaches through shared memory."""
        return self._session.local_peers if self._session else 0

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint; None before :meth:`attach`, in a group of one, and without DLCP."""
        return self._session.endpoint if self._session else None

    @property
    def active(self) -> bool:
        """Whether DLCP averages gradients; False if the framework does, see :attr:`reason`."""
        return self._session is not None and self._session.active

    @property
    def reason(self) -> str:
        """Why DLCP does not average gradients; ``""`` while it does."""
        if self._alone:
            return "a group of one has nothing to exchange"
        return self._session.reason if self._session else "not attached"

    def samples(self, count: int) -> None:
        """Announce how many samples this rank's gradients of the coming step will be the mean of.

        Every sample then counts the same, whichever rank has it; a rank may have none. The number holds until another
        one is given. All ranks must set ``Options(samples=...)``, so that they expect it. The sooner it is called
        before the backward pass, the less the others wait for it.

        Raises
        ------
        ValueError
            It is not a whole number of samples, or the options do not set ``samples``.
        RuntimeError
            The step's backward pass has begun, or its number of samples was already sent.
        """
        if self._session is None:
            check_samples(count)
            return
        if self._sequence or self._session.metadata_step == self.step:
            raise RuntimeError(f"samples({count}) is too late for step {self.step}: call it once, before backward")
        self._session.set_samples(count)
        self._session.begin_step(self.step)

    def flush(self) -> None:
        """Send the coming step in full, with everything lost or deferred before. All ranks must call it.

        Call it before the last step, and before a step after which the model is tested or saved without this state. The
        pending values need an optimizer step to be used, so there must be a backward pass.

        Raises
        ------
        RuntimeError
            The step's backward pass has begun, or the state is not attached to a model.
        """
        if not self.attached:
            raise RuntimeError("flush() needs a state in use: call state.attach(model), or cross_step's own flush()")
        if self._sequence:
            raise RuntimeError(f"flush() is too late for step {self.step}: call it before backward")
        if self._session:
            self._session.flush(self.step)

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        if self._session:
            self._session.close(reason)
        if self._stager:
            self._stager.close()
        self.attached, self._sequence = False, 0

    def average(self, bucket: GradBucket) -> TensorFuture:
        """Average a bucket over all ranks."""
        tensor, session = bucket.buffer(), self._session
        if not self.attached:
            raise RuntimeError("the state is closed, or loaded and not attached: call state.attach(model)")
        if session is None:
            if self.feedback.size:  # from a checkpoint of more ranks
                add_residual(self.feedback, tensor, segments_of(bucket, self._layers))
            return _resolved(tensor)
        # It counts the step's buckets; above 0 it also says that backward has begun: samples() and flush() go by that.
        if self._sequence == 0:
            self._step_began_s = time.monotonic()
        weight = session.weight(self.step)
        if weight == 0:  # the gradient of no samples is always 0, even if it holds NaN
            tensor.zero_()
        elif weight != 1:
            tensor.mul_(weight)
        segments = segments_of(bucket, self._layers)
        on_averaged = partial(self._note_time, segments, self._step_began_s)
        number = session.first_sequence + self._sequence
        pending = TimedBucket(self.step, number, segments, on_averaged=on_averaged)
        try:
            admitted = session.admit(pending)
        except TransportError as error:
            averaged = _failed(error)
        else:
            if admitted:
                assert session.endpoint
                assert self._stager
                per_packet = session.endpoint.connection.options.payload_bytes // tensor.element_size()
                averaged = self._stager.stage(tensor, per_packet, partial(self._on_host, pending)).answer
            else:
                averaged = self._by_framework(tensor, pending)
        self._sequence += 1
        if bucket.is_last():
            if session.autotuner:
                session.autotuner.on_gradients_ready()
            self.step += 1
            self._sequence = 0
        return averaged

    def _by_framework(self, tensor: torch.Tensor, pending: "TimedBucket") -> TensorFuture:
        """Average a flat tensor with the framework."""
        assert self._session
        assert self._fallback
        averaged = self._fallback.average_tensor(pending.segments, tensor)
        meter = self._session.table.meter
        if meter is not None:
            meter.on_ready(pending.step, pending.segments)
            averaged.add_done_callback(lambda _: meter.on_averaged(pending.step))
        return averaged

    def _on_host(self, pending: "TimedBucket", staged: Staged) -> None:
        """Average a bucket that the session has admitted and that is on the host now."""
        assert self._session
        pending.staged = staged
        pending.bucket = Bucket(staged.array, staged.value_type, pending.segments, staged.magnitudes)
        self._session.start(pending)

    def layer_seconds(self) -> dict[str, list[float]]:
        """Return when each layer's gradients were averaged, by layer position.

        Times are in seconds since the step's first bucket was ready, one for each of the latest steps.
        """
        return {str(position): list(seconds) for position, seconds in sorted(self._layer_seconds.items())}

    def _note_time(self, segments: Sequence[Segment], began_s: float) -> None:
        seconds = time.monotonic() - began_s
        for position in {segment.layer.position for segment in segments}:
            self._layer_seconds.setdefault(position, deque(maxlen=STEPS_KEPT)).append(seconds)


def _failed(error: Exception) -> TensorFuture:
    answer: TensorFuture = torch.futures.Future()
    answer.set_exception(error)  # type: ignore[arg-type]  # annotated as a result
    return answer


def _resolved(tensor: torch.Tensor) -> TensorFuture:
    answer: TensorFuture = torch.futures.Future()
    answer.set_result(tensor)
    return answer


def hook(state: State, bucket: GradBucket) -> TensorFuture:
    """Average a bucket with DLCP; registered by :func:`enable`.

    If that fails, ``backward`` raises a RuntimeError that quotes the :class:`dlcp.transport.TransportError`: DDP cannot
    handle an error set on a future, only one raised by a callback.
    """
    with profiled("hand over a bucket") if profiler._is_profiler_enabled else nullcontext():
        return state.average(bucket).then(lambda averaged: averaged.value())


def noop_hook(state: object, bucket: GradBucket) -> TensorFuture:
    """Leave every rank its own gradients; shows the step time with free communication."""
    return _resolved(bucket.buffer())


def enable(model: torch.nn.Module, options: Options | None = None, *, state: State | None = None) -> State:
    """Let DLCP average the gradients of a DDP or FSDP2 model; all ranks must call it, before the first backward.

    Parameters
    ----------
    model
        A DistributedDataParallel model on the CPU or on one CUDA device, or one sharded by ``fully_shard``: then DLCP
        reduces and scatters gradients, and parameters are gathered as before.
    options
        By default :meth:`Options.from_environment`.
    state
        A state from a checkpoint, to continue from; ``options`` replace its own if given.

    Returns
    -------
    The state; call its ``close`` after training.

    Raises
    ------
    TypeError
        The model is neither.
    RuntimeError
        DLCP or another communication hook already averages the model's gradients.
    ValueError
        A parameter's type or device is not supported, or it has sparse gradients, or FSDP2 does not support an option;
        the message names it.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. With it all of them train as without DLCP.
    """
    if isinstance(model, DistributedDataParallel):
        refuse_second_hook(model)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    refuse_sparse(plain)
    for name, parameter in plain.named_parameters():
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
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(state, hook)
    return state


def refuse_second_hook(model: DistributedDataParallel) -> None:
    """Raise RuntimeError if a model has a communication hook: DDP takes one, and says so after ranks have met."""
    for _, state in model._comm_hooks:
        if not isinstance(state, State):
            raise RuntimeError("the model already has another communication hook, and DDP takes only one")
        if state.attached:
            raise RuntimeError(
                "DLCP already averages the gradients of this model: use the state that enable() returned, once"
            )
        raise RuntimeError(
            "DLCP has averaged the gradients of this model, and its state is closed: call attach(model) of that state"
        )


def refuse_sparse(model: torch.nn.Module) -> None:
    """Raise ValueError if a model has sparse gradients, which DDP's buckets cannot hold; detected as DDP does."""
    for name, module in model.named_modules():
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        if isinstance(module, kinds) and module.sparse and module.weight.requires_grad:
            weight = f"{name}.weight".removeprefix(".")
            raise ValueError(
                f"parameter {weight} has sparse gradients (sparse=True), and DLCP only exchanges dense ones: set "
                "sparse=False, or leave the gradients of this model to the framework"
            )


def segments_of(bucket: GradBucket, layers: dict[int, Layer]) -> Sequence[Segment]:
    """Return where each parameter is in a bucket. DDP regroups its buckets, so this is not cached."""
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
    """Return whether all ranks hold bitwise equal parameters; all ranks must call it."""
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, parameter_digest(model), group=group)
    return len(set(digests)) == 1
