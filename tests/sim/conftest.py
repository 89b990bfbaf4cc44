# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.p4.outdated import outdated


@pytest.fixture(autouse=True)
def _reference_of_these_sources(monkeypatch):
    """Skip a test once it runs the compiled program as a reference, if that is older than its sources."""
    reason = outdated("v1model")
    if reason:
        monkeypatch.setattr("dlcp.sim.engines.reference.load_definition", lambda path: pytest.skip(reason))
