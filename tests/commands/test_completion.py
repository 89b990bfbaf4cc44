# SPDX-License-Identifier: Apache-2.0
"""Completion of the command line in a shell."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dlcp.cli import main

pytest.importorskip("shtab")
WORDS = {
    "tr": "train trace",
    "sim sw": "sweep",
    "fabric ": "check plan apply watch status export",
    "sim run --engine fl": "flows",
    "sim run fct_1": "fct_144",
    "sim run my": "my.yaml",
    "sim run fct_144 --qui": "--quick",
    "train --tr": "--trace",
    "train my": "my.yaml",
    "trace fo": "folder",
    "trace folder fo": "folder",
    "train my.yaml my": "my.yaml",
    "sim sweep ablation fct": "fct_144",
    "sim compare ablation fct": "fct_144",
}
_ASK = """
COMP_WORDS=(dlcp {words}); [ -n "{last}" ] || COMP_WORDS+=(""); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
_shtab_dlcp dlcp "{last}"; echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture
def script(capsys):
    """Return a shell's script."""

    def printed(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def folder(tmp_path):
    """A folder with what is completed besides DLCP's own names."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "my.yaml").touch()
    return tmp_path


def test_bash_completes_commands_options_choices_files_and_experiments(script, folder):
    asked = "".join(_ASK.format(words=words, last=words.rpartition(" ")[2]) for words in WORDS)
    ran = subprocess.run(["bash"], input=script("bash") + asked, cwd=folder, capture_output=True, text=True, check=True)
    assert dict(zip(WORDS, ran.stdout.splitlines(), strict=True)) == WORDS
    assert not ran.stderr


def test_zsh_completes_the_same(script, folder, tmp_path_factory):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    functions, answers = tmp_path_factory.mktemp("functions"), tmp_path_factory.mktemp("answers")
    (functions / "_dlcp").write_text(script("zsh"))
    asked = ["zsh", "-f", Path(__file__).with_name("press_tab.zsh"), functions, answers, *WORDS]
    ran = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    offered = dict(zip(WORDS, map(str.split, ran.stdout.splitlines()), strict=True))
    assert {words: set(offered[words]) for words in WORDS} == {words: set(WORDS[words].split()) for words in WORDS}


def test_zsh_has_the_same_script(script):
    text = script("zsh")
    assert text.startswith("#compdef dlcp")
    assert all(name in text for name in ("--watch-only[", "compadd ablation ", "leaf-spine", "*:script:_files"))
