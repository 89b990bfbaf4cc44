# SPDX-License-Identifier: Apache-2.0
"""Where the threads of a process are, told when one of them hangs."""

import faulthandler
import io
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType

_NO_FILE = (AttributeError, OSError, ValueError, RuntimeError, io.UnsupportedOperation)
"""What standard error raises that is closed, or is no file of the operating system."""


def where_threads_are() -> str:
    """Return the stack of each thread but this one, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(found)


class StandstillAlarm:
    """A context manager that prints all stacks when the process stands still: no thread runs that would postpone it.

    So it is where a thread holds Python's lock (the GIL) in a call of C that does not return. The alarm goes off in C,
    by :mod:`faulthandler`, and only where a user or ``dlcp train`` has enabled that: there is one alarm in a process.

    Parameters
    ----------
    after_s
        How long after it was last postponed the alarm goes off.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s

    def __enter__(self) -> "StandstillAlarm":
        self.postpone()
        return self

    def postpone(self) -> None:
        """Set the alarm anew."""
        if faulthandler.is_enabled():
            with suppress(*_NO_FILE):
                faulthandler.dump_traceback_later(self._after_s, file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if faulthandler.is_enabled():
            faulthandler.cancel_dump_traceback_later()
