# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the controller."""

import shutil

import pytest

from dlcp.controller.compiled_program import CompiledProgram
from tests.controller.switches import Certificates, running


@pytest.fixture(scope="session")
def pipeline():
    return CompiledProgram()


@pytest.fixture(params=["builtin", "bmv2"])
def switch(request):
    """A switch that knows nothing yet."""
    with running(request.param) as started:
        yield started


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH; the package openssl brings it")
    return Certificates(tmp_path_factory.mktemp("certificates"))
