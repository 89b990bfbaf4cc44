# SPDX-License-Identifier: Apache-2.0
"""Errors are reported in words, also those that have none."""

import subprocess

import pytest

from dlcp.inputs.error_text import describe


def test_an_error_without_a_message_is_told_by_type_and_place():
    with pytest.raises(AssertionError) as raised:
        raise AssertionError
    assert "AssertionError() in test_an_error_without_a_message" in describe(raised.value)
    assert f"{__file__}, line " in describe(raised.value)


def test_an_error_that_nobody_raised_is_told_by_type():
    assert describe(KeyError()) == "KeyError()"


def test_a_message_is_told_as_it_is():
    assert describe(OSError(2, "no such file")) == "[Errno 2] no such file"
    assert describe(subprocess.TimeoutExpired("ls", 3)) == "Command 'ls' timed out after 3 seconds"
