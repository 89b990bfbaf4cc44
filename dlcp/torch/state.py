# SPDX-License-Identifier: Apache-2.0
"""The way of PyTorch's gradients into a training session, and back: for the DDP hook, cross-step scheduling and FSDP2.

:meth:`State.average` takes a flat tensor. It copies the values to the host if they are on a GPU, submits them as a
bucket, and gives the average back in the tensor's own memory. Where DLCP does not average, the framework's all-reduce
does.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, but without types
from torch.nn.parallel import DistributedDataParallel

from dlcp.collectives import Bucket, Residual
from dlcp.collectives.reduction_rules import check_samples
from dlcp.session.averager import BucketTable, PendingBucket, StepAverager
from dlcp.session.joining import Agreement, NotJoinedError
from dlcp.session.options import Options
from dlcp.session.training_session import Fallback, TrainingSession
from dlcp.torch.framework import GlooWatch, agreement_of, framework_route, leave_with_group
from dlcp.transport import Endpoint, TransportError
from dlcp.transport.ledger import Ledger
from dlcp.transport.shared_memory import EXPORT_BYTES
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment, Tagger, layers_in_order

if TYPE_CHECKING:
    from dlcp.torch.staging import Staged, Stager
    from dlcp.torch.unused import UnusedParameters

STEPS_KEPT = 10_000
"""Number of steps whose times are kept: some minutes of training."""
CHECKED_STEPS = 100
"""The first steps are all checked for parameters in no bucket, then every hundredth: 500 modules take 1 ms."""
NAMED = 8
"""Most names of parameters in one warning."""
log = logging.getLogger("dlcp")
FRAMEWORK = "the framework's own all-reduce"
"""The fallback, for messages."""
VALUE_TYPES = {
    torch.float32: ValueType.FLOAT32,
    torch.float64: ValueType.FLOAT64,
    torch.float16: ValueType.FLOAT16,
    torch.bfloat16: ValueType.BFLOAT16,
}
"""The formats of gradients that can be exchanged."""

TensorFuture = torch.futures.Future[torch.Tensor]
Done = Callable[[BaseException | None], None]
"""Called with None when a tensor or bucket holds the average, otherwise with the error."""


class State:
    """The state of a model's gradients between steps.

    Pickle it with a checkpoint: it includes the step and the residual. If training continues with another number of
    ranks, :meth:`redistributed` divides all ranks' residual.

    It has more methods than most classes, because users call most of them: DLCP's interface for PyTorch is here.

    Attributes
    ----------
    options
        The options in force.
    ledger
        The record of packets: sent, delivered, lost.
    table
        The step in progress and its buckets.
    attached
        Whether it averages a model's gradients: after :meth:`attach`, until :meth:`close`.
    session
        The session; None before the ranks have joined, and in a group of one.
    group_ranks
        The job's numbers of the ranks that train the model; empty before they join.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ledger = Ledger(options.job)
        self.table = BucketTable()
        self._discarded: Callable[[], Iterable[str] | None] | None = None
        self._residual = Residual()
        self._unused: UnusedParameters | None = None
        self._unsettled = False
        self.tagger = Tagger(options.tag_policy)
        self.session: TrainingSession | None = None
        self.group_ranks: tuple[int, ...] = ()
        self.attached = False
        self._reduced: ReducedParameters | None = None
        self._by_framework: FrameworkAverager | None = None
        self._stagers: dict[torch.device, Stager | None] = {}
        self._sequence = 0
        """The number of buckets of this step so far; above 0, the backward pass has begun."""
        self._alone = False
        self._layers: dict[int, Layer] = {}
        self._segments: dict[tuple[int, ...], Sequence[Segment]] = {}
        """Where parameters are in a bucket, by its parameters: DDP regroups them, but lays out the same ones alike."""
        self._seconds: dict[tuple[int, ...], deque[float]] = {}
        """How long after a step's first bucket each bucket was averaged, by its parameters."""
        self._step_began_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("options", "step", "feedback", "tagger")}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__init__(kept["options"])  # type: ignore[misc]  # creates new sockets and threads
        self.table, self._residual, self.tagger = BucketTable(kept["step"]), kept["feedback"], kept["tagger"]
        self._residual.allow_revoking(False)  # until the state is attached to a model again

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
        state.table, state.tagger = BucketTable(states[0].step), states[0].tagger
        factor = ranks / len(states) if state.options.combine == "average" else 1.0
        for former in states[rank::ranks]:
            state.feedback.take_over(former.feedback, factor)
        return state

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self.table.step

    # Joining ----------------------------------------------------------------------------------------------------------

    def attach(self, model: DistributedDataParallel) -> None:
        """Join the other ranks and learn the layers of ``model``; all ranks must call it.

        If not all can use DLCP, all continue with the framework's own all-reduce, and the lowest rank says why. The
        model must have the hook already; :func:`dlcp.torch.enable` does both.

        Raises
        ------
        RuntimeError
            The state is already in use.
        NotJoinedError
            Not all ranks can use DLCP, and ``options.fallback`` is off.
        """
        self.check_unattached()
        named = dict(model.module.named_parameters())
        known = {id(parameter) for parameter in named.values()}
        wrapped = getattr(model, "_module_parameters", ())  # private to PyTorch
        replaced = [parameter for parameter in wrapped if id(parameter) not in known]
        named |= {f"(no longer in the model) {number}": parameter for number, parameter in enumerate(replaced)}
        self._reduced = ReducedParameters(model)
        if getattr(model, "find_unused_parameters", False) and not model.static_graph:
            from dlcp.torch.unused import UnusedParameters  # most models use all of theirs

            self._unused = UnusedParameters(model, named)
            self.may_discard(self._unused.names)
        self.attach_tensors(named, model.process_group)

    def attach_tensors(
        self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, *, call: str = "dlcp.torch.enable"
    ) -> None:
        """Join a group's other ranks to average buckets of these tensors' gradients; all ranks must call it.

        Parameters
        ----------
        tensors
            By name, first layers first; all on one device.
        call
            See :func:`dlcp.session.joining.join`.
        """
        self.check_unattached()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        layers = layers_in_order(list(shapes), shapes)
        self._layers = {id(tensor): layers[name] for name, tensor in tensors.items()}
        device = next(iter(tensors.values())).device
        self._by_framework = averager = FrameworkAverager(group, self.feedback)

        def fallback(agreement: Agreement) -> Fallback:
            average = partial(averager.average_on_host, device)
            watch = GlooWatch(group, agreement, self.options.deadline_s)
            return Fallback(FRAMEWORK, average, watch, framework_route(group, device))

        self.join(group, fallback, self.options, call=call)
        self.attached = True

    def check_unattached(self) -> None:
        """Raise RuntimeError if the state already averages a model's gradients."""
        if self.attached:
            raise RuntimeError("this state is already attached to a model: close() it first, or make another one")

    def average_in_order(self, group: dist.ProcessGroup | None, count: int) -> None:
        """Without DLCP, average the ``count`` buckets of a step in one order, whatever order each rank has them in."""
        self._by_framework = FrameworkAverager(group, self.feedback, count)

    def join(
        self,
        group: dist.ProcessGroup | None,
        fallback: Callable[[Agreement], Fallback],
        options: Options,
        *,
        call: str,
        export_bytes: int = EXPORT_BYTES,
    ) -> TrainingSession | None:
        """Join the other ranks of a group; return the session, or None in a group of one.

        Parameters
        ----------
        fallback
            Makes the fallback, for ranks that have an agreement.
        options
            The session's options, if a model needs other ones than the state's.
        call, export_bytes
            See :func:`dlcp.session.joining.join`.
        """
        size = dist.get_world_size(group)
        self.group_ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self._alone = size == 1
        if self._alone:
            return None
        agreement = agreement_of(group, options)
        averager = StepAverager(
            options, agreement.membership, ledger=self.ledger, feedback=self.feedback, tagger=self.tagger
        )
        self.session = TrainingSession(averager, fallback(agreement), self.table)
        try:
            self.session.join(agreement, call=call, export_bytes=export_bytes)
        except NotJoinedError:
            self.close()
            raise
        if self._by_framework:
            self._by_framework.first = self.session.averager.first_sequence
        leave_with_group(self.session, group)
        return self.session

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint; None before the ranks have joined, in a group of one, and without DLCP."""
        return self.session.endpoint if self.session else None

    @property
    def active(self) -> bool:
        """Whether DLCP is in use; False if the framework averages instead of it, see :attr:`reason`.

        While it is in use, the framework may still average steps because it is faster, see :attr:`route`.
        """
        return self.session is not None and self.session.active

    @property
    def reason(self) -> str:
        """Why DLCP does not average gradients; ``""`` while it does."""
        if self._alone:
            return "a group of one has nothing to exchange"
        return self.session.reason if self.session else "not attached"

    @property
    def route(self) -> str:
        """The current route and the reason for it, as one sentence; ``""`` if DLCP averages all steps."""
        return self.session.route if self.session else ""

    @property
    def framework_steps(self) -> int:
        """Number of steps that the framework has averaged while DLCP was in use."""
        return self.session.framework_steps if self.session else 0

    # Between steps ----------------------------------------------------------------------------------------------------

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
        if self.session is None:
            check_samples(count)
            return
        if self._sequence or self.session.has_sent_metadata(self.step):
            raise RuntimeError(f"samples({count}) is too late for step {self.step}: call it once, before backward")
        self.session.averager.set_samples(count)
        self.session.begin_step(self.step)

    def flush(self) -> None:
        """Send the coming step in full, with everything lost before. All ranks must call it.

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
        if self.session:
            self.session.flush(self.step)

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        if self.session:
            self.session.close(reason)
        stagers, self._stagers = self._stagers, {}  # another thread may close, too
        for stager in filter(None, stagers.values()):
            stager.close()
        self.attached, self._sequence = False, 0
        self.settle()
        # The next model may use all of its averages.
        self._unused, self._discarded, self._unsettled = None, None, False
        self._residual.allow_revoking(False)

    def end_step(self) -> None:
        """End a step: all of its buckets are being averaged."""
        self.table.end_step()
        self._sequence = 0
        self._unsettled = self._discarded is not None

    def may_discard(self, discarded: Callable[[], Iterable[str] | None]) -> None:
        """Allow averages that nobody uses, such as those of parameters that no rank used in a step.

        Parameters
        ----------
        discarded
            Returns the names of these parameters after a step, the same on all ranks; None while they are unknown.
        """
        self._discarded = discarded
        self._residual.allow_revoking(True)

    def settle(self) -> None:
        """Take back the residual in averages of the last step that nobody used; no other step has begun."""
        if self._unsettled and self._discarded is not None:
            names = self._discarded()
            if names is not None:
                self._unsettled = False
                self._residual.revoke(names)

    @property
    def feedback(self) -> Residual:
        """The values that this rank still has to send."""
        self.settle()
        return self._residual

    # Averaging --------------------------------------------------------------------------------------------------------

    def average_bucket(self, bucket: GradBucket) -> TensorFuture:
        """Average a bucket of DDP's over all ranks, and end the step with its last one."""
        if not self.attached:
            raise RuntimeError("the state is closed, or loaded and not attached: call state.attach(model)")
        tensor, session = bucket.buffer(), self.session
        if self._reduced:
            self._reduced.note(bucket, self.step)
        if self._sequence == 0:
            self.settle()
            self._step_began_s = time.monotonic()
        weight = 1.0 if session is None else session.weight(self.step)
        if weight == 0:  # the gradient of no samples is always 0, even if it holds NaN
            tensor.zero_()
        elif weight != 1:
            tensor.mul_(weight)
        held = tuple(map(id, bucket.parameters()))
        if held not in self._segments:
            self._segments[held] = segments_of(bucket, self._layers)
        averaged = self.average(self._sequence, self._segments[held], tensor, partial(self._note_time, held))
        self._sequence += 1
        if bucket.is_last():
            if self._unused is not None:
                self._unused.end_step()
            if self._reduced and self.group_ranks[0] == dist.get_rank():
                self._reduced.warn_of_others(self.step)
            self.end_step()
        return averaged

    def average(
        self,
        sequence: int,
        segments: Sequence[Segment],
        tensor: torch.Tensor,
        on_averaged: Callable[[torch.Tensor], None] | None = None,
        *,
        exported: bool = False,
    ) -> TensorFuture:
        """Average a flat tensor in place over all ranks.

        Parameters
        ----------
        sequence
            The bucket's number within the step, the same on all ranks.
        segments
            Its layers.
        tensor
            Shape (values,), contiguous.
        on_averaged
            Called with a tensor of the averages, on the host if DLCP has computed them, before the future resolves.
        exported
            Whether its memory is exported, see :class:`dlcp.collectives.Bucket`.

        Returns
        -------
        A future of ``tensor``, or of the :class:`dlcp.transport.TransportError` that averaging failed with.
        """
        session, stager = self.session, self._stager_of(tensor.device)
        answer: TensorFuture = stager.future() if stager else torch.futures.Future()
        first = session.averager.first_sequence if session else 0
        submission = SubmittedTensor(self.step, first + sequence, segments, tensor, answer, on_averaged)
        if session is None:  # a checkpoint of more ranks may have left a residual
            add_residual(self.feedback, tensor, segments)
            submission.answer()
            return answer
        try:
            admitted = session.admit(submission)
        except TransportError as error:
            submission.answer(error)
            return answer
        if not admitted:
            assert self._by_framework
            self._by_framework.average(submission, tensor, partial(session.settle, submission))
        elif stager is None:
            submission.bucket = Bucket(*as_array(tensor), segments, exported=exported)
            session.start(submission)
        else:
            assert session.endpoint
            per_packet = session.endpoint.connection.options.payload_bytes // tensor.element_size()
            stager.stage(tensor, per_packet, partial(submission.on_host, session), submission.answer)
        return answer

    def _stager_of(self, device: torch.device) -> "Stager | None":
        if device.type != "cpu" and device not in self._stagers:
            from dlcp.torch.staging import stager_for  # needed for other devices only

            self._stagers[device] = stager_for(device)
        return self._stagers.get(device)

    def layer_seconds(self) -> dict[str, list[float]]:
        """Return when each layer's gradients were averaged, by layer position.

        Times are in seconds since the step's first bucket was ready, one for each of the latest steps.
        """
        found: dict[int, list[float]] = {}
        for held, seconds in list(self._seconds.items()):
            for position in {segment.layer.position for segment in self._segments[held]}:
                found.setdefault(position, []).extend(seconds)
        return {str(position): seconds for position, seconds in sorted(found.items())}

    def _note_time(self, held: tuple[int, ...], _: torch.Tensor) -> None:
        self._seconds.setdefault(held, deque(maxlen=STEPS_KEPT)).append(time.monotonic() - self._step_began_s)


