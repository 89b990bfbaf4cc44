# SPDX-License-Identifier: Apache-2.0
"""Futures that only one thread uses."""

from concurrent.futures import InvalidStateError

import pytest

from dlcp.transport.promise import Promise


def test_who_asked_is_called_with_the_result_in_order_and_late_comers_at_once():
    promise, called = Promise(), []
    for number in range(3):
        promise.add_done_callback(lambda done, number=number: called.append((number, done.result())))
    assert not promise.done()
    assert promise.running()
    promise.set_result("there")
    assert called == [(0, "there"), (1, "there"), (2, "there")]
    promise.add_done_callback(lambda done: called.append(done.exception()))
    assert called[3:] == [None]
    assert (promise.done(), promise.running(), promise.cancel(), promise.cancelled()) == (True, False, False, False)


def test_an_exception_is_raised_to_whoever_wants_the_result():
    promise = Promise()
    promise.set_exception(OSError("gone"))
    assert isinstance(promise.exception(), OSError)
    with pytest.raises(OSError, match="gone"):
        promise.result()


def test_nothing_is_done_twice_or_waited_for():
    promise = Promise()
    for ask in (promise.result, promise.exception):
        with pytest.raises(InvalidStateError, match="not done"):
            ask(1.0)
    promise.set_result(1)
    for end in (promise.set_result, promise.set_exception):
        with pytest.raises(InvalidStateError, match="done already"):
            end(None)
    assert promise.result() == 1


def test_a_callback_that_fails_stops_neither_the_others_nor_whoever_keeps_the_promise(caplog):
    promise, called = Promise(), []
    promise.add_done_callback(lambda done: 1 / 0)
    promise.add_done_callback(called.append)
    promise.set_result(None)
    assert called == [promise]
    assert "ZeroDivisionError" in caplog.text


def test_it_tells_what_it_is():
    promise = Promise()
    assert repr(promise) == "<Promise, not done>"
    promise.set_result(5)
    assert repr(promise) == "<Promise, done>"
