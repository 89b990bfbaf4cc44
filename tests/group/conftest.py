# SPDX-License-Identifier: Apache-2.0
"""Averages are compared with exact ones here, so gradients keep all bits unless a test says otherwise."""

import pytest


@pytest.fixture(autouse=True)
def _all_bits(monkeypatch):
    monkeypatch.setenv("DLCP_PRECISION", "32")
