# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that averages gradients, whatever framework they come from: parameters by name, values in NumPy."""

import atexit
import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import ErrorFeedback
from dlcp.collectives.samples import check_samples
from dlcp.ledger import Ledger
from dlcp.session import whole
from dlcp.session.agreement import Agreement
from dlcp.session.buckets import Buckets, Filling, Member
from dlcp.session.channel import StoreChannel, ended_key
from dlcp.session.exchange import CLOSED, Exchange
from dlcp.session.joining import NotJoinedError, speaks
from dlcp.session.joining import join as join_ranks
from dlcp.session.options import Options
from dlcp.session.recovery import Mode
from dlcp.session.steering import WEIGHS, Steering, all_weigh, piloted
from dlcp.session.store import Store, StoreError
from dlcp.suggestion import closest
from dlcp.tags import Tagger, layers_in_order
from dlcp.transport import DeadlineError, Endpoint, TransportError
from dlcp.tuning.autotuner import Pilot

log = logging.getLogger("dlcp")

CALL: Final = "dlcp.session.join"
PATIENCE: Final = 3
"""So many deadlines a whole step may take: for a message, and, should it fail, to recover. Chosen by us."""
HEARD_S: Final = 3.0
"""So long others may take to hear why rank 0 gives up, before it takes their store along. Chosen by us."""


