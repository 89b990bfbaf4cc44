# SPDX-License-Identifier: Apache-2.0
"""Waiting for so long and no longer, without missing that the wait was cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def within(answer: Coroutine[Any, Any, _T], deadline_s: float) -> _T:
    """Return what ``answer`` returns.

    Not ``asyncio.wait_for``: before Python 3.12 it returns the answer and forgets the cancellation where both come
    together, so that a task which was told to end goes on.

    Raises
    ------
    asyncio.TimeoutError
        It took longer than ``deadline_s``; it has been cancelled.
    """
    task = asyncio.ensure_future(answer)
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        await stopped(task)
        raise
    if not done:
        await stopped(task)
        raise asyncio.TimeoutError
    return task.result()


async def stopped(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end, however it ends."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen: nobody else asks
