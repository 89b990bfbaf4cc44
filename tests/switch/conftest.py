# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the built-in switch."""

import pytest

from dlcp.host import netlab


@pytest.fixture(scope="session")
def namespaces():
    """Skip, and say why, where network namespaces cannot be made."""
    works, reason = netlab.available()
    if not works:
        pytest.skip(f"needs network namespaces: {reason}")
    return netlab
