# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group watch each other through its store, and who takes part when ranks end or come.

Who takes part is decided in the store, by a sequence of numbered decisions. Each either lets the ranks that are left go
on without others (:meth:`StoreWatch.regroup`), or lets new ranks in (:meth:`StoreWatch.newcomers`). There is one store,
so two groups of survivors never both go on: a rank that cannot reach it ends. The number of a decision is that of the
epoch that follows from it. If new ranks could not join after all, none does, and the number is skipped.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from numpy.typing import NDArray

from dlcp.collectives import Residual
from dlcp.session.admission import RankAdmission, folder_of
from dlcp.session.averager import PendingBucket
from dlcp.session.division import Division
from dlcp.session.joining import Agreement, NotJoinedError
from dlcp.session.options import Options
from dlcp.session.recovery import PeerWatch
from dlcp.session.store import ANSWER_S, BEAT_S, Store, StoreChannel, StoreError, ended_key
from dlcp.session.training_session import LEFT, Fallback
from dlcp.transport import Address, Membership, PeerAbortedError, RankEndedError

log = logging.getLogger("dlcp")

REGROUP_POLL_S: Final = 0.02
"""Interval in which survivors look who else has come to go on; a look takes a few queries of the store."""
APPLY_POLL_S: Final = 0.5
"""Interval in which a rank that wants to take part looks whether there is still a rank to let it in."""
CLOSED: Final = "it has left the group"
"""The reason that a rank leaves in the store when it closes its group normally."""
FALLEN_BACK: Final = "fallen back"
"""The key under which ranks write why they average without DLCP: then nobody can join them."""
SERVER_LOST: Final = "server lost"
"""The key under which a rank writes why the parameter server is lost; the next decision is to do without it."""
EPOCHS_KEPT: Final = 2
"""The store keeps what ranks have written in this many epochs before the present one."""
NEW: Final = "new"
"""The answer of a rank that has joined, but has not completed a step yet: it cannot go on with the others."""


def _coming_key(epoch: int, rank: int) -> str:
    """Return the key that a rank writes to go on in an epoch, once it has left those before."""
    return f"{folder_of(epoch)}/comes/{rank}"


@dataclass(frozen=True, slots=True)
class Decision:
    """Who takes part from now on.

    Parameters
    ----------
    ranks
        All ranks.
    new
        Those of them that join; none if ranks go on without others.
    applications
        How many applications have been decided on.
    drawn
        If ranks go on without others: the first step for which none of them has drawn data.
    without_server
        Whether they do without the parameter server of the options.
    """

    ranks: tuple[int, ...]
    new: tuple[int, ...] = ()
    applications: int = 0
    drawn: int = 0
    without_server: bool = False

    @classmethod
    def from_json(cls, text: bytes) -> "Decision":
        """Return the decision that :meth:`to_json` has written."""
        read = json.loads(text)
        return cls(**read | {"ranks": tuple(read["ranks"]), "new": tuple(read["new"])})

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))


