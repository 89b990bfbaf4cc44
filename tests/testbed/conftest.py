# SPDX-License-Identifier: Apache-2.0
"""Tests that bring a testbed up take root and minutes; `make test-testbed` asks for them."""

import os

import pytest

from dlcp.controller.testbed.requirements import missing

ASKED = os.environ.pop("DLCP_TESTBED", "")
"""No longer in the environment: DLCP refuses variables with its prefix that are no options."""


@pytest.fixture
def needs():
    """Skip unless testbeds are asked for and there is all they need, which is named if not."""

    def check(kind):
        if not ASKED:
            pytest.skip("testbeds take root and minutes: `make test-testbed` brings them up")
        lacking = missing(kind)
        if lacking:
            pytest.skip(f"a testbed with {kind} needs {'; '.join(lacking)}")

    return check


@pytest.fixture
def name(request):
    """A testbed's name that no other test uses; nothing of it remains at the end."""
    lifecycle = pytest.importorskip("dlcp.controller.testbed.lifecycle", reason="needs finsy: pip install dlcp[fabric]")
    chosen = f"t{os.getpid() % 10000}"
    yield chosen
    lifecycle.down(chosen)
