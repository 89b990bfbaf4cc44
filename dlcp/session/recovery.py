# SPDX-License-Identifier: Apache-2.0
"""Partial-result recovery: ranks that leave DLCP together complete the buckets that some of them have not finished.

The ranks exchange which buckets those are. They complete each of them exactly, in order, over the fallback's channel
(:mod:`dlcp.collectives.partial_result`). If a rank has not reached a bucket yet, the others wait for it. If it does not
reach the bucket in time, it hangs: all ranks report it, and it logs the stacks of its threads.
"""

import faulthandler
import io
import logging
import os
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Final

import numpy as np

from dlcp.collectives.partial_result import PartialResult, RecoveryChannel, UnrecoverableError, recover
from dlcp.inputs.error_text import describe
from dlcp.session.admission import RankAdmission
from dlcp.session.averager import BucketId, BucketProgress, BucketTable, PendingBucket, StepAverager
from dlcp.session.joining import Agreement
from dlcp.transport import Membership, MessageMismatchError, PeerAbortedError, PeerHangsError
from dlcp.transport.messages import at_step

WAIT_SHARE: Final = 0.9
"""A rank waits for its own bucket for this share of the deadline; the rest is for informing the others. Not tuned."""
log = logging.getLogger("dlcp")


class PeerWatch(ABC):
    """How ranks notice that another one has left DLCP or ended, and how they reach each other to recover."""

    def open(self) -> bool:
        """Open :meth:`channel`; all ranks call it. If it returns False, a failure of DLCP is an error."""
        return True

    @abstractmethod
    def channel(self) -> RecoveryChannel:
        """Return the channel that the ranks recover over."""

    @abstractmethod
    def check_peers(self, where: str) -> BaseException | None:
        """Return why this rank should leave DLCP, if others have left it or have ended.

        Parameters
        ----------
        where
            This rank's step and the layers it waits for, for the message.

        Raises
        ------
        RuntimeError
            The others cannot be watched any more.
        """

    @abstractmethod
    def publish_left(self, reason: str) -> None:
        """Announce to the others' :meth:`check_peers` that this rank has left DLCP."""

    def regroup(self, reason: str) -> Agreement | None:
        """Agree with the ranks that are left who goes on, and from then on watch and reach only these.

        Parameters
        ----------
        reason
            Why this rank has left DLCP.

        Returns
        -------
        How the ranks of the next epoch join each other; None if no rank may go on without another.

        Raises
        ------
        RankEndedError
            Too few ranks are left, or the others have gone on without this one.
        """
        return None

    def attend(self, membership: Membership) -> None:  # noqa: B027  # without elastic, the ranks never change
        """Watch and reach these ranks from now on."""

    def newcomers(self) -> RankAdmission | None:
        """Return the ranks that are to be let in; None if there are none."""
        return None

    def lose_server(self, reason: str) -> None:  # noqa: B027  # without elastic, the ranks fall back
        """Let all ranks do without the parameter server from the next epoch on."""

    def let_in_no_more(self, reason: str) -> None:  # noqa: B027  # without elastic, no rank comes later
        """Announce that no ranks are let in from now on, for a reason."""

    def publish_failed(self, reason: str) -> None:  # noqa: B027  # not all watches need it
        """Announce that this rank has failed for good."""

    def close(self) -> None:  # noqa: B027  # not all watches need it
        """Release resources."""


