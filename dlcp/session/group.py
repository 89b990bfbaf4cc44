# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that averages gradients of any framework: parameters by name, values as NumPy arrays."""

import contextlib
import json
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Residual
from dlcp.collectives.message_numbers import broadcast_number
from dlcp.collectives.reduction_rules import check_samples, weigh
from dlcp.collectives.shards import binomial_tree
from dlcp.host.closing import ExitCallback
from dlcp.inputs.addresses import Address
from dlcp.inputs.error_text import closest
from dlcp.session.admission import RankAdmission
from dlcp.session.averager import BucketTable, StepAverager
from dlcp.session.buckets import BucketPlan, Buckets, FillingBucket, Gradient
from dlcp.session.division import Division
from dlcp.session.joining import NotJoinedError
from dlcp.session.options import Options
from dlcp.session.store import Store, StoreError, ended_key
from dlcp.session.store_watch import CLOSED, StoreWatch, store_fallback
from dlcp.session.training_session import CALL, DEADLINE_FACTOR, RankChange, TrainingSession, reason_of, reason_of_exit
from dlcp.transport import (
    RELIABLE,
    DeadlineError,
    Endpoint,
    Membership,
    MessageKey,
    RankEndedError,
    ReceiveRequest,
    SendRequest,
    TransportError,
)
from dlcp.transport.ledger import Ledger
from dlcp.values.tags import Tagger, layers_in_order, plain_tags

log = logging.getLogger("dlcp")
_registered: "WeakKeyDictionary[Group, list[str]]" = WeakKeyDictionary()
"""Parameter names of each group with a :class:`GraphAverager`, because a group registers only one model's."""

FAREWELL_S: Final = 3.0
"""If rank 0 gives up, it keeps its store open up to this long, so that the other ranks can read the reason. They look
every 0.25 s (:data:`dlcp.session.training_session.WATCH_S`)."""
RANKS: Final = "ranks"
"""Name of the channel for collective operations between steps."""
PART_BYTES: Final = 1 << 24
"""Longer broadcasts are split into messages of this size, because the endpoint buffers whatever arrives before its
receive is posted. Not tuned."""