class StoreWatch(PeerWatch):
    """Watches the other ranks through the group's store, and recovers over it.

    Parameters
    ----------
    store
        The ranks' store. It records when a rank has ended.
    membership
        The ranks.
    options
        The session's options.
    master
        The address of the store.
    division
        Who divides the data of each step.
    is_new
        Whether this rank joins others that have begun.

    Attributes
    ----------
    is_new
        The same, until it has completed a step.
    division
        The same.
    """

    def __init__(
        self,
        store: Store,
        membership: Membership,
        options: Options,
        master: Address | None,
        division: Division,
        *,
        is_new: bool = False,
    ) -> None:
        self._store, self._options, self._master = store, options, master
        self.is_new = is_new
        self._is_cut_off = False
        """Whether the store has not answered."""
        self.division = division
        self._decisions = membership.epoch
        self._applications = 0
        self._without_server = False
        self._cleared = 0
        """The first epoch whose keys are still in the store."""
        self._closing = threading.Event()
        self._beating: threading.Thread | None = None
        # Of a rank that applies: the next decision, the place of the next application, and who takes part so far.
        self._next, self._place, self._there, self._founders = 0, 0, membership.ranks, 0
        self._attending = threading.Condition()
        self.attend(membership)

    def attend(self, membership: Membership) -> None:
        """Watch and reach these ranks from now on."""
        with self._attending:
            self._membership = membership
            self._others = [ended_key(other) for other in membership.ranks if other != membership.rank]
            self._over = self._lefts()
            self._channels: dict[str, StoreChannel] = {}
            self._attending.notify_all()

    def _lefts(self) -> list[str]:
        # Ranks that have agreed to let others in may differ for one step in which epoch they are.
        return [f"{LEFT}/{epoch}" for epoch in sorted({self._membership.epoch, self._decisions})]

    def channel(self, topic: str = "recovery") -> StoreChannel:
        """Return this rank's channel named ``topic``."""
        with self._attending:
            if topic not in self._channels:
                members = self._membership
                name, deadline_s = f"{folder_of(members.epoch)}/{topic}", self._options.deadline_s
                over = self._over if self._options.elastic else []  # else ranks that have left recover over it
                self._channels[topic] = StoreChannel(self._store, name, members.rank, members.ranks, deadline_s, over)
            return self._channels[topic]

    def average(self, topic: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return the average of an array over all ranks that are there: over fewer, if some end meanwhile.

        Raises
        ------
        TransportError
            A rank did not take part in time, or has ended and the others may not go on.
        """
        while True:
            with self._attending:
                epoch, channel = self._membership.epoch, self.channel(topic)
            try:
                total = channel.add(values)
                if self._options.elastic:
                    channel.gather(None)  # all have it; else all add again
            except RankEndedError as error:
                if not self._options.elastic or not self._comes_after(epoch, str(error)):
                    raise
            else:
                average: NDArray[Any] = total / total.dtype.type(len(channel.ranks))
                return average

    def _comes_after(self, epoch: int, reason: str) -> bool:
        """Have all ranks begin the next epoch, for a reason, and wait for it; return whether it has come."""
        if self._membership.epoch == epoch:  # a rank that has left normally is no other reason to do so
            self.publish_left(reason)
        with self._attending:
            return self._attending.wait_for(lambda: self._membership.epoch > epoch, self._options.deadline_s)

    def first_agreement(self) -> Agreement:
        """Return how the ranks join each other at first."""
        if self._options.elastic:
            self._decide(0, Decision(self._membership.ranks))  # ranks that come later read it
        return self._agreement(self._membership)

    # Watching ---------------------------------------------------------------------------------------------------------

    def open(self) -> bool:
        """Begin to show that this rank lives, where the others would go on without it."""
        if self._options.elastic and self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="dlcp-beat", daemon=True)
            self._beating.start()
        return True

    def _beat(self) -> None:
        # What comes of an expired lease is up to the thread that watches: this rank, too, is then among the ended.
        with contextlib.suppress(StoreError):
            while self._store.beat(self._options.silence_s) and not self._closing.wait(BEAT_S):
                pass

    def close(self) -> None:
        """Stop showing that this rank lives."""
        self._closing.set()

    def check_peers(self, where: str) -> BaseException | None:
        """Look in the store for a rank that has left DLCP or ended."""
        elastic = self._options.elastic > 0
        mine = [ended_key(self._membership.rank)] if elastic else []
        limit_s = min(ANSWER_S, self._options.silence_s) if elastic else ANSWER_S
        try:
            found = self._store.first([*self._over, *mine, *self._others], 0, answer_s=limit_s)
        except StoreError as error:
            self._is_cut_off = True
            return RankEndedError(f"{error}; {where}")
        if found is None:
            return None
        key, text = found[0], found[1].decode()
        if key in self._over:
            return PeerAbortedError(f"another rank has left DLCP: {text}")
        if text == CLOSED:
            self._others.remove(key)
            return None
        return RankEndedError(f"rank {key.rpartition('/')[2]} has ended: {text}; {where}")

    def publish_left(self, reason: str) -> None:
        """Write into the store that a rank has left DLCP."""
        if not self._is_cut_off:
            for key in self._lefts():
                self._store.compare_set(key, "", reason)

    def publish_failed(self, reason: str) -> None:
        """Write into the store that this rank has ended, so that the others stop waiting for it."""
        if self._is_cut_off:
            return
        with contextlib.suppress(StoreError):
            self._store.set(ended_key(self._membership.rank), reason)
            self.publish_left(reason)

    # Going on without ranks -------------------------------------------------------------------------------------------

    def regroup(self, reason: str) -> Agreement | None:
        """Let the store decide who goes on: the ranks that have come here once all others have ended, or are silent."""
        least, members = self._options.elastic, self._membership
        if not least:
            return None
        if self._is_cut_off:
            raise RankEndedError(
                f"{reason}; rank {members.rank} cannot ask the store who goes on, so it ends: the others may go on"
            )
        self.publish_left(reason)
        with self.division.deciding:
            decision = self._decide_without_ended()
            if members.rank in decision.ranks:
                self.division.change(decision.drawn, decision.ranks)
        if members.rank not in decision.ranks:
            others = f"ranks {list(decision.ranks)} were to go on without" if decision.ranks else "no rank is left but"
            raise RankEndedError(
                f"{others} rank {members.rank}, which "
                + ("has not completed a step with the others: start it again" if self.is_new else "did not answer them")
            )
        if len(decision.ranks) < least:
            raise RankEndedError(f"{reason}; only {len(decision.ranks)} left, fewer than elastic={least}")
        survivors = replace(members, ranks=decision.ranks, epoch=self._decisions, peers={}, hosts={})
        self.attend(survivors)
        self._clear()
        return self._agreement(survivors)

    def _decide_without_ended(self) -> Decision:
        while True:
            number = self._decisions + 1
            self._store.set(
                _coming_key(number, self._membership.rank), NEW if self.is_new else str(self.division.drawn)
            )
            answered, came = self._answers(number)
            end_s = time.monotonic() + self._options.silence_s
            while answered < len(self._membership.ranks) and time.monotonic() < end_s:
                if self._store.check([f"decided/{number}"]):
                    break
                time.sleep(REGROUP_POLL_S)
                answered, came = self._answers(number)
            if not came and not self._store.check([f"decided/{number}"]):
                return Decision(())  # this rank has ended, or only ranks that have not completed a step are left
            drawn = max(came.values(), default=0)
            proposal = Decision(tuple(came), (), self._applications, drawn, without_server=self._does_without_server())
            decision = self._decide(number, proposal)
            if decision.new or self._membership.rank in decision.ranks:
                self._note(number, decision)
            if not decision.new:
                return decision

    def _answers(self, number: int) -> tuple[int, dict[int, int]]:
        """Return how many ranks have ended or come to decide, and which can go on, with the first step not drawn."""
        ranks = self._membership.ranks
        here, ended = {_coming_key(number, rank): rank for rank in ranks}, {ended_key(rank): rank for rank in ranks}
        found = self._store.read([*here, *ended])
        gone = {ended[key] for key in found if key in ended}
        came = {here[key]: value for key, value in found.items() if key in here and here[key] not in gone}
        can = {rank: int(value) for rank, value in came.items() if value != NEW.encode()}
        return len(gone) + len(came), can

    def lose_server(self, reason: str) -> None:
        """Let all ranks do without the parameter server from the next epoch on."""
        if self._options.elastic and not self._is_cut_off:
            self._store.compare_set(SERVER_LOST, "", reason)

    def _does_without_server(self) -> bool:
        return bool(self._options.server) and self._store.check([SERVER_LOST])

    def _clear(self) -> None:
        """Delete what ranks have written in epochs that all of them have left for good."""
        if self._membership.rank == self._membership.ranks[0]:
            kept = max(self._cleared, self._membership.epoch - EPOCHS_KEPT)
            self._store.clear(map(folder_of, range(self._cleared, kept)))
            self._cleared = kept

    # Letting ranks in -------------------------------------------------------------------------------------------------

    def newcomers(self) -> RankAdmission | None:
        """Look in the store for ranks that are to be let in; the lowest rank decides that when they apply."""
        if not self._options.elastic:
            return None
        try:
            return self._decide_on_applicants()
        except StoreError:  # check_peers tells
            return None

    def _decide_on_applicants(self) -> RankAdmission | None:
        number, rank = self._decisions + 1, self._membership.rank
        if not self._store.check([f"decided/{number}"]):
            if rank != self._membership.ranks[0] or not (new := self._applicants()):
                return None
            ranks = tuple(sorted({*self._membership.ranks, *new}))
            proposal = Decision(ranks, new, self._applications, without_server=self._does_without_server())
            self._decide(number, proposal)
        decision = Decision.from_json(self._store.get(f"decided/{number}"))
        if not decision.new:  # others go on without a rank; check_peers notices
            return None
        self._note(number, decision)
        return self._admission(decision)

    def apply(self) -> RankAdmission:
        """Apply to take part in a session of others, and wait until they let this rank in; again if that failed.

        Raises
        ------
        RankEndedError
            All ranks of the session have ended.
        """
        rank = self._membership.rank
        while True:  # an earlier application of this rank was decided on
            place, self._place = self._place, self._place + 1
            if self._store.compare_set(f"applied/{place}", "", str(rank)) == str(rank).encode():
                break
        while True:  # for as long as there are ranks, because their steps may be long
            found = self._store.first([f"decided/{self._next}"], APPLY_POLL_S)
            if found is not None:
                decision = Decision.from_json(found[1])
                self._membership = replace(self._membership, epoch=self._next)
                self._note(self._next, decision)
                if self._next == 0:
                    self._founders = len(decision.ranks)
                self._next, self._there = self._next + 1, decision.ranks
                if rank in decision.new:
                    return self._admission(decision)
            elif found := self._store.first([FALLEN_BACK], 0):
                why = found[1].decode()
                raise RankEndedError(
                    f"rank {rank} cannot join ranks {list(self._there)}, which train without DLCP: {why}"
                )
            elif all(self._has_gone(each) for each in self._there if each != rank):
                raise RankEndedError(f"rank {rank} comes too late: ranks {list(self._there)} have ended")

    def decline(self) -> None:
        """Tell ranks that go on without others that this one, on its way in, does not take part."""
        self._store.set(_coming_key(self._decisions + 1, self._membership.rank), NEW)

    def let_in_no_more(self, reason: str) -> None:
        """Tell ranks that apply why they cannot join."""
        with contextlib.suppress(StoreError):
            self._store.set(FALLEN_BACK, reason)

    def _has_gone(self, rank: int) -> bool:
        """Return whether a rank cannot let others in: it has ended, or was to be let in and has not been."""
        is_member = rank < self._founders or self._store.check([f"member/{rank}"])
        return not is_member or self._store.check([ended_key(rank)])

    def settle(self) -> None:
        """Note that this rank has completed a step: it can go on without others, and let others in."""
        if self.is_new:
            self.is_new = False
            self._store.set(f"member/{self._membership.rank}", "")

    def _admission(self, decision: Decision) -> RankAdmission:
        rank = self._membership.rank
        old = [each for each in decision.ranks if each not in decision.new]
        ended = [ended_key(each) for each in old if each != rank]
        over = [*self._over, *ended]  # also of the present epoch, which may end before the next begins
        members = replace(self._membership, ranks=decision.ranks, epoch=self._decisions, peers={}, hosts={})
        name, deadline_s = f"{folder_of(members.epoch)}/state", self._options.deadline_s
        state_channel = StoreChannel(self._store, name, rank, [old[0], *decision.new], deadline_s, over)
        agreement = self._agreement(members, over)
        return RankAdmission(self._store, agreement, old, decision.new, over, self.division, deadline_s, state_channel)

    def _applicants(self) -> tuple[int, ...]:
        new = []
        while found := self._store.first([f"applied/{self._applications}"], 0):
            self._applications += 1
            rank = int(found[1])
            if not self._store.check([ended_key(rank)]):
                new.append(rank)
        return tuple(new)

    # Deciding ---------------------------------------------------------------------------------------------------------

    def _decide(self, number: int, proposal: Decision) -> Decision:
        """Propose a decision; return the one in force, which is the first that any rank proposed."""
        return Decision.from_json(self._store.compare_set(f"decided/{number}", "", proposal.to_json()))

    def _note(self, number: int, decision: Decision) -> None:
        if decision.without_server and not self._without_server and self._membership.rank == decision.ranks[0]:
            why = self._store.get(SERVER_LOST).decode()
            log.warning("DLCP: the parameter server is lost: %s. From now on, ranks exchange directly.", why)
        self._decisions, self._applications = number, decision.applications
        self._without_server = decision.without_server
        self._over[:] = self._lefts()  # in place: channels hold it, too

    def _agreement(self, members: Membership, over: Sequence[str] = ()) -> Agreement:
        ends = [ended_key(rank) for rank in members.ranks]

        def gone() -> str | None:
            if not self._options.elastic:
                return None
            found = self._store.first([*ends, *over], 0)  # one query: joining ranks ask all the time
            if found and found[0] in ends:
                return f"{NotJoinedError.CHANGED}rank {found[0].rpartition('/')[2]} has ended"
            return NotJoinedError.CHANGED + found[1].decode() if found else None

        store = self._store.under(folder_of(members.epoch))
        return Agreement(
            store,
            members.rank,
            0,
            self._options.meet_s,
            master=self._master,
            membership=members,
            gone=gone,
            without_server=self._without_server,
        )


def store_fallback(watch: StoreWatch, feedback: Residual) -> Fallback:
    """Return the fallback of a group: rank 0 sums gradients over the store, which is slow but lossless."""

    def add_up(pending: PendingBucket, done: Callable[[BaseException | None], None]) -> None:
        assert pending.bucket
        bucket = pending.bucket
        try:
            values: NDArray[Any] = bucket.value_type.widen(bucket.values).copy()
            feedback.apply(values, bucket.segments)  # the store loses nothing, so no new residual arises
            bucket.values[:] = bucket.value_type.narrow(watch.average(f"average of bucket {pending.sequence}", values))
        except Exception as problem:
            done(problem)
        else:
            done(None)

    def average(pending: PendingBucket, done: Callable[[BaseException | None], None]) -> None:
        # In its own thread, because ranks need not reach buckets in the same order.
        threading.Thread(target=add_up, args=(pending, done), name="dlcp-store-add", daemon=True).start()

    return Fallback("the store, which is slow", average, watch)
