# SPDX-License-Identifier: Apache-2.0
"""The handle that a collective of the ``dlcp`` backend returns at once, to wait for."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlcp.torch.framework import profiled

_CALLBACKS = ThreadPoolExecutor(8, "dlcp-callbacks")
"""Users' callbacks on futures may wait for other collectives, so they must not block the threads that run those."""


class Work(dist.Work):
    """A collective in progress.

    Parameters
    ----------
    what
        Its name, for error messages.
    answer
        The future that :meth:`get_future` returns; for tensors on a device, one that knows the device.
    done
        The future that completes it; its result, if a number, is the rank that a message came from. Without it,
        :meth:`succeed` or :meth:`fail` complete it.
    value
        The future's value.
    """

    def __init__(
        self,
        what: str,
        answer: "torch.futures.Future[Any] | None" = None,
        *,
        done: "Future[Any] | None" = None,
        value: Any = None,
    ) -> None:
        super().__init__()
        self.what = what
        self._done: Future[Any] = done or Future()
        self._value = value
        self._raw = answer
        self._answer = answer.then(_value_or_error) if answer is not None else None
        self._lock = threading.Lock()

    def succeed(self, value: Any, source: int | None = None) -> None:
        """Complete it; ``value`` is the future's result, ``source`` the rank that a message came from.

        On a device the stream that writes the tensors must be the current one, and the thread not the endpoint's.
        """
        self._value = value
        if self._raw is not None:
            self._raw.set_result(value)
        self._done.set_result(source)

    def fail(self, error: BaseException) -> None:
        """Complete it with an error for all waiters."""
        self._done.set_exception(error)
        if self._raw is not None:
            call_aside(partial(self._raw.set_result, error))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done; on a device, let the current stream wait.

        Raises
        ------
        dlcp.transport.TransportError
            It failed; the message names group, rank, collective and number.
        TimeoutError
            It takes longer than ``timeout`` (0 waits as long as the group's own timeout).
        """
        limit_s = timeout.total_seconds()
        try:
            with profiled("wait", self.what):
                self._done.result(limit_s if limit_s > 0 else None)
        except FutureTimeoutError as error:
            if self._done.done():
                raise
            raise TimeoutError(f"{self.what} is not done after {limit_s:.1f} s") from error
        if self._raw is not None:
            self.get_future().wait()
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return the future; its value is the list of output tensors."""
        with self._lock:
            if self._answer is not None:
                return self._answer
            # Made on demand: most callers do not need it, and it costs as much as all else here.
            raw: torch.futures.Future[Any] = torch.futures.Future()
            # C++ does not see an error set on a Future in Python, only one raised by a callback.
            self._answer = raw.then(_value_or_error)

        def answer(done: "Future[Any]", call: Callable[[Callable[[], Any]], Any] = call_aside) -> None:
            call(partial(raw.set_result, done.exception() or self._value))

        if self._done.done():  # set it here and now: after wait(), callers expect a completed future
            answer(self._done, lambda set_result: set_result())
        else:
            self._done.add_done_callback(answer)
        return self._answer

    def is_completed(self) -> bool:
        """Return whether it has ended, successfully or not."""
        return self._done.done()

    def is_success(self) -> bool:
        """Return whether it has ended successfully."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error that it ended with, or None."""
        return self._done.exception() if self._done.done() else None

    def result(self) -> Any:
        """Wait for it and return the output tensors."""
        self.wait()
        return self._value

    def synchronize(self) -> None:
        """Wait until it is done."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that a message from any rank came from."""
        self.wait()
        source: int | None = self._done.result()
        if source is None:
            raise RuntimeError(f"{self.what} has no source")
        return source

    _source_rank = source_rank


def call_aside(function: Callable[[], Any]) -> None:
    """Call a function that may wait for collectives, in a thread that none of them needs."""
    try:
        _CALLBACKS.submit(function)
    except RuntimeError:  # the interpreter is shutting down: no thread can be started, and none waits any more
        function()


def joined(what: str, works: Sequence[Work], value: Any) -> Work:
    """Return work that is done when all of ``works`` are."""
    if len(works) == 1:
        return works[0]
    whole = Work(what)
    count_down = CountDown(len(works), lambda: whole.succeed(value), whole.fail)
    for work in works:
        work._done.add_done_callback(count_down.one_done)
    if not works:
        whole.succeed(value)
    return whole


class Issuer:
    """A thread that starts collectives in order, after waiting for their copies from a device."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"dlcp-{name}-issue", daemon=True)
        self._thread.start()

    def submit(self, begin: Callable[[], None]) -> None:
        """Start a collective after those submitted before."""
        self._queue.put(begin)

    def close(self) -> None:
        """Stop after all submitted collectives."""
        self._queue.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (begin := self._queue.get()) is not None:
            begin()


class CountDown:
    """Calls ``over`` once when ``count`` futures are done, or ``failed`` with the first error."""

    def __init__(self, count: int, over: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        self._left, self._over, self._failed = count, over, failed
        self._lock = threading.Lock()

    def one_done(self, future: "Future[Any]") -> None:
        """Count a future that is done; for ``add_done_callback``."""
        error = future.exception()
        with self._lock:
            if self._left == 0:
                return
            self._left = 0 if error else self._left - 1
            over = self._left == 0
        if error:
            self._failed(error)
        elif over:
            self._over()


def _value_or_error(future: "torch.futures.Future[Any]") -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value
