# SPDX-License-Identifier: Apache-2.0
import pytest
from threadpoolctl import threadpool_limits

from tests.transport.network import Network


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_decomposition():
    """Small decompositions, on a machine that does other things too, take longer with more threads."""
    with threadpool_limits(1):
        yield


@pytest.fixture(autouse=True)
def released(monkeypatch):
    """Let networks in virtual time give back what their engines hold."""
    made = []
    monkeypatch.setattr(Network, "made", made)
    yield
    for network in made:
        for protocol in network.ranks:
            protocol._engine.release()
