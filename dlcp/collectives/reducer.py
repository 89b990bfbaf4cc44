# SPDX-License-Identifier: Apache-2.0
"""What averages buckets, however it does so; and what all that do have in common while one is under way."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.collectives.salvage import Salvage


class Reducer(Protocol):
    """What averages buckets over the ranks."""

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on."""

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket; the future's result is ``bucket.values``, written in place."""


@runtime_checkable
class Salvageable(Protocol):
    """A reducer that can tell what it holds when it has failed."""

    def salvage(self) -> list[Salvage]:
        """Return what this rank holds of buckets that are not finished."""


class Course:
    """One bucket's way, of which the parts that take long are done in a thread for that.

    Parameters
    ----------
    step, sequence, bucket
        Training step, number of the bucket within it, and the bucket.
    work
        Where that is.

    Attributes
    ----------
    done
        The result: ``bucket.values``.
    """

    def __init__(self, step: int, sequence: int, bucket: Bucket, work: Executor) -> None:
        if not bucket.values.flags.c_contiguous or not bucket.values.flags.writeable:
            raise ValueError(f"step {step}, bucket {sequence}: values must be contiguous and writable")
        self.step, self.sequence, self.bucket = step, sequence, bucket
        self.done: Future[NDArray[np.generic]] = Future()
        self._work = work

    @property
    def label(self) -> str:
        """The bucket's layers, for error messages."""
        names = [self.bucket.segments[0].layer.name, self.bucket.segments[-1].layer.name]
        return "..".join(dict.fromkeys(names))

    def aside(self, action: Callable[[], None]) -> None:
        """Do what takes long in the thread for that."""

        def act() -> None:
            try:
                action()
            except Exception as error:
                self.fail(error)

        try:
            self._work.submit(act)
        except RuntimeError as error:  # the interpreter ends
            self.fail(error)

    def guard(self, action: Callable[[Any], None]) -> "Callable[[Future[Any]], None]":
        """Return what does something with the result of a future, and fails if either does."""

        def on_done(future: "Future[Any]") -> None:
            try:
                action(future.result())
            except Exception as error:
                self.fail(error)

        return on_done

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.done.done():
            self.done.set_exception(error)