Save = Callable[[], bytes]
Load = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class SavedState:
    """What the lowest rank tells new ranks before it sends them the state.

    Parameters
    ----------
    step
        The number of the first step with them.
    names
        The parameters, in forward order.
    shapes
        Name, shape and format of those that have gradients.
    nbytes
        The size of the state.
    label
        The session's name.
    problem
        Why there is no state; ``""`` if there is one.
    """

    step: int
    names: list[str]
    shapes: list[tuple[str, list[int], str]]
    nbytes: int
    label: str
    problem: str = ""

    @classmethod
    def from_json(cls, text: bytes) -> "SavedState":
        """Return what :meth:`to_json` has written."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))


class Group:
    """One rank's membership in a group that averages gradients; see :func:`dlcp.session.join`. Thread-safe.

    Attributes
    ----------
    rank
        This rank.
    options, ledger
        The options in force, and the record of packets sent, delivered and lost.
    division
        Among which ranks the data of each step is divided, also of steps to come.
    """

    def __init__(self, options: Options, rank: int, size: int, store: Store | None, *, serves: bool = False) -> None:
        self.options, self.rank, self._serves_store = options, rank, serves
        self._at_first = tuple(range(size))
        self.division = Division(self._at_first)
        self.ledger = Ledger(options.job)
        self._table = BucketTable()
        self._store = store
        self._watch: StoreWatch | None = None
        self._session: TrainingSession | None = None
        self._buckets: Buckets | None = None
        self._started: dict[str, Gradient] = {}
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._limit_s = DEADLINE_FACTOR * options.deadline_s
        self._writer = ThreadPoolExecutor(1, "dlcp-group")
        self._exit = ExitCallback(self._at_exit)
        self._save: Save | None = None
        self._master: Address | None = None
        """The address of the store, if this rank has yet to join ranks that train."""
        self._leaving = 0
        """The signal after which this rank leaves; 0 for none."""
        self._heeded: list[signal.Signals] = []

    def join(self, master: Address) -> None:
        """Join the other ranks, and open this rank's endpoint; called by :func:`dlcp.session.join`.

        Parameters
        ----------
        master
            The address of the store.

        Raises
        ------
        NotJoinedError
            Not all ranks can use DLCP, and ``options.fallback`` is off.
        """
        assert self._store
        session, watch = self._open_session(Membership(self.rank, ranks=self._at_first), master)
        agreement = watch.first_agreement()
        try:
            session.join(agreement, call=CALL)
        except NotJoinedError as problem:
            self.close(str(problem))
            raise
        self.options = session.options

    def join_later(self, master: Address) -> None:
        """Prepare to join ranks that train; :meth:`register` does it. Called by :func:`dlcp.session.join`."""
        self._at_first, self._master = (self.rank,), master

    def _open_session(
        self, membership: Membership, master: Address | None, *, is_new: bool = False
    ) -> tuple[TrainingSession, StoreWatch]:
        assert self._store
        options, feedback = self.options, Residual()
        watch = self._watch = StoreWatch(self._store, membership, options, master, self.division, is_new=is_new)
        averager = StepAverager(
            options, membership, ledger=self.ledger, feedback=feedback, tagger=Tagger(options.tag_policy)
        )
        session = self._session = TrainingSession(averager, store_fallback(watch, feedback), self._table)
        return session, watch

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of all ranks that are there, in ascending order. Without ``elastic``, they do not change."""
        return self._session.membership.ranks if self._session else self._at_first

    @property
    def changes(self) -> list[RankChange]:
        """The latest changes of the ranks: who has ended or come, and how long training stood still for it."""
        return list(self._session.changes) if self._session else []

    @property
    def size(self) -> int:
        """The number of ranks that are there."""
        return len(self.ranks)

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self._table.step

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint of this rank; None in a group of one, and if DLCP could not be used."""
        return self._session.endpoint if self._session else None

    @property
    def active(self) -> bool:
        """Whether DLCP averages gradients; if not, see :attr:`reason`."""
        return self._session is not None and self._session.active

    @property
    def reason(self) -> str:
        """Why DLCP does not average gradients; ``""`` while it does."""
        return self._session.reason if self._session else "a group of one has nothing to exchange"

    # Gradients --------------------------------------------------------------------------------------------------------

    def register(self, names: Iterable[str], *, save: Save | None = None, load: Load | None = None) -> bool:
        """Register the model's parameters. All ranks must call this between two steps, with the same names.

        With ``elastic``, a rank that comes back, or comes later, gets the state of the training here: it waits until
        the others let it in, and returns at the beginning of a step, whose number is :attr:`step`.

        Parameters
        ----------
        names
            The parameters' names in forward order, which determines how their packets are tagged.
        save
            Returns all that a new rank must know, as bytes: parameters, the optimizer's state, and whatever else must
            be equal on all ranks. It is called on the lowest rank, at the beginning of the first step with new ranks.
            Without it, no rank can come later.
        load
            Takes over such a state; called here on new ranks.

        Returns
        -------
        Whether this rank has come later, and taken over a state.

        Raises
        ------
        ValueError
            A name occurs twice, there are none, or the ranks registered different names; the message says which.
        RuntimeError
            A step is under way.
        TransportError
            The others have ended, or do not let this rank in; the message says why.
        """
        listed = list(names)
        twice = [name for name, count in Counter(listed).items() if count > 1]
        if twice or not listed:
            raise ValueError(f"parameter {twice[0]} is registered twice" if twice else "no parameters to register")
        self._check_idle("registering parameters")
        self._save = save
        if self._master:
            self._get_state(listed, load)
            return True
        for rank, theirs in sorted(self._gather(listed).items()):
            _compare_names(listed, theirs, self.rank, rank)
        self._buckets = Buckets(layers_in_order(listed))
        return False

    def begin_step(self) -> None:
        """Begin the next step, which its first gradient does otherwise.

        Call it at the top of the training loop, so that ranks that are let in compute their gradients while the others
        do. Everything between it and the end of the step is then common to all :attr:`ranks`.
        """
        with self._lock:
            self._check_open()
            if self._session:
                self._session.route_of(self.step)

    def _get_state(self, names: list[str], load: Load | None) -> None:
        """Join ranks that train, and take over their state."""
        assert self._store
        if load is None:
            raise ValueError("this rank joins others that train already: give register() functions to save and load")
        session, watch = self._open_session(Membership(self.rank, ranks=(self.rank,)), self._master, is_new=True)
        watch.open()
        session.show()
        try:
            entered = None
            while entered is None:
                entered = self._try_to_enter(names, session, watch)
            state, plan = entered
            load(state)
        except BaseException as problem:
            self.close(f"rank {self.rank} cannot take part: {problem}")
            raise
        self.options, self._master = session.options, None
        self._buckets = Buckets(layers_in_order(names))
        self._buckets.plan = plan

    def _try_to_enter(
        self, names: list[str], session: TrainingSession, watch: StoreWatch
    ) -> tuple[bytes, BucketPlan] | None:
        """Join ranks that train, and return their state and plan; None if ranks have ended meanwhile."""
        admission = watch.apply()
        try:
            admission.joined = session.join_aside(admission.agreement)
            state = SavedState.from_json(admission.wait_for("state", as_long_as_they_live=True))
            if state.problem:
                raise ValueError(f"rank {self.rank} cannot take part: {state.problem}")
            _compare_names(names, state.names, self.rank, admission.old[0])
            data = np.zeros(state.nbytes, np.uint8)
            self._share_state(admission, state.step - 1, data)
        except (NotJoinedError, TransportError) as problem:
            watch.decline()
            admission.close()
            if isinstance(problem, NotJoinedError) and not (problem.is_for_server or problem.is_for_change):
                raise  # it would fail again
            log.warning("DLCP: rank %d was not let in, and tries again: %s", self.rank, problem)
            return None
        admission.first_step = state.step
        watch.attend(admission.joined.membership)
        watch.division.change(state.step, admission.joined.membership.ranks)
        session.enter(admission, state.label)
        plan = BucketPlan.from_description(state.shapes, layers_in_order(names))
        return data.tobytes(), plan

    def _give_state(self, admission: RankAdmission) -> None:
        """Give new ranks the state, while this rank trains on."""
        buckets, step = self._registered([]), self.step
        data = b""
        session = self._session
        assert session
        assert buckets.plan
        try:
            data = self._save() if self._save else b""
            problem = "" if self._save else f"rank {self.rank} gave register() no function to save"
        except Exception as error:
            log.exception("DLCP: rank %d cannot save the state for new ranks", self.rank)
            problem = f"rank {self.rank} cannot save the state: {error!r}"
        state = SavedState(step, list(buckets.layers), buckets.plan.described(), len(data), session.label, problem)
        admission.publish("state", state.to_json())
        if data:
            arguments = admission, step - 1, np.frombuffer(data, np.uint8)
            threading.Thread(target=self._send_state, args=arguments, name="dlcp-state", daemon=True).start()

    def _share_state(self, admission: RankAdmission, step: int, data: NDArray[np.uint8]) -> None:
        """Copy the state from the lowest rank into the new ones' ``data``."""
        assert admission.joined
        ranks, root = (admission.old[0], *admission.new), admission.old[0]
        if admission.joined.membership.server is None:
            broadcast(admission.joined.endpoint, ranks, step, data, root, self.options.deadline_s)
        else:  # the workers have no path to each other
            admission.state_channel.broadcast(data, root)

    def _send_state(self, admission: RankAdmission, step: int, data: NDArray[np.uint8]) -> None:
        try:
            self._share_state(admission, step, data)
        except TransportError as error:  # a rank has ended, which the session notices, too
            log.warning("DLCP: new ranks did not get the state: %s", error)

    def average(self, gradients: Mapping[str, NDArray[Any]]) -> None:
        """Average the gradients of a whole step over all ranks, in place; return when all averages have arrived.

        ``options.combine`` can replace the average by the sum or by Adasum.

        Parameters
        ----------
        gradients
            Arrays by parameter name, of any shapes; of float32, float64, float16 or bfloat16. Shapes and types must be
            the same on all ranks and in all steps. The first step determines which parameters are exchanged. A
            parameter that this rank omits counts as zeros.

        Raises
        ------
        KeyError, TypeError, ValueError
            A parameter is unknown, or its values cannot be exchanged. Nothing was sent.
        TransportError
            Ranks were not reached, or not in time; the message names rank, step and layer.
        """
        buckets = self._registered(gradients)
        given = {name: Gradient.of(name, gradients[name]) for name in buckets.layers if name in gradients}
        for name, gradient in given.items():
            buckets.check(name, gradient)
        with self._lock:
            self._check_open()
            buckets.expect({name: gradient for name, gradient in given.items() if gradient.stored.size})
            for name in reversed(given):
                self._start(buckets, name, given[name])
        self.end_step()

    def start(self, name: str, values: NDArray[Any]) -> "Future[NDArray[Any]]":
        """Start to average one parameter of the current step; the future's result is ``values``, averaged in place.

        A parameter is sent with its bucket, when that is full or the step ends. So start all parameters, in any order,
        before you wait for one. In the first step, before the buckets are planned, each is sent by itself.

        Parameters
        ----------
        name, values
            The parameter, and its gradient; see :meth:`average`.

        Raises
        ------
        KeyError, TypeError, ValueError
            The parameter is unknown, or its values cannot be exchanged.
        RuntimeError
            It has already been started in this step, or the group is closed.
        TransportError
            Averaging has failed before.
        """
        return self.start_gradient(name, Gradient.of(name, values))

    def start_gradient(self, name: str, gradient: Gradient) -> "Future[NDArray[Any]]":
        """Start to average a gradient of any format; see :meth:`start`."""
        buckets = self._registered([name])
        with self._lock:
            self._check_open()
            self._start(buckets, name, gradient)
            if self._session and not self._timer:
                self._timer = threading.Timer(self.options.deadline_s, self._expire, [buckets, self.step])
                self._timer.daemon = True
                self._timer.start()
        return gradient.future

    def samples(self, count: int) -> None:
        """Set how many samples this rank's gradients are the mean of, from the next step on.

        Ranks are weighted by it, so that every sample counts the same. All ranks must set ``Options(samples=...)``.
        The other ranks wait for this number, so call this well before the step's first gradient.

        Parameters
        ----------
        count
            The number of samples; 0 is allowed. It stays in force until the next call.

        Raises
        ------
        ValueError
            ``count`` is not a whole number, or the options do not set ``samples``.
        RuntimeError
            A step is under way.
        """
        with self._lock:
            self._check_open()
            self._check_idle("setting samples")
            if self._session is None:
                check_samples(count)
                return
            self._session.averager.set_samples(count)
            self._session.begin_step(self.step)

    def flush(self) -> None:
        """Send the next step in full, with everything lost before. All ranks must call this.

        Call it before the last step, and before each step after which parameters are saved or tested.

        Raises
        ------
        RuntimeError
            A step is under way.
        """
        with self._lock:
            self._check_open()
            self._check_idle("a flush")
            if self._session:
                self._session.flush(self.step)

    def _expire(self, buckets: Buckets, step: int) -> None:
        """Fail the step if this rank has still not started a parameter of an open bucket: other ranks wait for it."""
        with self._lock:
            lacking = buckets.lacking()
            if self.step != step or not lacking or not self._session:
                return
            error = DeadlineError(
                f"job {self.options.job}, step {step}: rank {self.rank} has not started {', '.join(lacking[:3])}"
                f"{' ...' if len(lacking) > 3 else ''} in {self.options.deadline_s:g} s, as it did in the first step; "
                "start all parameters in every step, or call end_step"
            )
            buckets.fail(error)
        self._session.fail(str(error))

    def _start(self, buckets: Buckets, name: str, gradient: Gradient) -> None:
        if name in self._started:
            raise RuntimeError(f"{name} has been started in step {self.step}; call end_step before the next one")
        if self._session is None or not gradient.stored.size:
            gradient.future.set_result(gradient.given)
        else:
            filling = buckets.put(name, gradient)
            if filling.full:
                self._send(self._session, filling)
        self._started[name] = gradient

    def _send(self, session: TrainingSession, filling: FillingBucket) -> None:
        bucket = filling.bucket()
        weight = session.weight(self.step)
        if weight != 1:
            values = bucket.value_type.widen(bucket.values).copy()
            weigh(values, weight)
            bucket.values[:] = bucket.value_type.narrow(values)
        averaged = session.average(self.step, session.averager.first_sequence + filling.planned.sequence, bucket)
        filling.sent = True
        averaged.add_done_callback(partial(self._on_averaged, filling))

    def _on_averaged(self, filling: FillingBucket, averaged: "Future[Any]") -> None:
        """Copy the averages back in another thread, because this one, the endpoint's, must not be held up."""
        self._writer.submit(filling.finish, averaged.exception())

    def end_step(self) -> None:
        """End this step on this rank: send the rest, wait for all averages, and begin the next step.

        Raises
        ------
        TransportError
            Ranks were not reached, or not in time; the message names rank, step and layer.
        """
        buckets = self._registered([])
        with self._lock:
            self._check_open()
            if self._session:
                for filling in buckets.rest():
                    self._send(self._session, filling)
            sent = list(buckets.filling.values())
        wait_for([filling.done for filling in sent], self._limit_s)
        for filling in sent:
            if not filling.done.done():
                name = filling.planned.segments[0].layer.name
                raise DeadlineError(
                    f"job {self.options.job}, step {self.step}: rank {self.rank} has waited {self._limit_s:g} s "
                    f"for the average of {name}"
                )
            try:
                filling.done.result()
            except TransportError:
                self._leave_if_told()  # the others may have been told to leave, too, and a step earlier
                raise
        with self._lock:
            if self._timer:
                self._timer.cancel()
                self._timer = None
            buckets.end_step()
            self._started.clear()
            self._table.end_step()
            if self._session and self._watch and self.options.elastic:
                self._session.on_let_in = self._give_state
                self._watch.settle()  # all ranks have contributed to this step, so they have all earlier ones
        self._leave_if_told()

    def _registered(self, names: Iterable[str]) -> Buckets:
        if self._buckets is None:
            raise RuntimeError("no parameters are registered: call register(names) first, on every rank")
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
        if self._session:
            self._session.check()

    # Other collective operations --------------------------------------------------------------------------------------

    def broadcast(self, values: NDArray[Any], root: int = 0) -> None:
        """Copy the root's values into every rank's array, without loss. All ranks must call this between two steps.

        Parameters
        ----------
        values
            A contiguous, writable array of any type and shape, of the same size in bytes on all ranks.
        root
            The rank whose values are copied.

        Raises
        ------
        ValueError
            The array is not contiguous or not writable, or the root is not there.
        RuntimeError
            A step is under way.
        TransportError
            A rank was not reached, or not in time; the message names it.
        """
        if root not in self.ranks:
            raise ValueError(f"rank {root}, whose values are to be copied, is not among the ranks {self.ranks}")
        if not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("an array to broadcast must be contiguous and writable")
        with self._lock:
            self._check_open()
            self._check_idle("a broadcast")
            data = values.reshape(-1).view(np.uint8)
            if self._session is None or not len(data):
                return
            if self.options.elastic:
                self._broadcast_among_those_left(data, root)
            elif self.active and self.endpoint and not self.options.server:  # its workers have no path to each other
                broadcast(self.endpoint, self.ranks, self.step, data, root, self.options.deadline_s)
                self._table.end_step()
            elif self._watch:
                self._watch.channel(RANKS).broadcast(data, root)

    def _broadcast_among_those_left(self, data: NDArray[np.uint8], root: int) -> None:
        """Broadcast over the store, and again if a rank other than the root ends meanwhile."""
        assert self._session
        assert self._watch
        copy = data.copy()
        while True:
            epoch = self._session.membership.epoch
            if root not in self.ranks:
                raise RankEndedError(f"rank {root}, whose values are to be copied, has ended")
            try:
                self._watch.channel(RANKS).broadcast(copy, root)
            except RankEndedError as error:
                self._await_next_epoch(epoch, error)
            else:
                if self._gather_once(None) is not None:  # all have it
                    data[:] = copy
                    return

    def share(self, data: bytes) -> bytes:
        """Return the bytes that the lowest rank gave; all ranks must call this between two steps.

        Raises
        ------
        TransportError
            A rank did not call it in time; the message names it.
        """
        sizes = self._gather(len(data))
        if not sizes:
            return data
        root = self.ranks[0]
        shared = np.zeros(sizes[root], np.uint8)
        if self.rank == root:
            shared[:] = np.frombuffer(data, np.uint8)
        self.broadcast(shared, root)
        return shared.tobytes()

    def barrier(self) -> None:
        """Wait until all ranks have called this.

        Raises
        ------
        TransportError
            A rank has ended, or did not call it within ``options.deadline_s``; the message names it.
        """
        self._check_open()
        self._gather(None)

    def gather(self, item: Any) -> dict[int, Any]:
        """Return the items of all ranks that are there, by rank. All ranks must call this.

        Parameters
        ----------
        item
            See :meth:`dlcp.session.store.StoreChannel.gather`.

        Raises
        ------
        TransportError
            As for :meth:`barrier`.
        """
        self._check_open()
        return self._gather(item)

    def _gather(self, item: Any) -> dict[int, Any]:
        given: dict[int, Any] | None = None if self._session and self._watch else {}
        while given is None:
            given = self._gather_once(item)
        return given

    def _gather_once(self, item: Any) -> dict[int, Any] | None:
        """Gather; return None if a rank has ended, and the others have gone on without it."""
        assert self._session
        assert self._watch
        epoch = self._session.membership.epoch
        try:
            return self._watch.channel(RANKS).gather(item)
        except RankEndedError as error:  # all others fail here, too
            self._await_next_epoch(epoch, error)
            return None

    def _await_next_epoch(self, epoch: int, error: RankEndedError) -> None:
        assert self._session
        if not self._session.wait_for_next_epoch(epoch, error):
            raise error

    def leave_on(self, *signals: signal.Signals) -> None:
        """Leave the others at the end of the step in which one of these signals arrives, and end this process.

        The process then raises ``SystemExit`` with the status 128 + signal. With ``elastic``, the others go on. Call it
        in the main thread. Signals for which the script has a handler are left to it.
        """

        def leave(number: int, _: Any) -> None:
            self._leaving = number

        for each in signals:
            if signal.getsignal(each) is signal.SIG_DFL:
                signal.signal(each, leave)
                self._heeded.append(each)

    def _leave_if_told(self) -> None:
        if self._leaving:
            log.warning(
                "DLCP: rank %d leaves after step %d: %s", self.rank, self.step - 1, signal.strsignal(self._leaving)
            )
            self.close()
            raise SystemExit(128 + self._leaving)

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up.

        The rank that serves the store waits until the others have left too, for up to ``options.deadline_s``;
        with a ``reason``, for up to :data:`FAREWELL_S`, so that they can read it.
        """
        if self._exit.is_fork:  # a forked child lacks the threads, and must not act for the rank
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._timer:
                self._timer.cancel()
            if self._buckets:
                self._buckets.fail(TransportError(f"rank {self.rank} has closed its group"))
        self._exit.cancel()
        with contextlib.suppress(ValueError):  # only the main thread can
            while self._heeded:
                signal.signal(self._heeded.pop(), signal.SIG_DFL)
        if self._session and self._store:
            with contextlib.suppress(StoreError):
                self._store.leave(ended_key(self.rank), reason or CLOSED)
            self._session.close(reason)
            if self._serves_store:
                self._let_others_leave(self._store, reason)
            self._store.close()
        self._writer.shutdown(wait=True)

    def _let_others_leave(self, store: Store, reason: str | None) -> None:
        """Wait until the other ranks have ended: they may still read the store, which ends with this process."""
        patience_s = self.options.deadline_s if reason is None else min(FAREWELL_S, self.options.deadline_s)
        end_s = time.monotonic() + patience_s
        with contextlib.suppress(StoreError):
            store.set(ended_key(0), reason or CLOSED)
            for rank in self.ranks[1:]:
                store.first([ended_key(rank)], max(0.0, end_s - time.monotonic()))

    def _at_exit(self) -> None:
        self.close(reason_of_exit(self.rank))

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(reason_of(self.rank, error))


class GraphAverager:
    """Averages the gradients of a compiled graph, which passes them in callbacks. A group serves one model.

    Parameters
    ----------
    group
        The group that averages.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._step: dict[str, NDArray[Any]] = {}

    def register(self, names: Sequence[str]) -> None:
        """Register the parameters, in forward order; a repeated call with the same names does nothing.

        Raises
        ------
        ValueError
            The group already has the parameters of another model; the message names some that differ.
        """
        known = _registered.get(self.group)
        if known is None:
            self.group.register(names)
            _registered[self.group] = list(names)
        elif list(names) != known:
            odd = sorted(set(names) ^ set(known)) or names
            raise ValueError(
                f"the group already averages another model, whose parameters differ in {', '.join(odd[:3])}; join "
                "another group for this model"
            )

    def hand_over(self, name: str, gradient: Any) -> None:
        """Start to average a copy of one gradient; called once per parameter and step."""
        self._step[name] = np.array(gradient)  # the framework's memory is read-only, or will be reused
        self.group.start(name, self._step[name])

    def collect(self, names: Sequence[str]) -> list[NDArray[Any]]:
        """End the step, and return the averages of these parameters, in the given order; called once per step."""
        self.group.end_step()
        return [self._step.pop(name) for name in names]