class SubmittedTensor(PendingBucket):
    """A flat tensor from when it is submitted to the session until it holds the average.

    Parameters
    ----------
    step, sequence, segments
        See :class:`PendingBucket`.
    tensor
        The tensor.
    averaged
        Resolved with ``tensor`` when it holds the average.
    on_averaged
        See :meth:`State.average`.
    """

    __slots__ = ("_averaged", "_on_averaged", "_staged", "_tensor")

    def __init__(
        self,
        step: int,
        sequence: int,
        segments: Sequence[Segment],
        tensor: torch.Tensor,
        averaged: TensorFuture,
        on_averaged: Callable[[torch.Tensor], None] | None,
    ) -> None:
        super().__init__(step, sequence, segments, tensor.nbytes, self._resolve)
        self._tensor, self._averaged, self._on_averaged = tensor, averaged, on_averaged
        self._staged: Staged | None = None

    def on_host(self, session: TrainingSession, copy: "Staged") -> None:
        """Let the session average a copy on the host."""
        self._staged, self.bucket = copy, Bucket(*as_array(copy.values), self.segments, copy.magnitudes)
        session.start(self)

    def _resolve(self, error: BaseException | None) -> None:
        if error is not None:
            self._averaged.set_exception(error)  # type: ignore[arg-type]  # annotated as a result
            return
        if self._on_averaged is not None:
            self._on_averaged(self._tensor if self._staged is None else self._staged.values)
        if self._staged is None:
            self._averaged.set_result(self._tensor)
        else:
            self._staged.give_back(self._averaged)


