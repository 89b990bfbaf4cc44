# SPDX-License-Identifier: Apache-2.0
"""Buckets are averaged with DLCP while that works, and over the framework's own all-reduce ever after.

When an exchange fails, every rank leaves DLCP at the same bucket. The ranks agree, over a Gloo group kept for this, on
the buckets that some of them have not finished; each of those is completed exactly (:mod:`dlcp.collectives.salvage`),
in order, waiting for ranks whose backward pass has not come so far; from the next one on the framework is asked.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dlcp.collectives import Bucket, ErrorFeedback
from dlcp.collectives.choice import Reducer, Salvageable
from dlcp.collectives.salvage import Recovered, Salvage, UnsalvageableError, recover
from dlcp.dtypes import ValueType
from dlcp.group.agreement import Agreement
from dlcp.tags import Segment
from dlcp.torch.staging import VALUE_TYPES, Staged, Stager, stager_for
from dlcp.transport import DeadlineError, Endpoint, MessageMismatchError, PeerAbortedError, TransportError

log = logging.getLogger("dlcp")

LEFT: Final = "left"
"""The topic on which ranks tell that they have left DLCP."""
WATCH_S: Final = 0.25
"""How often a rank looks whether another has left DLCP: it may wait for that one elsewhere. Chosen by us."""


class Mode(Enum):
    """Who averages."""

    DLCP = "DLCP"
    RECOVERING = "on the way to the framework's all-reduce"
    FRAMEWORK = "the framework's all-reduce"
    FAILED = "nobody"


@dataclass(slots=True, eq=False)
class _Handed:
    """A bucket that the framework has handed over and waits for."""

    ordinal: int
    step: int
    sequence: int
    segments: Sequence[Segment]
    staged: Staged | None = None
    started: bool = False
    here: threading.Event = field(default_factory=threading.Event)

    @property
    def label(self) -> str:
        """Its layers, for error messages."""
        return f"{self.segments[0].layer.name}..{self.segments[-1].layer.name}"


class GroupChannel:
    """A process group as a channel to recover over.

    Parameters
    ----------
    group
        A Gloo group of the same ranks; used by nobody else.
    rank
        This rank, as the others know it.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.group = group
        self.rank = rank

    def gather(self, item: Any) -> dict[int, Any]:
        """Return what every rank gave, by rank."""
        told: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, (self.rank, item), group=self.group)
        return dict(told)

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over all ranks."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        dist.all_reduce(tensor, group=self.group)
        total: NDArray[Any] = tensor.numpy()
        return total

    def close(self) -> None:
        """Give the group up."""
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # it ended with the default group
            dist.destroy_process_group(self.group)


