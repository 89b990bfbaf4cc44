# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole."""

import importlib
import os
import sys

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


def test_without_a_command_it_says_where_to_begin(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "where to begin:\n  dlcp doctor" in capsys.readouterr().out


def test_a_reader_that_leaves_ends_a_command_quietly(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["--help"]) == 141