def joining_unsupported(model: DistributedDataParallel) -> str:
    """Return why DLCP cannot average as DDP does in the ``join()`` that the model is in; ``""`` if it can."""
    config = getattr(model, "_join_config", None)  # private to PyTorch
    if config is None or not config.enable or config.throw_on_early_termination or model._divide_by_initial_world_size:
        return ""
    return (
        "join(divide_by_initial_world_size=False) divides by the number of ranks that still have data, and DLCP by the "
        "number of all ranks: omit the option"
    )


class ReducedParameters:
    """Which of a model's parameters are in buckets of DDP: those that required gradients when DDP wrapped the model.

    Parameters
    ----------
    model
        The wrapped model; kept as a weak reference, because it refers to the state.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self._parameters: set[int] = set()
        self._first_step: int | None = None
        self._warned = False

    def note(self, bucket: GradBucket, step: int) -> None:
        """Note a bucket's parameters in the first step; raise ValueError if DDP would divide by another number."""
        if self._first_step is None:
            self._first_step = step
        if step == self._first_step:  # later ones hold the same, in another order
            self._parameters.update(map(id, bucket.parameters()))
        if (model := self._model()) is not None and (why := joining_unsupported(model)):
            raise ValueError(why)

    def warn_of_others(self, step: int) -> None:
        """Log, once, the names of parameters that require gradients and are in no bucket, so that nobody averages them.

        Walking a large model takes a millisecond, so not every step is checked once training is under way.
        """
        model = self._model()
        if self._warned or model is None or (step > CHECKED_STEPS and step % CHECKED_STEPS):
            return
        delayed = {id(parameter) for parameter in model._delay_all_reduce_params}
        names = [
            name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad
            and id(parameter) not in self._parameters
            and id(parameter) not in delayed
            and name not in model.parameters_to_ignore
        ]
        if names:
            self._warned = True
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            log.warning(
                "%s%s: these parameters require gradients but are in no bucket of DistributedDataParallel, so ranks do "
                "not average them and will differ; wrap the model after you add or unfreeze parameters",
                ", ".join(names[:NAMED]),
                more,
            )


