# SPDX-License-Identifier: Apache-2.0
"""A collective operation in progress: many messages, one completion."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dlcp.collectives.direct import COPY_BYTES_PER_S, PATIENCE_S
from dlcp.transport import Then, TransportError

Later = Callable[[float, Callable[[], None]], None]


class Operation:
    """Done when all its parts are done; fails as soon as one fails.

    The caller starts parts inside a ``with``, so that the operation cannot end before the last part has started.

    Parameters
    ----------
    where
        Its name for error messages: rank, group, collective and number.
    on_failure
        Called once if a part fails, with the error.
    later
        Calls a function after some seconds, in the endpoint's thread.
    """

    def __init__(self, where: str, on_failure: Callable[[TransportError], None], later: Later | None = None) -> None:
        self.where = where
        self.done: Future[None] = Future()
        self._on_failure = on_failure
        self._later = later
        self._lock = threading.Lock()
        self._open = 1
        self._ended = False
        self._sent_in_place: dict[int, tuple[int, Callable[[], None]]] = {}
        self._serial = 0

    def __enter__(self) -> "Operation":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
            return
        self._close_one()

    def hold(self) -> "Operation":
        """Keep the operation open until one more ``with`` ends."""
        with self._lock:
            self._open += 1
        return self

    def part(self, action: Callable[[Any], None] | None = None) -> Then[Any]:
        """Keep the operation open until the returned callback gets a message, which it passes to ``action``."""
        self.hold()

        def conclude(result: Any) -> None:
            if action:
                action(result)
            self._close_one()

        return conclude

    def part_in_place(self, size: int, detach: Callable[[], None]) -> Then[Any]:
        """Keep the operation open until a message is delivered, or, if it is the last part, copied.

        ``detach``, called in the endpoint's thread, copies its ``size`` bytes. The returned callback takes the
        message's outcome.
        """
        with self._lock:
            self._serial += 1
            serial = self._serial
            self._sent_in_place[serial] = size, detach

        def conclude(_: object) -> None:
            with self._lock:
                self._sent_in_place.pop(serial, None)
                over = self._is_over()
            if over:
                self.done.set_result(None)

        return conclude

    def fail(self, error: BaseException) -> None:
        """End with an error that names the operation; only the first error counts."""
        kind = type(error) if isinstance(error, TransportError) else TransportError
        what = str(error) if isinstance(error, TransportError) else repr(error)
        failure = kind(f"{self.where} failed: {what}")
        failure.__cause__ = error
        with self._lock:
            over, self._ended = not self._ended, True
        if over:
            self.done.set_exception(failure)
        self._on_failure(failure)

    def _close_one(self) -> None:
        with self._lock:
            self._open -= 1
            over = self._is_over()
            size = 0 if self._open or self._ended else sum(size for size, _ in self._sent_in_place.values())
        if over:
            self.done.set_result(None)
        elif size and self._later:
            self._later(PATIENCE_S + 2 * size / COPY_BYTES_PER_S, self._detach)

    def _is_over(self) -> bool:
        """Return True to the caller that must end the operation, if it is over. Call it with the lock held."""
        over = not (self._open or self._sent_in_place or self._ended)
        self._ended |= over
        return over

    def _detach(self) -> None:
        with self._lock:
            unconfirmed = [] if self._ended else list(self._sent_in_place.values())
        for _, detach in unconfirmed:
            detach()
        with self._lock:
            self._sent_in_place.clear()
            over = self._is_over()
        if over:
            self.done.set_result(None)
