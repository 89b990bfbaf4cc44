# SPDX-License-Identifier: Apache-2.0
"""A collective operation under way: many messages, one end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dlcp.transport import TransportError


class Operation:
    """Done when all its parts are; failed as soon as one fails.

    Whoever starts it holds it open with ``with``, so that it cannot end before its last part is known.

    Parameters
    ----------
    where
        What it is, for error messages: rank, group, collective and number.
    on_failure
        Called once if a part fails, with the error.
    """

    def __init__(self, where: str, on_failure: Callable[[TransportError], None]) -> None:
        self.where = where
        self.done: Future[None] = Future()
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._open = 1
        self._ended = False

    def __enter__(self) -> "Operation":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
            return
        self._close_one()

    def wait_for(self, part: "Future[Any]", then: Callable[[Any], None] | None = None) -> None:
        """Stay open until ``part`` is done and ``then`` has been called with its result."""
        with self._lock:
            self._open += 1

        def on_done(future: "Future[Any]") -> None:
            try:
                result = future.result()
                if then:
                    then(result)
            except BaseException as error:  # a cancelled future among them: whoever waits must hear of everything
                self.fail(error)
            else:
                self._close_one()

        part.add_done_callback(on_done)

    def fail(self, error: BaseException) -> None:
        """End with an error that says where it happened; only the first one counts."""
        kind = type(error) if isinstance(error, TransportError) else TransportError
        what = str(error) if isinstance(error, TransportError) else repr(error)
        failure = kind(f"{self.where} failed: {what}")
        failure.__cause__ = error
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.done.set_exception(failure)
        self._on_failure(failure)

    def _close_one(self) -> None:
        with self._lock:
            self._open -= 1
            over = self._open == 0 and not self._ended
            self._ended |= over
        if over:
            self.done.set_result(None)
