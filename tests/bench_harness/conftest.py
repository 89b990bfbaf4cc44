# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the benchmarks."""

import pytest

from dlcp.host import netlab


@pytest.fixture(scope="session")
def bench_namespaces():
    """Skip, and say why, where network namespaces cannot be made."""
    works, reason = netlab.available()
    if not works:
        pytest.skip(f"needs network namespaces: {reason}")