class FrameworkAverager:
    """Averages with the framework's all-reduce, in one order on all ranks, residual included.

    Parameters
    ----------
    group
        The process group.
    feedback
        The residual, which is sent here for the last time: nothing is lost on this way.
    count
        The number of buckets in a step, if ranks may have them in different orders: the highest number goes first, as
        in backward. None if all ranks have the same order.

    Attributes
    ----------
    first
        The lowest number.
    """

    def __init__(self, group: dist.ProcessGroup | None, feedback: Residual, count: int | None = None) -> None:
        self._group, self._feedback, self._count = group, feedback, count
        self.first = 0
        self._waiting: dict[int, tuple[PendingBucket, torch.Tensor, Done]] = {}
        self._next = -1

    def average(self, pending: PendingBucket, tensor: torch.Tensor, done: Done) -> None:
        """Average a flat tensor in place, and call ``done``."""
        if self._count is None:
            self._all_reduce(pending, tensor, done)
            return
        if self._next < self.first:  # the last step is complete
            self._next = self.first + self._count - 1
        self._waiting[pending.sequence] = pending, tensor, done
        while self._next in self._waiting:
            self._all_reduce(*self._waiting.pop(self._next))
            self._next -= 1

    def average_on_host(self, device: torch.device, pending: PendingBucket, done: Done) -> None:
        """Average a bucket on the host by way of a device, whose tensors the group can reduce."""
        assert pending.bucket
        host = as_tensor(pending.bucket)
        tensor = host.to(device)

        def copy_back(error: BaseException | None) -> None:
            if error is None:
                host.copy_(tensor)
            done(error)

        self.average(pending, tensor, copy_back)

    def _all_reduce(self, pending: PendingBucket, tensor: torch.Tensor, done: Done) -> None:
        ranks, as_ddp = dist.get_world_size(self._group), self._count is None
        add_residual(self._feedback, tensor, pending.segments)
        if as_ddp:  # the same bits as DDP without a hook; after the sum, flags of cross_step stay whole numbers
            tensor.div_(ranks)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None

        def finish(summed: "torch.futures.Future[Any]") -> None:
            try:
                summed.value()
                if not as_ddp:
                    tensor.div_(ranks)
            except Exception as error:
                done(error)
            else:
                done(None)

        work.get_future().add_done_callback(finish)


