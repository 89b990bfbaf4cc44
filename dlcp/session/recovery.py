# SPDX-License-Identifier: Apache-2.0
"""Partial-result recovery: ranks that leave DLCP complete together the buckets that some of them have not finished.

The ranks publish which buckets those are. Each is completed exactly (:mod:`dlcp.collectives.partial_result`), in
order, over the fallback's channel, and a rank that has not come to one of them yet is waited for. If it does not come,
it hangs: all ranks name it, and it says where its threads are.
"""

import logging
from typing import TYPE_CHECKING, Final

from dlcp.collectives.partial_result import PartialResult, UnrecoverableError, recover
from dlcp.error_text import describe
from dlcp.session.stacks import where_threads_are
from dlcp.transport import MessageMismatchError, PeerAbortedError, PeerHangsError
from dlcp.transport.errors import at_step

if TYPE_CHECKING:
    from dlcp.session.session import BucketId, PendingBucket, TrainingSession

WAIT_SHARE: Final = 0.9
"""For so much of the deadline a rank waits for its own bucket; the rest is for telling the others. Chosen by us."""
log = logging.getLogger("dlcp")


class Recovery:
    """Completes the buckets of one session, whose endpoint is closed."""

    def __init__(self, session: "TrainingSession") -> None:
        assert session.fallback.watch
        self._session, self._watch = session, session.fallback.watch
        self._deadline_s = session.options.deadline_s
        self._channel = self._watch.channel()

    def complete_buckets(self, error: BaseException) -> str:
        """Complete what is open on any rank; return why the ranks have left DLCP, the same on all of them.

        Raises
        ------
        UnrecoverableError
            A contribution is lost, or the ranks run different models.
        PeerHangsError
            A rank, which may be this one, has not come to a bucket in time; all ranks raise it.
        """
        session, table = self._session, self._session.table
        self._watch.publish_left(describe(error))
        with table.changed:
            begun = {which: pending for which, pending in table.pending.items() if pending.reducing}
        for pending in begun.values():
            pending.decided.wait(self._deadline_s)
        held = {(partial.step, partial.sequence): partial for partial in session.averager.partial_results()}
        hopeless, secondhand = isinstance(error, MessageMismatchError), isinstance(error, PeerAbortedError)
        views = self._channel.gather((sorted(begun), hopeless, secondhand, describe(error)))
        for _, hopeless, _, reason in views.values():
            if hopeless:
                raise UnrecoverableError(reason)
        for which in sorted({tuple(which) for unfinished, *_ in views.values() for which in unfinished}):
            self._complete(which, held)
        # A rank that left only because another one did knows less about the cause than that one.
        return str(min((secondhand, rank, reason) for rank, (_, _, secondhand, reason) in views.items())[2])

    def _complete(self, which: "BucketId", held: "dict[BucketId, PartialResult]") -> None:
        session, mine = self._session, held.get(which)
        pending = self._wait_for_all(which)
        if pending and not pending.reducing:
            mine = self._untouched(pending)
        recovered = recover(self._channel, session.rank, session.ranks, mine, finished=pending is None)
        if pending and pending.bucket and recovered:
            pending.bucket.values[:] = pending.bucket.value_type.narrow(recovered.values)
            if recovered.residual is not None and session.options.error_feedback:
                session.feedback.add(recovered.residual, pending.segments)
            session.table.finish(pending)

    def _untouched(self, pending: "PendingBucket") -> PartialResult:
        """Return what this rank holds of a bucket that the reducer has not got: its contribution, residual included."""
        session, bucket = self._session, pending.bucket
        assert bucket
        assert session.endpoint
        values = bucket.value_type.widen(bucket.values).copy()
        session.feedback.apply(values, pending.segments)
        per_packet = session.endpoint.connection.options.payload_bytes // bucket.values.itemsize
        return PartialResult.untouched(session.rank, *pending.id, values, per_packet)

    def _wait_for_all(self, which: "BucketId") -> "PendingBucket | None":
        """Return a bucket once all ranks have come to it; None if this rank has finished it."""
        rank, (step, sequence) = self._session.rank, which
        pending, absent = None, ""
        try:
            pending = self._session.table.wait_for(which, WAIT_SHARE * self._deadline_s)
        except TimeoutError:
            absent = f"rank {rank}"
            log.error(
                "DLCP: rank %d hangs before bucket %d of step %d, to which others have come. Its threads are here:\n%s",
                *(rank, sequence, step, where_threads_are()),
            )
        told = self._channel.gather(absent)
        if missing := ", ".join(filter(None, told.values())):
            raise PeerHangsError(
                f"{at_step(self._session.options.job, step)}: {missing} answers but has not come to bucket {sequence}, "
                f"{WAIT_SHARE * self._deadline_s:g} s after others have left DLCP over it; its log says where it hangs"
            )
        return pending
