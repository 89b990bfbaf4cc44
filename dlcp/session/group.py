# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that averages gradients, whatever framework they come from: parameters by name, values in NumPy."""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dlcp.closing import ExitCallback
from dlcp.collectives import Residual
from dlcp.collectives.choice import SERVER
from dlcp.collectives.message_numbers import broadcast_number
from dlcp.collectives.reduction_rules import check_samples, weigh
from dlcp.collectives.shards import binomial_tree
from dlcp.error_text import closest
from dlcp.ledger import Ledger
from dlcp.session.buckets import Buckets, FillingBucket, Gradient
from dlcp.session.joining import Agreement, NotJoinedError
from dlcp.session.options import Options
from dlcp.session.session import (
    DEADLINE_FACTOR,
    LEFT,
    Fallback,
    PeerWatch,
    PendingBucket,
    TrainingSession,
    reason_of,
    reason_of_exit,
)
from dlcp.session.store import Store, StoreChannel, StoreError, ended_key
from dlcp.tags import Tagger, layers_in_order, plain_tags
from dlcp.transport import (
    RELIABLE,
    DeadlineError,
    Endpoint,
    MessageKey,
    PeerAbortedError,
    RankEndedError,
    ReceiveRequest,
    SendRequest,
    TransportError,
)

log = logging.getLogger("dlcp")
_registered: "WeakKeyDictionary[Group, list[str]]" = WeakKeyDictionary()
"""The parameters of each group with a :class:`GraphAverager`: a group takes them once."""

CALL: Final = "dlcp.session.join"
FAREWELL_S: Final = 3.0
"""So long others may take to learn why rank 0 gives up, before its store ends with it. Chosen by us."""
CLOSED: Final = "it has left the group"
"""Why a rank has ended that has closed its group in order."""
RANKS: Final = "ranks"
"""The channel of what ranks do together between steps."""
PART_BYTES: Final = 1 << 24
"""Longer broadcasts go in messages of this size: what comes before somebody waits for it is held. Chosen by us."""


class StoreWatch(PeerWatch):
    """Ranks notice in their store, which rank 0 serves, that another one has left DLCP or ended; they recover over it.

    Parameters
    ----------
    store
        The ranks' store. It knows when a rank has ended.
    rank, size
        This rank, and the number of ranks.
    deadline_s
        Time limit of each exchange over the store.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline_s: float) -> None:
        self._store = store
        self._rank, self._size, self._deadline_s = rank, size, deadline_s
        self._others = [ended_key(other) for other in range(size) if other != rank]
        self._channels: dict[str, StoreChannel] = {}

    def channel(self, topic: str = "recovery") -> StoreChannel:
        """Return this rank's channel with this name."""
        if topic not in self._channels:
            self._channels[topic] = StoreChannel(self._store, topic, self._rank, range(self._size), self._deadline_s)
        return self._channels[topic]

    def check_peers(self, where: str) -> BaseException | None:
        """Look in the store for a rank that has left DLCP or ended."""
        try:
            found = self._store.first([LEFT, *self._others], 0)
        except StoreError as error:
            return RankEndedError(f"{error}; {where}")
        if found is None:
            return None
        key, text = found[0], found[1].decode()
        if key == LEFT:
            return PeerAbortedError(f"another rank has left DLCP: {text}")
        if text == CLOSED:
            self._others.remove(key)
            return None
        return RankEndedError(f"rank {key.rpartition('/')[2]} has ended: {text}; {where}")

    def publish_left(self, reason: str) -> None:
        """Write into the store that a rank has left DLCP."""
        self._store.compare_set(LEFT, "", reason)

    def publish_failed(self, reason: str) -> None:
        """Write into the store that this rank has ended: the others may wait for it."""
        with contextlib.suppress(StoreError):
            self._store.set(ended_key(self._rank), reason)
            self._store.compare_set(LEFT, "", reason)