class Recovery:
    """Completes the open buckets of a session whose endpoint has been closed.

    Parameters
    ----------
    averager, table
        The session's; ``table`` has the open buckets.
    payload_bytes
        Size of a packet's payload.
    watch
        How the ranks reach each other.
    ranks
        The ranks that are there.
    """

    def __init__(
        self, averager: StepAverager, table: BucketTable, payload_bytes: int, watch: PeerWatch, ranks: Sequence[int]
    ) -> None:
        self._averager, self._table, self._watch, self._ranks = averager, table, watch, ranks
        self._payload_bytes, self._deadline_s = payload_bytes, averager.options.deadline_s
        self._channel = self._watch.channel()

    def complete_buckets(self, error: BaseException) -> str:
        """Complete every bucket that is open on any rank.

        Parameters
        ----------
        error
            Why this rank has left DLCP.

        Returns
        -------
        Why the ranks have left DLCP, the same text on all of them.

        Raises
        ------
        UnrecoverableError
            A contribution is lost, or the ranks run different models.
        PeerHangsError
            A rank, possibly this one, did not reach a bucket in time; all ranks raise it.
        """
        table = self._table
        with table.changed:
            unfinished = table.unfinished()
            begun = [
                each for each in unfinished if each.progress in (BucketProgress.STARTING, BucketProgress.AVERAGING)
            ]
            routed = [each.id for each in unfinished if each.progress is BucketProgress.BY_FRAMEWORK]
            table.changed.wait_for(lambda: all(each.is_decided for each in begun), self._deadline_s)
            buckets = list(table.buckets.values())
        held = {each.id: partial for each in buckets if (partial := _held(each)) is not None}
        hopeless, secondhand = isinstance(error, MessageMismatchError), isinstance(error, PeerAbortedError)
        views = self._channel.gather(([each.id for each in begun], routed, hopeless, secondhand, describe(error)))
        for _, _, hopeless, _, reason in views.values():
            if hopeless:
                raise UnrecoverableError(reason)
        for which in sorted({tuple(which) for unfinished, *_ in views.values() for which in unfinished}):
            self._complete(which, held)
        for which in sorted({tuple(which) for _, routed, *_ in views.values() for which in routed}):
            self._wait_for_all(which)  # the framework completes it, but only once all ranks have reached it
        # A rank that left only because another one did knows less about the cause, so its reason counts last.
        return str(min((secondhand, rank, reason) for rank, (_, _, _, secondhand, reason) in views.items())[2])

    def _complete(self, which: BucketId, held: dict[BucketId, PartialResult]) -> None:
        averager, mine = self._averager, held.get(which)
        pending = self._wait_for_all(which)
        if pending and pending.run is None:
            mine = self._untouched(pending)
        rank = averager.membership.rank
        recovered = recover(self._channel, rank, self._ranks, mine, finished=pending is None)
        if pending and pending.bucket and recovered:
            pending.bucket.values[:] = pending.bucket.value_type.narrow(recovered.values)
            if recovered.residual is not None and averager.options.error_feedback:
                averager.feedback.add(recovered.residual, pending.segments)
            pending.average, pending.run = pending.bucket.values.copy(), None  # the run holds no average of all
            self._table.finish(pending)

    def _untouched(self, pending: PendingBucket) -> PartialResult:
        """Return the partial result of a bucket that has not reached the reducer: contribution and residual."""
        averager, bucket = self._averager, pending.bucket
        assert bucket
        values = bucket.value_type.widen(bucket.values).copy()
        averager.feedback.apply(values, pending.segments)
        per_packet = self._payload_bytes // bucket.values.itemsize
        return PartialResult.untouched(averager.membership.rank, values, per_packet)

    def _wait_for_all(self, which: BucketId) -> PendingBucket | None:
        """Wait until all ranks have reached a bucket; return this rank's, or None if it has finished it."""
        rank, (step, sequence) = self._averager.membership.rank, which
        pending, absent = None, ""
        try:
            pending = self._table.wait_for(which, WAIT_SHARE * self._deadline_s)
        except TimeoutError:
            absent = f"rank {rank}"
            log.error(
                "DLCP: rank %d hangs before bucket %d of step %d, which other ranks have reached. Its threads:\n%s",
                *(rank, sequence, step, hang_report()),
            )
        reports = self._channel.gather(absent)
        if missing := ", ".join(filter(None, reports.values())):
            where = at_step(self._averager.options.job, step)
            raise PeerHangsError(
                f"{where}: {missing} answers but has not reached bucket {sequence}, "
                f"{WAIT_SHARE * self._deadline_s:g} s after others left DLCP over it; its log says where it hangs",
                is_this_rank=bool(absent),
            )
        return pending


def _held(pending: PendingBucket) -> PartialResult | None:
    """Return what this rank holds of a bucket, if anything of use."""
    partial = pending.run.partial_result() if pending.run is not None else None
    if pending.average is None:
        return partial
    assert pending.bucket
    average = pending.bucket.value_type.widen(pending.average)
    if partial is None:
        return PartialResult.of_average(average)
    return replace(partial, values=average, final=np.ones_like(partial.final))


_NO_FILE: Final = (AttributeError, OSError, ValueError, RuntimeError, io.UnsupportedOperation)
"""Errors raised if standard error is closed, or not a file of the operating system."""


def hang_report() -> str:
    """Return the stacks of all threads except the calling one, as text, with the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(found)


class HangWatchdog:
    """Context manager that prints the stacks of all threads if no thread calls :meth:`postpone` in time.

    That happens if a thread holds Python's global lock (GIL) in a C call that does not return. :mod:`faulthandler`
    prints the stacks from C. It does so only if the user or ``dlcp train`` has enabled it, because a process has only
    one such timer.

    Parameters
    ----------
    after_s
        Time from the last :meth:`postpone` until the stacks are printed, in seconds.
    """

    _timer: ClassVar = threading.Lock()
    _running: ClassVar = 0

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s

    def __enter__(self) -> "HangWatchdog":
        HangWatchdog._running += 1
        self.postpone()
        return self

    def postpone(self) -> None:
        """Restart the timer."""
        if faulthandler.is_enabled():
            with self._timer, suppress(*_NO_FILE):
                faulthandler.dump_traceback_later(self._after_s, file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        HangWatchdog._running -= 1
        if faulthandler.is_enabled():
            faulthandler.cancel_dump_traceback_later()

    @classmethod
    def before_fork(cls) -> None:
        """Stop the timer: a forked child lacks its thread, for which Python's finalization would wait forever."""
        cls._timer.acquire()
        if cls._running and faulthandler.is_enabled():
            faulthandler.cancel_dump_traceback_later()


os.register_at_fork(
    before=HangWatchdog.before_fork,
    after_in_parent=HangWatchdog._timer.release,
    after_in_child=HangWatchdog._timer.release,
)
