# SPDX-License-Identifier: Apache-2.0
"""Waits of the controller: they end in time, and never swallow that somebody ends them."""

import asyncio

import pytest

from dlcp.controller.switch_client import stopped, within


def test_an_answer_in_time_is_returned_and_its_error_raised():
    async def answer():
        await asyncio.sleep(0)
        return 7

    async def refusal():
        await asyncio.sleep(0)
        raise ValueError("no")

    assert asyncio.run(within(answer(), 5)) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(within(refusal(), 5))


def test_what_takes_longer_is_cancelled():
    ended = []

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(within(never(), 0.01))
    assert ended == [True]


@pytest.mark.parametrize("answered_first", [True, False])
def test_a_wait_that_is_cancelled_just_when_the_answer_comes_is_cancelled(answered_first):
    """asyncio.wait_for returns the answer then (before Python 3.12), and a task that was told to end goes on."""

    async def both_at_once():
        came = asyncio.get_running_loop().create_future()

        async def answer():
            return await came

        waiting = asyncio.ensure_future(within(answer(), 5))
        await asyncio.sleep(0.01)  # it waits by then, however it has come to
        came.set_result(7)
        for _ in range(answered_first):  # the answer is there, and the waiter has not been told yet
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=5)
        return waiting.cancelled()

    assert asyncio.run(both_at_once())


def test_a_task_that_is_stopped_has_ended_whatever_it_makes_of_it():
    async def stubborn():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("in the middle of it") from None

    async def run():
        task = asyncio.ensure_future(stubborn())
        await asyncio.sleep(0)
        await stopped(task)
        return task.done()

    assert asyncio.run(run())
