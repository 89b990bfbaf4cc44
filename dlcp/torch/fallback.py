# SPDX-License-Identifier: Apache-2.0
"""The exchange of a DDP model: where DLCP fails, the framework's own all-reduce averages. Ranks recover over Gloo."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dlcp.collectives import Bucket, ErrorFeedback
from dlcp.collectives.choice import Reducer
from dlcp.session.agreement import Agreement
from dlcp.session.recovery import LEFT, Handed, Mode, RecoveringExchange
from dlcp.tags import Segment
from dlcp.torch.staging import VALUE_TYPES, Staged, Stager, stager_for
from dlcp.transport import Endpoint, PeerAbortedError, PeerSilentError

log = logging.getLogger("dlcp")


@dataclass(slots=True, eq=False)
class _Bucket(Handed):
    """A bucket on its way to the host and back.

    Attributes
    ----------
    on_averaged
        What else is done with an average.
    """

    on_averaged: Callable[[], None] = lambda: None
    staged: Staged | None = None

    def give_back(self) -> None:
        assert self.staged
        self.on_averaged()
        self.staged.give_back()

    def fail(self, error: BaseException) -> None:
        if self.staged:  # what comes from the device later fails then
            self.staged.fail(error)


class GroupChannel:
    """A process group as a channel to recover over.

    Parameters
    ----------
    group
        A Gloo group of the same ranks; used by nobody else.
    agreement
        Where ranks tell that they have left DLCP, so that it is known who has not.
    """

    def __init__(self, group: dist.ProcessGroup, agreement: Agreement) -> None:
        self.group, self.agreement = group, agreement

    def gather(self, item: Any) -> dict[int, Any]:
        """Return what every rank gave, by rank."""
        told: list[Any] = [None] * self.agreement.size
        with self._naming_absent():
            dist.all_gather_object(told, (self.agreement.rank, item), group=self.group)
        return dict(told)

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over all ranks."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        with self._naming_absent():
            dist.all_reduce(tensor, group=self.group)
        total: NDArray[Any] = tensor.numpy()
        return total

    def close(self) -> None:
        """Give the group up."""
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # it ended with the default group
            dist.destroy_process_group(self.group)

    @contextlib.contextmanager
    def _naming_absent(self) -> Iterator[None]:
        """Say which ranks have not left DLCP, and so have probably ended; as far as the store can tell."""
        try:
            yield
        except RuntimeError as error:
            absent: list[int] = []
            with contextlib.suppress(RuntimeError):
                absent = [rank for rank in range(self.agreement.size) if not self.agreement.told(LEFT, [rank])]
            if not absent:
                raise
            who = ", ".join(f"rank {rank}" for rank in absent)
            raise PeerSilentError(f"{error} (not there: {who})") from error


def open_channel(group: dist.ProcessGroup | None, agreement: Agreement, deadline_s: float) -> GroupChannel | None:
    """Make a Gloo group of the same ranks; all must call it. None, and a warning, if that cannot be done."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    some = len(ranks) < dist.get_world_size()
    wait = timedelta(seconds=deadline_s)
    try:
        made = dist.new_group(ranks, timeout=wait, backend="gloo", use_local_synchronization=some)
    except (RuntimeError, ValueError) as problem:
        log.warning("DLCP has no Gloo group to recover over, so that a failure will be an error: %s", problem)
        return None
    return GroupChannel(made, agreement)


def framework_average(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
    """Average a tensor in place over a group, as DDP does without a hook."""
    tensor.div_(dist.get_world_size(group))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return averaged


class Exchange(RecoveringExchange[_Bucket]):
    """Averages the buckets of one model; every rank hands in the same ones in the same order.

    Parameters
    ----------
    group
        The model's process group; its all-reduce is what is fallen back to.
    agreement
        Where ranks tell that they have left DLCP.
    ranks, deadline_s, feedback
        See :class:`dlcp.session.recovery.RecoveringExchange`.
    """

    INSTEAD = "the framework's own all-reduce"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        agreement: Agreement,
        ranks: Sequence[int],
        deadline_s: float,
        feedback: ErrorFeedback,
    ) -> None:
        super().__init__(agreement.rank, ranks, deadline_s, feedback)
        self.group = group
        self._agreement = agreement
        self._gloo: GroupChannel | None = None
        self._stagers: dict[torch.device, Stager] = {}

    def use(self, endpoint: Endpoint, reducer: Reducer, *, may_recover: bool) -> None:
        """Average with DLCP from now on; all ranks must call it. See :meth:`RecoveringExchange.use`."""
        if may_recover:
            self._gloo = open_channel(self.group, self._agreement, self.deadline_s)
        super().use(endpoint, reducer, may_recover=self._gloo is not None)

    def average(
        self,
        tensor: torch.Tensor,
        step: int,
        sequence: int,
        segments: Sequence[Segment],
        on_averaged: Callable[[], None],
    ) -> "torch.futures.Future[torch.Tensor]":
        """Average a flat tensor over all ranks."""
        handed = _Bucket(step, sequence, segments, on_averaged=on_averaged)
        with self._changed:
            if self.mode is Mode.FALLBACK:
                return self._pay_and_average(segments, tensor)
            if self._error:
                failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                failed.set_exception(self._error)  # type: ignore[arg-type]  # annotated as a result
                return failed
            self._enter(handed)
        assert self._endpoint
        per_packet = self._endpoint.options.payload_bytes // VALUE_TYPES[tensor.dtype].storage.itemsize
        if tensor.device not in self._stagers:
            self._stagers[tensor.device] = stager_for(tensor.device)
        return self._stagers[tensor.device].stage(tensor, per_packet, partial(self._on_host, handed)).answer

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        super().close(reason)
        if self._gloo:
            self._gloo.close()
        for stager in self._stagers.values():
            stager.close()

    def _on_host(self, handed: _Bucket, staged: Staged) -> None:
        handed.staged = staged
        handed.bucket = Bucket(staged.array, staged.value_type, handed.segments, staged.magnitudes)
        self._begin(handed)

    def _look(self) -> BaseException | None:
        told = self._agreement.anyone_told(LEFT)
        return PeerAbortedError("another rank has left DLCP") if told else None

    def _tell_left(self, reason: str) -> None:
        self._agreement.tell(LEFT, reason)

    def _channel(self) -> GroupChannel:
        assert self._gloo
        return self._gloo

    def _fall_back(self, handed: _Bucket) -> None:
        assert handed.staged
        del self._open[handed.which]
        handed.staged.pass_on(partial(self._pay_and_average, handed.segments))

    def _pay_and_average(
        self, segments: Sequence[Segment], tensor: torch.Tensor
    ) -> "torch.futures.Future[torch.Tensor]":
        self._pay(tensor, segments)
        return framework_average(self.group, tensor)

    def _pay(self, tensor: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Add what is still owed: the framework loses nothing, so this is the last time."""
        if all(self.feedback.owed(segment.layer.name) is None for segment in segments):
            return
        owed = np.zeros(tensor.numel(), np.float64)
        self.feedback.add_to(owed, segments)
        tensor.add_(torch.from_numpy(owed).to(tensor.device, torch.promote_types(tensor.dtype, torch.float32)))
