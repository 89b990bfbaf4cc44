# SPDX-License-Identifier: Apache-2.0
"""Both engines, for tests that must pass with either: ``pytestmark = pytest.mark.usefixtures("engine")``."""

import pytest

import dlcp.native
from dlcp.transport import native_engine as native
from tests.transport.network import Network

COMPILED = {"C": True, "NumPy": False}


def is_here(name):
    return not COMPILED[name] or native.available()


@pytest.fixture(params=list(COMPILED))
def engine(request, monkeypatch):
    """The name of the engine that networks and endpoints get while the test runs."""
    if not is_here(request.param):
        pytest.skip(f"the engine in C is not here: {dlcp.native.status()}")
    made = []
    monkeypatch.setattr(Network, "compiled", COMPILED[request.param])
    monkeypatch.setattr(Network, "made", made)
    if COMPILED[request.param]:
        yield request.param
    else:
        with dlcp.native.switched_off():
            yield request.param
    for network in made:
        for protocol in network.ranks:
            protocol._engine.release()
