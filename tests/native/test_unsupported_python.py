# SPDX-License-Identifier: Apache-2.0
"""On a Python that DLCP does not support, a failed import says so."""

import importlib
import sys
import sysconfig

import pytest

import dlcp.native


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"Py_GIL_DISABLED": 1}, "does not support free-threaded builds of Python"),
        ({"HOST_GNU_TYPE": "x86_64-alpine-linux-musl"}, "not tested with musl"),
    ],
)
def test_a_failed_import_names_the_kind_of_python(monkeypatch, variables, why):
    monkeypatch.setattr(sysconfig, "get_config_var", variables.get)
    monkeypatch.setitem(sys.modules, "dlcp.native._native", None)  # its import fails
    specification = importlib.util.spec_from_file_location("dlcp.native", dlcp.native.__file__)
    with pytest.raises(ImportError, match=why):
        specification.loader.exec_module(importlib.util.module_from_spec(specification))
