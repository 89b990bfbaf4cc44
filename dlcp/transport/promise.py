# SPDX-License-Identifier: Apache-2.0
"""What waits for messages: futures for one thread, and the messages that resolve them.

There are two futures to every message. One that any thread may wait for has a lock, a condition and a dozen objects
more, all of which Python's collector looks at while the message is on its way.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from dlcp.transport.messages import Arrival, Bytes, Delivery, LossBound, ReceiveRequest, SendRequest

T = TypeVar("T")
_PENDING: Any = object()
_NOT_DONE: Final = "not done yet, and who alone could bring it about asks for it"
log = logging.getLogger("dlcp")


class Promise(Future[T]):
    """A future that only one thread uses, which therefore cannot wait for it. It cannot be cancelled."""

    def __init__(self) -> None:
        self._outcome: T = _PENDING
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], object]] | None = []
        """None once it is done."""

    def __repr__(self) -> str:
        return f"<Promise, {'done' if self.done() else 'not done'}>"

    def done(self) -> bool:
        """Return whether it has a result or an exception."""
        return self._callbacks is None

    def cancel(self) -> bool:
        """Return False: it cannot be cancelled."""
        return False

    def cancelled(self) -> bool:
        """Return False."""
        return False

    def running(self) -> bool:
        """Return whether it is not done."""
        return not self.done()

    def result(self, timeout: float | None = None) -> T:
        """Return the result.

        Raises
        ------
        InvalidStateError
            It is not done. Whatever it was given instead of a result is raised, too.
        """
        if self._callbacks is not None:
            raise InvalidStateError(_NOT_DONE)
        if self._error is not None:
            raise self._error
        return self._outcome

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception, None if there is a result.

        Raises
        ------
        InvalidStateError
            It is not done.
        """
        if self._callbacks is not None:
            raise InvalidStateError(_NOT_DONE)
        return self._error

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn`` with this once it is done, or now if it is."""
        if self._callbacks is None:
            self._call([fn])
        else:
            self._callbacks.append(fn)

    def set_result(self, result: T) -> None:
        """Be done, with a result.

        Raises
        ------
        InvalidStateError
            It is done.
        """
        self._finish(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        """Be done, with an exception.

        Raises
        ------
        InvalidStateError
            It is done.
        """
        self._finish(_PENDING, exception)

    def _finish(self, outcome: T, error: BaseException | None) -> None:
        callbacks = self._callbacks
        if callbacks is None:
            raise InvalidStateError("done already")
        self._outcome, self._error, self._callbacks = outcome, error, None
        self._call(callbacks)

    def _call(self, callbacks: list[Callable[[Any], object]]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("what was to follow a message failed")


@dataclass(slots=True)
class Sending:
    """A message until its receiver has confirmed it."""

    request: SendRequest
    """It holds the bytes that the engine reads."""
    bound: LossBound
    started_s: float
    deadline_s: float
    copy: Bytes | None = None
    """What the engine reads instead of the payload, see ``Endpoint.detach``."""
    done: Promise[Delivery] = field(default_factory=Promise)


@dataclass(slots=True)
class Receiving:
    """A posted receive until its message is complete."""

    request: ReceiveRequest
    bound: LossBound
    started_s: float
    deadline_s: float
    payload: Bytes
    """Where the engine puts the message, without its tail."""
    clear: bool
    """Whether missing packets are to read as zeros."""
    done: Promise[Arrival] = field(default_factory=Promise)