def open_channel(group: dist.ProcessGroup | None, deadline_s: float) -> GroupChannel | None:
    """Make a Gloo group of the same ranks; all must call it. None, and a warning, if that cannot be done."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    some = len(ranks) < dist.get_world_size()
    wait = timedelta(seconds=deadline_s)
    try:
        made = dist.new_group(ranks, timeout=wait, backend="gloo", use_local_synchronization=some)
    except (RuntimeError, ValueError) as problem:
        log.warning("DLCP has no Gloo group to recover over, so that a failure will be an error: %s", problem)
        return None
    return GroupChannel(made, dist.get_rank(group))


def framework_average(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
    """Average a tensor in place over a group, as DDP does without a hook."""
    tensor.div_(dist.get_world_size(group))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return averaged


class Exchange:
    """Averages the buckets of one model.

    Parameters
    ----------
    group
        The model's process group; its all-reduce is what is fallen back to.
    rank, contributors
        This rank, and all whose gradients are averaged.
    feedback
        What is owed from before.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        contributors: Sequence[int],
        feedback: ErrorFeedback,
    ) -> None:
        self.group, self.rank, self.contributors = group, rank, contributors
        self.feedback = feedback
        self._stagers: dict[torch.device, Stager] = {}
        self.mode = Mode.FRAMEWORK
        self.reason = ""
        self.deadline_s = 0.0
        self._endpoint: Endpoint | None = None
        self._reducer: Reducer | None = None
        self._salvageable: Salvageable | None = None
        self._channel: GroupChannel | None = None
        self._agreement: Agreement | None = None
        self._changed = threading.Condition()
        self._open: dict[int, _Handed] = {}
        self._names: dict[int, tuple[int, int]] = {}
        self._count = 0
        self._error: TransportError | None = None
        self._recovery: threading.Thread | None = None
        self._closed = threading.Event()

    def use(
        self,
        endpoint: Endpoint,
        reducer: Reducer,
        channel: GroupChannel | None,
        agreement: Agreement,
        deadline_s: float,
    ) -> None:
        """Average with DLCP from now on.

        Parameters
        ----------
        reducer
            What averages; a failure of one that is not :class:`Salvageable` is an error.
        channel
            What to recover over; None to let a failure be an error.
        agreement
            Where ranks say that they have left DLCP.
        deadline_s
            How long a rank that has failed waits for another.
        """
        self._endpoint, self._reducer, self._channel = endpoint, reducer, channel
        self._agreement, self.deadline_s = agreement, deadline_s
        self.mode = Mode.DLCP
        self._salvageable = reducer if isinstance(reducer, Salvageable) else None
        if channel and self._salvageable:
            threading.Thread(target=self._watch, name="dlcp-watch", daemon=True).start()

    def do_without(self, reason: str) -> None:
        """Average over the framework, because of ``reason``."""
        self.mode, self.reason = Mode.FRAMEWORK, reason

    def average(
        self,
        tensor: torch.Tensor,
        step: int,
        sequence: int,
        segments: Sequence[Segment],
        on_averaged: Callable[[], None],
    ) -> "torch.futures.Future[torch.Tensor]":
        """Average a flat tensor over all ranks; every rank hands in the same ones in the same order."""
        with self._changed:
            if self.mode is Mode.FRAMEWORK:
                self._pay(tensor, segments)
                return framework_average(self.group, tensor)
            if self._error:
                failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                failed.set_exception(self._error)  # type: ignore[arg-type]  # annotated as a result
                return failed
            handed = _Handed(self._count, step, sequence, segments)
            self._count += 1
            self._open[handed.ordinal] = handed
            if sequence == 0:
                self._names = {ordinal: name for ordinal, name in self._names.items() if name[0] >= step - 1}
            self._names[handed.ordinal] = step, sequence
            self._changed.notify_all()
        per_packet = self._values_per_packet(VALUE_TYPES[tensor.dtype])
        if tensor.device not in self._stagers:
            self._stagers[tensor.device] = stager_for(tensor.device)
        stager = self._stagers[tensor.device]
        return stager.stage(tensor, per_packet, partial(self._on_host, handed, on_averaged)).answer

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        with self._changed:
            self._closed.set()
            recovery = self._recovery
        if recovery:
            recovery.join(self.deadline_s)
        if self._endpoint:
            self._endpoint.close(reason)
        if self._channel:
            self._channel.close()
        for stager in self._stagers.values():
            stager.close()

    def _on_host(self, handed: _Handed, on_averaged: Callable[[], None], staged: Staged) -> None:
        handed.staged = staged
        with self._changed:
            handed.started = self.mode is Mode.DLCP
            if not handed.started:
                handed.here.set()
                self._changed.notify_all()
                if self._error:
                    staged.fail(self._error)
                return
        assert self._reducer
        try:
            bucket = Bucket(staged.array, staged.value_type, handed.segments)
            if staged.magnitudes is not None:
                bucket.magnitudes = staged.magnitudes
            if handed.sequence == 0:
                self._reducer.begin_step(handed.step)
            averaged = self._reducer.start(handed.step, handed.sequence, bucket)
        except Exception as error:
            handed.started = False
            handed.here.set()
            self._leave(error)
            return
        handed.here.set()
        averaged.add_done_callback(partial(self._on_averaged, handed, on_averaged))

    def _on_averaged(self, handed: _Handed, on_averaged: Callable[[], None], done: "Future[Any]") -> None:
        error = done.exception()
        if error is not None:
            self._leave(error)
            return
        with self._changed:
            del self._open[handed.ordinal]
        on_averaged()
        assert handed.staged
        handed.staged.give_back()

    def _watch(self) -> None:
        """Leave DLCP when another rank has, even if this one waits for nothing just now."""
        assert self._agreement
        while self.mode is Mode.DLCP and not self._closed.wait(WATCH_S):
            try:
                if self._agreement.anyone_told(LEFT):
                    self._leave(PeerAbortedError("another rank has left DLCP"))
            except RuntimeError as error:  # the store has ended, and with it the job
                log.debug("the store does not answer: %s", error)
                return

    # When DLCP fails --------------------------------------------------------------------------------------------------

    def _leave(self, error: BaseException) -> None:
        with self._changed:
            if self.mode is not Mode.DLCP:
                return
            self.mode = Mode.RECOVERING
            self._recovery = threading.Thread(target=self._recover, args=(error,), name="dlcp-recovery", daemon=True)
            self._recovery.start()  # under the lock, for close joins what it finds

    def _recover(self, error: BaseException) -> None:
        assert self._endpoint
        try:
            self._endpoint.close(str(error))  # nothing is written into any bucket after this
            if self._channel and self._salvageable:
                self._recover_over(self._channel, self._salvageable, error)
            else:
                self._give_up(str(error))
        except Exception as problem:
            log.debug("recovery failed", exc_info=True)
            self._give_up(f"{error}; and the framework cannot take over: {problem}{self._absent()}")

    def _recover_over(self, channel: GroupChannel, reducer: Salvageable, error: BaseException) -> None:
        assert self._agreement
        self._agreement.tell(LEFT, str(error))
        with self._changed:
            unfinished, count = list(self._open.values()), self._count
        for handed in unfinished:
            handed.here.wait(self.deadline_s)
        held = {(salvage.step, salvage.sequence): salvage for salvage in reducer.salvage()}
        first = min((handed.ordinal for handed in unfinished), default=count)
        hopeless = isinstance(error, MessageMismatchError)
        told = channel.gather((first, count, str(error), hopeless, isinstance(error, PeerAbortedError)))
        for _, _, text, hopeless, _ in told.values():
            if hopeless:
                raise UnsalvageableError(text)
        last = max(count for _, count, *_ in told.values())
        for ordinal in range(min(first for first, *_ in told.values()), last):
            self._complete(channel, ordinal, held)
        # Whoever only heard that another gave up knows less.
        reason = min(((aborted, rank, text) for rank, (_, _, text, _, aborted) in told.items()))[2]
        self._hand_over(reason, *self._names.get(last - 1, (0, 0)))

    def _complete(self, channel: GroupChannel, ordinal: int, held: dict[tuple[int, int], Salvage]) -> None:
        handed = self._wait_for(ordinal)
        mine = held.get(self._names.get(ordinal, (-1, -1)))
        if handed and handed.staged and not handed.started:
            staged, value_type = handed.staged, handed.staged.value_type
            values = value_type.widen(staged.array).copy()
            self.feedback.add_to(values, handed.segments)
            per_packet = self._values_per_packet(value_type)
            mine = Salvage.untouched(self.rank, handed.step, handed.sequence, values, per_packet)
        recovered = recover(channel, self.rank, self.contributors, mine, finished=handed is None)
        if handed and handed.staged and recovered:
            self._finish(handed, handed.staged, recovered)

    def _finish(self, handed: _Handed, staged: Staged, recovered: Recovered) -> None:
        staged.array[:] = staged.value_type.narrow(recovered.values)
        if recovered.owed is not None:
            self.feedback.owe(recovered.owed, handed.segments)
        with self._changed:
            del self._open[handed.ordinal]
        staged.give_back()

    def _wait_for(self, ordinal: int) -> _Handed | None:
        """Return a bucket, once the framework has handed it over; None if this rank has finished it."""
        end_s = time.monotonic() + self.deadline_s
        with self._changed:
            while ordinal >= self._count:
                if not self._changed.wait(max(0.0, end_s - time.monotonic())):
                    raise DeadlineError(
                        f"rank {self.rank} did not come to bucket {ordinal}, as another has, in {self.deadline_s:.0f} s"
                    )
            handed = self._open.get(ordinal)
        if handed and not handed.here.wait(max(0.0, end_s - time.monotonic())):
            raise DeadlineError(f"{handed.label} did not come from the device in {self.deadline_s:.0f} s")
        return handed

    def _hand_over(self, reason: str, step: int, sequence: int) -> None:
        """Let the framework average from here on, first what has been handed over since."""
        with self._changed:
            while not all(handed.here.is_set() for handed in self._open.values()):
                if not self._changed.wait(self.deadline_s):
                    raise DeadlineError(f"gradients did not come from the device in {self.deadline_s:.0f} s")
            for handed in sorted(self._open.values(), key=lambda handed: handed.ordinal):
                assert handed.staged
                handed.staged.pass_on(partial(self._pay_and_average, handed.segments))
            self._open.clear()
            self.mode, self.reason = Mode.FRAMEWORK, reason
        if self.rank == min(self.contributors):
            log.warning(
                "DLCP is off after step %d, bucket %d: %s. Training goes on over the framework's own all-reduce, "
                "with the gradients of that step.",
                step,
                sequence,
                reason,
            )

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

    def _give_up(self, message: str) -> None:
        self._error = TransportError(message)
        with self._changed:
            self.mode, self.reason = Mode.FAILED, message
            failed = list(self._open.values())
            self._open.clear()
            self._changed.notify_all()
        for handed in failed:
            if handed.staged:
                handed.staged.fail(self._error)

    def _absent(self) -> str:
        """Say which ranks have not left DLCP, and so have probably ended; as far as the store can tell."""
        assert self._agreement
        with contextlib.suppress(RuntimeError):
            absent = [rank for rank in self.contributors if not self._agreement.told(LEFT, [rank])]
            if absent:
                return f" (not there: {', '.join(f'rank {rank}' for rank in absent)})"
        return ""

    def _values_per_packet(self, value_type: ValueType) -> int:
        assert self._endpoint
        return self._endpoint.options.payload_bytes // value_type.storage.itemsize
