# SPDX-License-Identifier: Apache-2.0
"""The command line after ``pip install .``, without any extra."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlcp import cli


def _actions(parser, words=()):
    """Return the words of every command and of every action of one."""
    children = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found = [[*words]] if words else []
    for name, child in (children[0] if children else {}).items():
        found += _actions(child, (*words, name))
    return found


HELP = [[*words, "--help"] for words in _actions(cli.parser_of(cli.COMMANDS))]
INSTALL = {
    "train script.py": "PyTorch is not installed: pip install 'dlcp[torch]'",
    "train --live 9465 script.py": "--live: prometheus_client is missing: pip install 'dlcp[live]'",
    "doctor script.py": "pip install 'dlcp[torch]'",
    "plan vgg16 --workers 4 --rate-mbps 100": "pip install 'dlcp[sim]'",
    "live snapshots": "pip install 'dlcp[live]'",
    "bench allreduce": "pip install 'dlcp[torch]'",
    "server": "pip install 'dlcp[store]'",
    "demo": "pip install 'dlcp[demo]'",
    "switch --hosts 2": "pip install 'dlcp[switch]'",
    "sim list": "pip install 'dlcp[sim]'",
    "fabric check star.yaml": "pip install 'dlcp[fabric]'",
    "completion bash": "pip install 'dlcp[completion]'",
    "testbed status": "pip install 'dlcp[fabric,demo]'",
}
WITHOUT = {"doctor": (0, 1), "launch -n 1 true": (0,), "trace --out run.json nowhere": (1,)}
"""Commands that need no extra, and how they end here."""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what each command line says."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "script.py").touch()
    words = [*HELP, *map(str.split, [*INSTALL, *WITHOUT])]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.commands.without_extras", json.dumps(words)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=folder,
        capture_output=True,
        check=True,
        text=True,
    )
    return dict(zip(map(" ".join, words), json.loads(ran.stdout), strict=True))


def test_every_command_and_action_explains_itself(said):
    assert len(HELP) > 30
    for words in map(" ".join, HELP):
        status, out, err = said[words]
        assert (status, err) == (0, ""), words
        assert out.startswith("usage: dlcp"), words


@pytest.mark.parametrize("words", INSTALL)
def test_a_command_without_its_packages_says_in_one_line_what_to_install(said, words):
    status, out, err = said[words]
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("dlcp ")
    assert INSTALL[words] in err


@pytest.mark.parametrize("words", WITHOUT)
def test_a_command_that_needs_no_extra_works_without(said, words):
    status, _, err = said[words]
    assert status in WITHOUT[words]
    assert "Traceback" not in err
    assert "pip install" not in err