def add_residual(feedback: Residual, tensor: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Add the residual of these layers for the last time: nothing is lost on this way."""
    if not feedback.size:
        return
    residual = np.zeros(tensor.numel(), np.float64)
    feedback.apply(residual, segments)
    tensor.add_(torch.from_numpy(residual).to(tensor.device, torch.promote_types(tensor.dtype, torch.float32)))


def as_array(tensor: torch.Tensor) -> tuple[NDArray[np.generic], ValueType]:
    """Return a flat host tensor's memory as an array, and its format."""
    value_type = VALUE_TYPES[tensor.dtype]
    plain = tensor.detach()
    if value_type is ValueType.BFLOAT16:
        return plain.view(torch.int16).numpy().view(np.uint16), value_type
    return plain.numpy(), value_type


def as_tensor(bucket: Bucket) -> torch.Tensor:
    """Return a bucket's memory as a tensor; the inverse of :func:`as_array`."""
    if bucket.value_type is ValueType.BFLOAT16:
        return torch.from_numpy(bucket.values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bucket.values)


def segments_of(bucket: GradBucket, layers: dict[int, Layer]) -> Sequence[Segment]:
    """Return where each parameter is in a bucket."""
    base, size = bucket.buffer().data_ptr(), bucket.buffer().element_size()
    found = [
        Segment(layers[id(parameter)], start := (gradient.data_ptr() - base) // size, start + gradient.numel())
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
    return sorted(found, key=lambda segment: segment.start)
