# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole."""

import importlib

import pytest

from dlcp.cli import main


def test_a_command_whose_packages_are_missing_says_how_to_get_them(monkeypatch, capsys):
    def without(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(importlib, "import_module", without)
    missing = "finsy"
    assert main(["fabric", "check", "fabric.yaml"]) == 2
    assert capsys.readouterr().err == "dlcp fabric: finsy is missing: pip install 'dlcp[fabric]'\n"
    missing = "dlcp.controller.lost"
    with pytest.raises(ModuleNotFoundError):
        main(["fabric", "check", "fabric.yaml"])
