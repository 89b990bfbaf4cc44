# SPDX-License-Identifier: Apache-2.0
"""How new ranks get into a session that trains.

All ranks, old and new, join each other as the session's next epoch, while the old ones train on in the present one.
Then the lowest old rank chooses the first step of the new epoch, two ahead of its own. It contributes to the step
before only once all old ranks know the choice. No rank can complete that step without its contribution, so none begins
the chosen one unprepared. In the usual case nobody waits.

The old epoch's endpoints stay open until the chosen step is complete: until then, another rank may lack averages of the
step before. If a rank ends meanwhile, the old ranks go on without it and without the new ones.
"""

import ctypes
import gc
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dlcp.collectives import Reducer
from dlcp.session.averager import BucketTable
from dlcp.session.joining import Agreement, Joined
from dlcp.transport import DeadlineError, RankEndedError

if TYPE_CHECKING:  # only groups have these: gRPC serves their store
    from dlcp.session.division import Division
    from dlcp.session.store import Store, StoreChannel

log = logging.getLogger("dlcp")

CANCELLED: Final = "the new ranks have not been let in, because ranks have ended"
"""Why ranks leave the endpoints of an epoch that never began."""


def folder_of(epoch: int) -> str:
    """Return the prefix of the keys that ranks write in an epoch, or in order to begin it."""
    return f"epoch-{epoch}"


class RankAdmission:
    """New ranks on their way into a session, as one rank sees it.

    Parameters
    ----------
    store
        The group's store.
    agreement
        How all ranks join each other as the next epoch.
    old, new
        The ranks of the present epoch, and those that are let in.
    over
        Keys of the store. One of them gets a value when an old rank ends, or when the old ranks leave this epoch.
    division
        Who divides the data of each step.
    deadline_s
        How long old ranks wait for each other, in seconds.
    state_channel
        Of the lowest rank and the new ones, for the state where they have no path to each other.

    Attributes
    ----------
    first_step
        The first step of the next epoch, or one that is no training step shortly before it; None while it is not
        chosen.
    joined
        The next epoch's endpoint and addresses; None before the ranks have joined.
    former
        The present epoch's, once the next has begun on an old rank.
    is_agreed, has_begun
        Whether all old ranks know the first step; whether the next epoch has begun on this rank.
    """

    def __init__(
        self,
        store: "Store",
        agreement: Agreement,
        old: Sequence[int],
        new: Sequence[int],
        over: Sequence[str],
        division: "Division",
        deadline_s: float,
        state_channel: "StoreChannel",
    ) -> None:
        self.state_channel = state_channel
        self.agreement, self.old, self.new = agreement, tuple(old), tuple(new)
        self.first_step: int | None = None
        self.joined: Joined | None = None
        self.former: tuple[Joined, Reducer] | None = None
        self.is_agreed = self.has_begun = False
        self._ahead = 0
        self._store, self._over, self._division, self._deadline_s = store, over, division, deadline_s
        self._prefix = f"{folder_of(agreement.membership.epoch)}/admission"

    @property
    def is_lowest(self) -> bool:
        """Whether this rank chooses the step, and has the state for the new ranks."""
        return self.agreement.rank == self.old[0]

    def agree(self, table: BucketTable) -> None:
        """Agree with the other old ranks on :attr:`first_step`.

        Parameters
        ----------
        table
            Has the step in progress.

        Raises
        ------
        RankEndedError
            An old rank has ended, or has left this epoch.
        DeadlineError
            An old rank does not answer.
        """
        rank = self.agreement.rank
        if self.is_lowest:
            with table.changed:  # no step begins meanwhile
                self._choose(table.step + 2 + self._division.ahead)
            self.publish("first step", str(self.first_step))
            for other in self.old[1:]:
                self.wait_for(f"knows/{other}")
        else:
            self._choose(int(self.wait_for("first step")))
            self.publish(f"knows/{rank}", "")
        self.is_agreed = True

    def _choose(self, first_step: int) -> None:
        self.first_step, self._ahead = first_step, self._division.ahead
        if self._division.drawn > first_step:
            log.warning(
                "DLCP: rank %d has drawn data for step %d, from which on ranks %s take part: some of it is used twice",
                *(self.agreement.rank, self._division.drawn - 1, list(self.new)),
            )
        self._division.change(first_step, self.agreement.membership.ranks)

    def must_agree(self, step: int) -> bool:
        """Return whether this rank may not begin a step before all others know the first one with new ranks.

        They may draw data for the first step as soon as this rank has contributed to an earlier one.
        """
        late = self.first_step is not None and step >= self.first_step - 1 - self._ahead
        return late and self.is_lowest and not self.is_agreed

    def publish(self, name: str, value: str) -> None:
        """Write a value for the ranks that are concerned."""
        self._store.set(f"{self._prefix}/{name}", value)

    def wait_for(self, name: str, *, as_long_as_they_live: bool = False) -> bytes:
        """Wait for such a value.

        Parameters
        ----------
        as_long_as_they_live
            Wait for as long as no old rank ends, because it depends on how long their steps take.

        Raises
        ------
        RankEndedError, DeadlineError
            See :meth:`agree`.
        """
        key, found = f"{self._prefix}/{name}", None
        while found is None:
            found = self._store.first([key, *self._over], self._deadline_s)
            if found is None and not as_long_as_they_live:
                raise DeadlineError(f"ranks {list(self.new)} cannot join: no {name!r} in {self._deadline_s:g} s")
        if found[0] != key:
            raise RankEndedError(f"{CANCELLED}: {found[0]}: {found[1].decode()}")
        return found[1]

    def begin(self, former: tuple[Joined, Reducer]) -> Joined:
        """Note that the next epoch begins on this rank; return what it has joined."""
        assert self.joined
        self.former, self.has_begun = former, True
        return self.joined

    def complete(self) -> None:
        """Leave the former epoch, in a thread: no rank needs this one's packets of it any more."""
        if self.former:
            threading.Thread(target=self._end_former, name="dlcp-former-epoch", daemon=True).start()

    def _end_former(self) -> None:
        self.close()
        collect_epoch()

    def close(self, reason: str | None = None) -> None:
        """Leave the epoch that does not average: the former one, or the next if that has not begun."""
        if self.former:
            joined, reducer = self.former
            joined.close(reason)
            reducer.close()
        elif self.joined:
            self.joined.close(reason or CANCELLED)


def collect_epoch() -> None:
    """Free the memory of an epoch that has ended, in a thread of its own: its objects refer to each other.

    Python's own collection of such garbage may be many epochs away, and each has buffers of the size of the gradients.
    The C library, too, gives memory back only if asked, where later allocations lie behind it.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)
