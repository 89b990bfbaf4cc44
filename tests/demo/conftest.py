# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.demo.synthetic_runs import make_runs


@pytest.fixture
def runs():
    return make_runs(steps=60)
