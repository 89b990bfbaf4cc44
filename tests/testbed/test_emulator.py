# SPDX-License-Identifier: Apache-2.0
"""Mininet in this process does not change what others do in it."""

import logging

import pytest

from dlcp.controller.testbed import requirements
from dlcp.controller.testbed.requirements import mininet_folder


def test_mininet_leaves_the_loggers_of_others_alone():
    if mininet_folder() is None:
        pytest.skip("Mininet is not installed")
    before = logging.getLoggerClass()
    requirements.load_mininet("node")
    assert logging.getLoggerClass() is before