def _compare_names(mine: list[str], theirs: list[str], rank: int, other: int) -> None:
    """Raise ValueError if two ranks have registered different parameters."""
    for place, (name, their_name) in enumerate(zip_longest(mine, theirs)):
        if name != their_name:
            raise ValueError(
                f"parameter {place} is {name} on rank {rank} and {their_name} on rank {other}; all ranks must register "
                "the same names in the same order"
            )


def broadcast(
    endpoint: Endpoint, ranks: Sequence[int], step: int, data: NDArray[np.uint8], root: int, deadline_s: float
) -> None:
    """Copy the root's ``data`` into that of all ranks, along a binomial tree.

    Returns when this rank has the data, and when its children in the tree have it.

    Parameters
    ----------
    endpoint, ranks
        This rank's endpoint, and all ranks.
    step
        Number of a step in which nothing else is sent.
    data
        Shape (m,), m bytes; the same m on all ranks.
    root
        The rank whose data is copied.
    deadline_s
        Time limit of each message, in seconds.

    Raises
    ------
    ValueError
        The data has more parts than a step has message numbers; the message says what to do.
    TransportError
        A rank did not answer, or not in time; the message names it.
    """
    size = len(ranks)
    parent, children = binomial_tree(ranks.index(endpoint.connection.rank), ranks.index(root), size)
    label = f"broadcast of rank {root}"
    parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    if parts:
        broadcast_number(len(parts) - 1, max(0, (size - 1).bit_length() - 1), size)  # raises before anything is sent
    arriving = []
    if parent is not None:
        for index, part in enumerate(parts):
            key = MessageKey(step, broadcast_number(index, parent.hop, size))
            arriving.append(
                endpoint.receive(ReceiveRequest(ranks[parent.rank], key, len(part), RELIABLE, label, into=part))
            )
    sending = []
    for index, part in enumerate(parts):
        if parent is not None:
            _await(arriving[index], step, f"rank {ranks[parent.rank]}", label, deadline_s)
        tags = plain_tags(-(-len(part) // endpoint.connection.options.payload_bytes))
        for child in children:
            key = MessageKey(step, broadcast_number(index, child.hop, size))
            request = SendRequest(ranks[child.rank], key, memoryview(part.data), tags, RELIABLE, label)
            sending.append((ranks[child.rank], endpoint.send(request)))
    for receiver, sent in sending:
        _await(sent, step, f"rank {receiver}", label, deadline_s)


def _await(message: "Future[Any]", step: int, whom: str, label: str, deadline_s: float) -> None:
    try:
        message.result(deadline_s)
    except FutureTimeoutError:
        raise DeadlineError(f"step {step}: {label}: no answer from {whom} in {deadline_s:g} s") from None