def store_fallback(watch: StoreWatch, feedback: Residual) -> Fallback:
    """Return the fallback of ranks without a framework: rank 0 adds up over the store, slowly but to the end."""

    def add_up(pending: PendingBucket, done: Callable[[BaseException | None], None]) -> None:
        assert pending.bucket
        bucket = pending.bucket
        try:
            values: NDArray[Any] = bucket.value_type.widen(bucket.values).copy()
            feedback.apply(values, bucket.segments)  # nothing is lost on this way, so this is the last time
            channel = watch.channel(f"average of bucket {pending.sequence}")
            total = channel.add(values)
            bucket.values[:] = bucket.value_type.narrow(total / total.dtype.type(len(channel.ranks)))
        except Exception as problem:
            done(problem)
        else:
            done(None)

    def average(pending: PendingBucket, done: Callable[[BaseException | None], None]) -> None:
        # In a thread of its own: ranks need not come to buckets in the same order.
        threading.Thread(target=add_up, args=(pending, done), name="dlcp-store-add", daemon=True).start()

    return Fallback("the store, which is slow", average, watch)


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

    def join(self, master: str) -> None:
        """Open this rank's endpoint together with the other ranks; :func:`dlcp.session.join` does that."""
        assert self._store
        options, feedback = self.options, Residual()
        self._watch = StoreWatch(self._store, self.rank, self.size, options.deadline_s)
        self._session = TrainingSession(
            options,
            self.rank,
            range(self.size),
            store_fallback(self._watch, feedback),
            ledger=self.ledger,
            feedback=feedback,
            tagger=Tagger(options.classes()),
        )
        agreement = Agreement(self._store.under("joining"), self.rank, self.size, options.meet_s, host=master)
        try:
            self._session.join(agreement, call=CALL)
        except NotJoinedError as problem:
            self.close(str(problem))
            raise
        self.options = self._session.options

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint; None in a group of one, and where DLCP could not be used."""
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

    def register(self, names: Iterable[str]) -> None:
        """Register the model's parameters in forward order, which tags follow; all ranks the same ones, between steps.

        Raises
        ------
        ValueError
            A name comes twice, or the ranks have registered different names; the message says which.
        RuntimeError
            A step is under way.
        """
        listed = list(names)
        twice = [name for name, count in Counter(listed).items() if count > 1]
        if twice or not listed:
            raise ValueError(f"parameter {twice[0]} is registered twice" if twice else "there are no parameters")
        self._check_idle("parameters are registered")
        if self._watch:
            for rank, theirs in sorted(self._watch.channel(RANKS).gather(listed).items()):
                _compare_names(listed, theirs, self.rank, rank)
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
        gradient = Gradient.of(name, values)
        with self._lock:
            self._check_open()
            self._start(buckets, name, gradient)
            if self._session and not self._timer:
                self._timer = threading.Timer(self.options.deadline_s, self._expire, [buckets, self.step])
                self._timer.daemon = True
                self._timer.start()
        return gradient.future

    def samples(self, count: int) -> None:
        """Say how many samples this rank's gradients of the coming step will be the mean of.

        Every sample then counts the same, whichever rank has it; a rank may have none. It holds until another number is
        given. All ranks have to say ``Options(samples=...)``, for then they expect it. The sooner before the first
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
            if self._session is None:
                check_samples(count)
                return
            self._session.averager.set_samples(count)
            self._session.begin_step(self.step)

    def flush(self) -> None:
        """Let the coming step be whole, with what was lost or deferred before. All ranks must call it.

        To be called before the last step, and before one after which parameters are saved or tested.

        Raises
        ------
        RuntimeError
            The step is under way.
        """
        with self._lock:
            self._check_open()
            self._check_idle("a flush")
            if self._session:
                self._session.flush(self.step)

    def _expire(self, buckets: Buckets, step: int) -> None:
        """Fail if a bucket still waits for a parameter that nobody starts: whoever waits for the others must know."""
        with self._lock:
            lacking = buckets.lacking()
            if self.step != step or not lacking or not self._session:
                return
            error = DeadlineError(
                f"job {self.options.job}, step {step}: rank {self.rank} has not started {', '.join(lacking[:3])}"
                f"{' ...' if len(lacking) > 3 else ''} in {self.options.deadline_s:g} s, as it did in the first step; "
                "start all parameters at every step, or call end_step"
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
        averager = session.averager
        averaged = session.average(self.step, averager.first_sequence + filling.planned.sequence, bucket)
        filling.sent = True
        if averager.autotuner and self._buckets and self._buckets.all_sent:
            averager.autotuner.on_gradients_ready()
        averaged.add_done_callback(partial(self._on_averaged, filling))

    def _on_averaged(self, filling: FillingBucket, averaged: "Future[Any]") -> None:
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
            tuner = self._session.averager.autotuner if self._session else None
            if tuner and buckets.plan:
                tuner.gradient_bytes = buckets.plan.nbytes

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
        if self._session:
            self._session.check()

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
            if self._session is None or not len(data):
                return
            if self.active and self.endpoint and self.options.collective != SERVER:  # whose workers reach only that
                broadcast(self.endpoint, self.size, self.step, data, root, self.options.deadline_s)
                self.step += 1
            elif self._watch:
                self._watch.channel(RANKS).broadcast(data, root)

    def barrier(self) -> None:
        """Return when all ranks have come this far.

        Raises
        ------
        TransportError
            A rank has ended, or not come within the deadline; the message names it.
        """
        self._check_open()
        if self._watch:
            self._watch.channel(RANKS).gather(None)

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up.

        Rank 0, whose process has the ranks' store, waits for the others to leave too: for ``options.deadline_s`` at
        most, or with a ``reason`` until they are likely to know it.
        """
        if self._exit.is_fork:  # which has none of the threads, and must not take the job's part
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
        if self._session and self._store:
            with contextlib.suppress(StoreError):
                self._store.leave(ended_key(self.rank), reason or CLOSED)
            self._session.close(reason)
            if self.rank == 0:
                self._let_others_leave(self._store, reason)
            self._store.close()
        self._writer.shutdown(wait=True)

    def _let_others_leave(self, store: Store, reason: str | None) -> None:
        """Wait until the others have ended: the store ends with this process, and they may still read it."""
        patience_s = self.options.deadline_s if reason is None else min(FAREWELL_S, self.options.deadline_s)
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
        self.close(reason_of(self.rank, error))


class GraphAverager:
    """Averages the gradients of a compiled graph, whose callbacks hand them over; for one model.

    Parameters
    ----------
    group
        The ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._step: dict[str, NDArray[Any]] = {}

    def register(self, names: Sequence[str]) -> None:
        """Register the parameters, in forward order.

        Raises
        ------
        ValueError
            The group has the parameters of another model; the message names some.
        """
        known = _registered.get(self.group)
        if known is None:
            self.group.register(names)
            _registered[self.group] = list(names)
        elif list(names) != known:
            odd = sorted(set(names) ^ set(known)) or names
            raise ValueError(
                f"the group averages the gradients of another model, which differs in {', '.join(odd[:3])}; join "
                "another group for this one"
            )

    def hand_over(self, name: str, gradient: Any) -> None:
        """Start to average a gradient; a callback for each."""
        self._step[name] = np.array(gradient)  # the framework's own memory is read only, or is used again
        self.group.start(name, self._step[name])

    def collect(self, names: Sequence[str]) -> list[NDArray[Any]]:
        """End the step, and return the averages of these parameters; one callback that waits for all."""
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


def broadcast(endpoint: Endpoint, size: int, step: int, data: NDArray[np.uint8], root: int, deadline_s: float) -> None:
    """Write the root's ``data`` into that of all ranks; done when this rank has it, and those who get it from this one.

    Parameters
    ----------
    endpoint, size
        This rank's endpoint, and how many ranks there are.
    step
        A step in which nothing else is sent.
    data
        Shape (m,); of one length on all ranks.
    deadline_s
        How long each message may take.

    Raises
    ------
    ValueError
        The array has more parts than messages of a step can be numbered for; the message says what to do.
    TransportError
        A rank did not answer, or not in time; the message names it.
    """
    parent, children = binomial_tree(endpoint.connection.rank, root, size)
    label = f"broadcast of rank {root}"
    parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    if parts:
        broadcast_number(len(parts) - 1, max(0, (size - 1).bit_length() - 1), size)  # refused before anything is sent
    arriving = []
    if parent is not None:
        for index, part in enumerate(parts):
            key = MessageKey(step, broadcast_number(index, parent.hop, size))
            arriving.append(endpoint.receive(ReceiveRequest(parent.rank, key, len(part), RELIABLE, label, into=part)))
    sending = []
    for index, part in enumerate(parts):
        if parent is not None:
            _await(arriving[index], step, f"rank {parent.rank}", label, deadline_s)
        tags = plain_tags(-(-len(part) // endpoint.connection.options.payload_bytes))
        for child in children:
            key = MessageKey(step, broadcast_number(index, child.hop, size))
            request = SendRequest(child.rank, key, memoryview(part.data), tags, RELIABLE, label)
            sending.append((child.rank, endpoint.send(request)))
    for receiver, sent in sending:
        _await(sent, step, f"rank {receiver}", label, deadline_s)


def _await(message: "Future[Any]", step: int, whom: str, label: str, deadline_s: float) -> None:
    try:
        message.result(deadline_s)
    except FutureTimeoutError:
        raise DeadlineError(f"step {step}: {label}: no answer from {whom} in {deadline_s:g} s") from None