class Group:
    """Ranks that average gradients; :func:`dlcp.session.join` makes it. Its methods may be called from any thread.

    Attributes
    ----------
    rank, size
        This rank, and how many there are.
    options, ledger
        The options in force; what was sent, delivered and lost.
    step
        Number of the step that is being exchanged.
    """

    def __init__(self, options: Options, rank: int, size: int, store: Store | None) -> None:
        self.options, self.rank, self.size = options, rank, size
        self.ledger = Ledger(options.job)
        self.step = 0
        self._store = store
        self._endpoint: Endpoint | None = None
        self._exchange: Exchange | None = None
        self._steering: Steering | None = None
        self._channel: StoreChannel | None = None
        self._buckets: Buckets | None = None
        self._started: dict[str, Member] = {}
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._limit_s = PATIENCE * options.deadline_s
        self._writer = ThreadPoolExecutor(1, "dlcp-group")
        atexit.register(self._at_exit)

    def meet(self, master: str) -> None:
        """Open this rank's endpoint together with the other ranks; :func:`dlcp.session.join` does that."""
        assert self._store
        ranks = range(self.size)
        feedback, tagger = ErrorFeedback(), Tagger(self.options.classes())
        deadline_s = self.options.deadline_s
        self._channel = StoreChannel(self._store, "ranks", self.rank, ranks, deadline_s)
        self._exchange = Exchange(self._store, self.rank, ranks, deadline_s, feedback)
        agreement = Agreement(self._store.under("joining"), self.rank, self.size, self.options.meet_s)
        if self.options.weighted:
            agreement.tell(WEIGHS, True)
        try:
            joined = join_ranks(self.options, agreement, call=CALL, toward=master)
        except NotJoinedError as problem:
            without_weights = self.options.weighted and not all_weigh(agreement)
            if not self.options.fallback or without_weights:
                self.close(str(problem))
                if without_weights:
                    raise NotJoinedError(f"{problem}. Nor do all ranks say samples=..., to weigh by them") from None
                raise
            self._exchange.do_without(str(problem))
            self._steering = Steering(Pilot.of(self.options, self.rank, ranks), self._exchange, self._limit_s)
            if speaks(agreement):
                log.warning("DLCP is off: %s. Gradients are averaged over the store, which is slow.", problem)
            return
        if joined.remark and self.rank == 0:
            log.warning("DLCP: %s", joined.remark)
        self.options, self._endpoint = joined.options, joined.endpoint
        pilot = Pilot.of(joined.options, self.rank, ranks, ledger=self.ledger, joined=joined)
        reducer = piloted(pilot, joined, ranks, tagger=tagger, ledger=self.ledger, feedback=feedback)
        self._exchange.use(joined.endpoint, reducer, may_recover=self.options.fallback)
        self._steering = Steering(pilot, self._exchange, self._limit_s)

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint; None in a group of one, and where DLCP could not be used."""
        return self._endpoint

    @property
    def active(self) -> bool:
        """Whether DLCP averages gradients; if not, see :attr:`reason`."""
        return self._exchange is not None and self._exchange.mode is Mode.DLCP

    @property
    def reason(self) -> str:
        """Why DLCP does not average gradients; ``""`` while it does."""
        if self._exchange is None:
            return "a group of one has nothing to exchange"
        return self._exchange.reason

    # Gradients --------------------------------------------------------------------------------------------------------

    def register(self, names: Iterable[str]) -> None:
        """Tell the model's parameters in forward order: tags follow from it. All ranks tell the same, between steps.

        Raises
        ------
        ValueError
            A name comes twice, or the ranks have told different names; the message says which.
        RuntimeError
            A step is under way.
        """
        listed = list(names)
        twice = [name for name, count in Counter(listed).items() if count > 1]
        if twice or not listed:
            raise ValueError(f"parameter {twice[0]} is registered twice" if twice else "there are no parameters")
        self._check_idle("parameters are registered")
        if self._channel:
            for rank, told in sorted(self._channel.gather(listed).items()):
                _compare_names(listed, told, self.rank, rank)
        self._buckets = Buckets(layers_in_order(listed))

    def average(self, gradients: Mapping[str, NDArray[Any]]) -> None:
        """Average the gradients of a whole step over all ranks, in place; return when all are in.

        With ``options.combine`` they become the sum, or what Adasum makes of them, instead.

        A rank may leave out parameters that it has no gradient of: it counts as zeros there.

        Parameters
        ----------
        gradients
            By parameter name; any shapes, of float32, float64, float16 or bfloat16, the same on all ranks and at all
            steps. The first step decides which parameters are exchanged.

        Raises
        ------
        KeyError, TypeError, ValueError
            A parameter is not known, or its values cannot be exchanged; nothing has been sent then.
        TransportError
            Ranks were not reached, or not in time; the message names rank, step and layer.
        """
        buckets = self._registered(gradients)
        members = {name: Member.of(name, gradients[name]) for name in buckets.layers if name in gradients}
        for name, member in members.items():
            buckets.check(name, member)
        with self._lock:
            self._check_open()
            buckets.expect({name: member for name, member in members.items() if member.stored.size})
            for name in reversed(members):
                self._start(buckets, name, members[name])
        self.end_step()

    def start(self, name: str, values: NDArray[Any]) -> "Future[NDArray[Any]]":
        """Average one parameter of the current step; the future's result is ``values``, averaged in place.

        It goes out with its bucket, once that is full or the step ends: so start all before waiting for one, in any
        order. In the first step, which shows what there is, each goes by itself.

        Raises
        ------
        KeyError, TypeError, ValueError
            The parameter is not known, or its values cannot be exchanged.
        RuntimeError
            It has been started in this step, or the group is closed.
        TransportError
            Averaging has failed before.
        """
        buckets = self._registered([name])
        member = Member.of(name, values)
        with self._lock:
            self._check_open()
            self._start(buckets, name, member)
            if self._exchange and not self._timer:
                self._timer = threading.Timer(self.options.deadline_s, self._expire, [buckets, self.step])
                self._timer.daemon = True
                self._timer.start()
        return member.future

    def samples(self, count: int) -> None:
        """Say how many samples this rank's gradients of the coming step will be the mean of.

        Every sample then counts the same, whichever rank has it; a rank may have none. It holds until another number is
        told. All ranks have to say ``Options(samples=...)``, for then they expect it. The sooner before the first
        gradient, the less others wait for it.

        Raises
        ------
        ValueError
            It is no whole number of samples, or the options do not say ``samples``.
        RuntimeError
            The step is under way.
        """
        with self._lock:
            self._check_open()
            self._check_idle("the next samples")
            if self._steering is None:
                check_samples(count)
                return
            self._steering.pilot.set_samples(count)
            self._steering.begin(self.step)

    def _expire(self, buckets: Buckets, step: int) -> None:
        """Fail if a bucket still waits for a parameter that nobody starts: whoever waits for the others must know."""
        with self._lock:
            lacking = buckets.lacking()
            if self.step != step or not lacking or not self._exchange:
                return
            error = DeadlineError(
                f"job {self.options.job}, step {step}: rank {self.rank} has not started {', '.join(lacking[:3])}"
                f"{' ...' if len(lacking) > 3 else ''} in {self.options.deadline_s:g} s, as it did in the first step; "
                "start all parameters at every step, or call end_step"
            )
            buckets.fail(error)
        self._exchange.give_up(str(error))

    def _start(self, buckets: Buckets, name: str, member: Member) -> None:
        if name in self._started:
            raise RuntimeError(f"{name} has been started in step {self.step}; call end_step before the next one")
        if self._exchange is None or not member.stored.size:
            member.future.set_result(member.given)
        else:
            filling = buckets.put(name, member)
            if filling.full:
                self._send(self._exchange, filling)
        self._started[name] = member

    def _send(self, exchange: Exchange, filling: Filling) -> None:
        assert self._steering
        bucket = filling.bucket()
        self._steering.weigh(self.step, bucket)
        averaged = exchange.start(self.step, self._steering.first_sequence + filling.planned.sequence, bucket)
        filling.sent = True
        if self._buckets and self._buckets.all_sent:
            self._steering.pilot.on_handed()
        averaged.add_done_callback(partial(self._on_averaged, filling))

    def _on_averaged(self, filling: Filling, averaged: "Future[Any]") -> None:
        """Let what takes long be done in a thread of its own: the endpoint has other things to do."""
        self._writer.submit(filling.finish, averaged.exception())

    def end_step(self) -> None:
        """End this step on this rank: wait for all that was started, and begin the next one.

        Raises
        ------
        TransportError
            Ranks were not reached, or not in time; the message names rank, step and layer.
        """
        buckets = self._registered([])
        with self._lock:
            self._check_open()
            if self._exchange:
                for filling in buckets.rest():
                    self._send(self._exchange, filling)
            sent = list(buckets.filling.values())
        wait_for([filling.done for filling in sent], self._limit_s)
        for filling in sent:
            if not filling.done.done():
                name = filling.planned.segments[0].layer.name
                raise DeadlineError(
                    f"job {self.options.job}, step {self.step}: rank {self.rank} has waited {self._limit_s:g} s "
                    f"for {name}"
                )
            filling.done.result()
        with self._lock:
            if self._timer:
                self._timer.cancel()
                self._timer = None
            buckets.end_step()
            self._started.clear()
            self.step += 1
            if self._steering and buckets.plan:
                self._steering.pilot.gradient_bytes = buckets.plan.nbytes

    def _registered(self, names: Iterable[str]) -> Buckets:
        if self._buckets is None:
            raise RuntimeError("the group does not know the parameters: call register(names) first, on every rank")
        for name in names:
            if name not in self._buckets.layers:
                raise KeyError(f"parameter {name!r} has not been registered{closest(name, self._buckets.layers)}")
        return self._buckets

    def _check_idle(self, what: str) -> None:
        if self._started:
            raise RuntimeError(f"step {self.step} is under way; call end_step before {what}")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the group has been closed")
        if self._exchange:
            self._exchange.check()

    # Other things that ranks do together ------------------------------------------------------------------------------

    def broadcast(self, values: NDArray[Any], root: int = 0) -> None:
        """Write the root's values into every rank's array, whole; between steps, and on all ranks.

        Parameters
        ----------
        values
            Contiguous and writable; of any type, of one size on all ranks.

        Raises
        ------
        ValueError
            The array cannot be written to as it is.
        RuntimeError
            A step is under way.
        TransportError
            A rank was not reached, or not in time; the message names it.
        """
        if not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("an array to broadcast must be contiguous and writable")
        with self._lock:
            self._check_open()
            self._check_idle("a broadcast")
            data = values.reshape(-1).view(np.uint8)
            if self._exchange is None or not len(data):
                return
            if self.active and self._endpoint:
                whole.broadcast(self._endpoint, self.size, self.step, data, root, self.options.deadline_s)
                self.step += 1
            elif self._channel:
                self._channel.broadcast(data, root)

    def barrier(self) -> None:
        """Return when all ranks have come this far.

        Raises
        ------
        TransportError
            A rank has ended, or not come within the deadline; the message names it.
        """
        self._check_open()
        if self._channel:
            self._channel.gather(None)

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up.

        Rank 0, whose process has the ranks' store, waits for the others to leave too: for ``options.deadline_s`` at
        most, or with a ``reason`` until they are likely to have heard it.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._timer:
                self._timer.cancel()
            if self._buckets:
                self._buckets.fail(TransportError(f"rank {self.rank} has closed its group"))
        atexit.unregister(self._at_exit)
        if self._exchange and self._store:
            with contextlib.suppress(StoreError):
                self._store.leave(ended_key(self.rank), reason or CLOSED)
            self._exchange.close(reason)
            if self.rank == 0:
                self._let_others_leave(self._store, reason)
            self._store.close()
        self._writer.shutdown(wait=True)

    def _let_others_leave(self, store: Store, reason: str | None) -> None:
        """Wait until the others have ended: the store ends with this process, and they may still read it."""
        patience_s = self.options.deadline_s if reason is None else min(HEARD_S, self.options.deadline_s)
        end_s = time.monotonic() + patience_s
        with contextlib.suppress(StoreError):
            store.set(ended_key(0), reason or CLOSED)
            for rank in range(1, self.size):
                store.first([ended_key(rank)], max(0.0, end_s - time.monotonic()))

    def _at_exit(self) -> None:
        self.close(reason_of_exit(self.rank))

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_reason(self.rank, error))


def reason_of_exit(rank: int) -> str | None:
    """Return what to tell the other ranks when this process ends by an exception that nobody has caught."""
    return _reason(rank, getattr(sys, "last_value", None))


def _reason(rank: int, error: BaseException | None) -> str | None:
    return f"rank {rank} gives up: {error!r}" if error else None


def _compare_names(mine: list[str], theirs: list[str], rank: int, other: int) -> None:
    """Raise ValueError if two ranks have told different parameters."""
    for place, (name, their_name) in enumerate(zip_longest(mine, theirs)):
        if name != their_name:
            raise ValueError(
                f"parameter {place} is {name} on rank {rank} and {their_name} on rank {other}; all ranks must register "
                "the same names in the same order"
            )
