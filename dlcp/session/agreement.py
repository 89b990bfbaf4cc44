# SPDX-License-Identifier: Apache-2.0
"""Decisions that all ranks of a group take alike, through the store they met by, each within a deadline.

A collective operation cannot ask whether everybody is there: it hangs if somebody is not. The store can.
"""

import json
import time
from collections.abc import Iterable
from typing import Any, Final, Protocol

POLL_S: Final = 0.005
POLL_MAX_S: Final = 0.1


class Store(Protocol):
    """Where ranks tell each other; PyTorch's stores are such, and :class:`dlcp.session.store.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value that has been written."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all these keys have a value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` where the value is ``expected``, or where there is none and that is ``""``.

        Returns
        -------
        The value that the key has afterwards.
        """


class Agreement:
    """One matter for the ranks of a group to agree on.

    Parameters
    ----------
    store
        Where ranks tell each other; anything written there once stays.
    rank, size
        This rank, and how many there are.
    deadline_s
        How long it may take altogether, from now on.
    """

    VERDICT: Final = "verdict"

    def __init__(self, store: Store, rank: int, size: int, deadline_s: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self._end_s = time.monotonic() + deadline_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def tell(self, topic: str, what: Any) -> None:
        """Tell all ranks something, once; anything that JSON can hold."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(what))
        self.store.set(topic, str(self.rank))

    def told(self, topic: str, ranks: Iterable[int]) -> bool:
        """Tell whether all these ranks have spoken on a topic."""
        return bool(self.store.check([f"{topic}/{rank}" for rank in ranks]))

    def anyone_told(self, topic: str) -> bool:
        """Tell whether some rank has used :meth:`tell` on a topic."""
        return bool(self.store.check([topic]))

    def hear(self, topic: str) -> dict[int, Any]:
        """Return what each rank told, as soon as all have, a verdict has been passed, or time is up."""
        wait_s = POLL_S
        while not self.told(topic, range(self.size)) and self.verdict() is None and self.left_s:
            time.sleep(min(wait_s, self.left_s))
            wait_s = min(POLL_MAX_S, wait_s * 1.5)
        here = [rank for rank in range(self.size) if self.told(topic, [rank])]
        return {rank: json.loads(self.store.get(f"{topic}/{rank}")) for rank in here}

    def verdict(self) -> str | None:
        """Return what has been decided, or None."""
        if not self.store.check([self.VERDICT]):
            return None
        return bytes(self.store.get(self.VERDICT)).decode()

    def decide(self, proposal: str) -> str:
        """Propose a verdict; return the one in force: the first that any rank proposed."""
        return bytes(self.store.compare_set(self.VERDICT, "", proposal)).decode()
