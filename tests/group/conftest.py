# SPDX-License-Identifier: Apache-2.0
"""Averages are compared with exact ones here, so gradients keep all bits unless a test says otherwise."""

import pytest


@pytest.fixture(autouse=True)
def _all_bits(monkeypatch):
    monkeypatch.setenv("DLCP_PRECISION", "32")


@pytest.fixture
def start():
    """A function that starts trainings of processes, which end with the test."""
    from tests.group.elastic_jobs import jobs  # needs gRPC, as not all tests here do

    with jobs() as function:
        yield function
