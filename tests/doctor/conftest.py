# SPDX-License-Identifier: Apache-2.0
import pytest

from dlcp.host import netlab


@pytest.fixture(autouse=True)
def _nobody_chose_anything(monkeypatch, tmp_path):
    """No option comes from whoever runs the tests."""
    import os

    for name in [name for name in os.environ if name.startswith("DLCP_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def namespaces():
    """Skip, and say why, where network namespaces cannot be made."""
    works, reason = netlab.available()
    if not works:
        pytest.skip(f"needs network namespaces: {reason}")
    return netlab
