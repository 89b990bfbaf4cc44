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
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Final

from dlcp.arms import Route
from dlcp.collectives.partial_result import PartialResult, UnrecoverableError, recover
from dlcp.error_text import describe
from dlcp.transport import MessageMismatchError, PeerAbortedError, PeerHangsError
from dlcp.transport.messages import at_step

if TYPE_CHECKING:
    from dlcp.session.session import BucketId, PendingBucket, TrainingSession

WAIT_SHARE: Final = 0.9
"""A rank waits for its own bucket for this share of the deadline; the rest is for telling the others. Not tuned."""
log = logging.getLogger("dlcp")


class Recovery:
    """Completes the open buckets of a session whose endpoint has been closed."""

    def __init__(self, session: "TrainingSession") -> None:
        assert session.fallback.watch
        self._session, self._watch = session, session.fallback.watch
        self._deadline_s = session.options.deadline_s
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
        session, table = self._session, self._session.table
        self._watch.publish_left(describe(error))
        with table.changed:
            begun = {which: pending for which, pending in table.pending.items() if pending.reducing}
            routed = [which for which, pending in table.pending.items() if pending.route is Route.FRAMEWORK]
        for pending in begun.values():
            pending.decided.wait(self._deadline_s)
        held = {(partial.step, partial.sequence): partial for partial in session.averager.partial_results()}
        hopeless, secondhand = isinstance(error, MessageMismatchError), isinstance(error, PeerAbortedError)
        views = self._channel.gather((sorted(begun), sorted(routed), hopeless, secondhand, describe(error)))
        for _, _, hopeless, _, reason in views.values():
            if hopeless:
                raise UnrecoverableError(reason)
        for which in sorted({tuple(which) for unfinished, *_ in views.values() for which in unfinished}):
            self._complete(which, held)
        for which in sorted({tuple(which) for _, routed, *_ in views.values() for which in routed}):
            self._wait_for_all(which)  # the framework completes it, but only once all ranks have reached it
        # A rank that left only because another one did knows less about the cause, so its reason counts last.
        return str(min((secondhand, rank, reason) for rank, (_, _, _, secondhand, reason) in views.items())[2])

    def _complete(self, which: "BucketId", held: "dict[BucketId, PartialResult]") -> None:
        session, mine = self._session, held.get(which)
        pending = self._wait_for_all(which)
        if pending and not pending.reducing:
            mine = self._untouched(pending)
        recovered = recover(self._channel, session.rank, session.ranks, mine, finished=pending is None)
        if pending and pending.bucket and recovered:
            pending.bucket.values[:] = pending.bucket.value_type.narrow(recovered.values)
            if recovered.residual is not None and session.options.error_feedback:
                session.averager.feedback.add(recovered.residual, pending.segments)
            session.table.finish(pending)

    def _untouched(self, pending: "PendingBucket") -> PartialResult:
        """Return the partial result of a bucket that has not reached the reducer: contribution and residual."""
        session, bucket = self._session, pending.bucket
        assert bucket
        assert session.endpoint
        values = bucket.value_type.widen(bucket.values).copy()
        session.averager.feedback.apply(values, pending.segments)
        per_packet = session.endpoint.connection.options.payload_bytes // bucket.values.itemsize
        return PartialResult.untouched(session.rank, *pending.id, values, per_packet)

    def _wait_for_all(self, which: "BucketId") -> "PendingBucket | None":
        """Wait until all ranks have reached a bucket; return this rank's, or None if it has finished it."""
        rank, (step, sequence) = self._session.rank, which
        pending, absent = None, ""
        try:
            pending = self._session.table.wait_for(which, WAIT_SHARE * self._deadline_s)
        except TimeoutError:
            absent = f"rank {rank}"
            log.error(
                "DLCP: rank %d hangs before bucket %d of step %d, which other ranks have reached. Its threads:\n%s",
                *(rank, sequence, step, hang_report()),
            )
        reports = self._channel.gather(absent)
        if missing := ", ".join(filter(None, reports.values())):
            raise PeerHangsError(
                f"{at_step(self._session.options.job, step)}: {missing} answers but has not reached bucket {sequence}, "
                f"{WAIT_SHARE * self._deadline_s:g} s after others left DLCP over it; its log says where it hangs"
            )
        return pending


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
