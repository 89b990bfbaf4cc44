# SPDX-License-Identifier: Apache-2.0
import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_decomposition():
    """Small decompositions, on a machine that does other things too, take longer with more threads."""
    with threadpool_limits(1):
        yield
