# SPDX-License-Identifier: Apache-2.0
"""Completion of the command line in a shell."""

import subprocess

import pytest

from dlcp.cli import main

pytest.importorskip("shtab")
WORDS = {
    "tr": "train trace",
    "sim sw": "sweep",
    "fabric ": "check plan apply watch status",
    "sim run --engine fl": "flows",
    "sim run fct_1": "fct_144",
    "sim run my": "my.yaml",
    "sim run fct_144 --qui": "--quick",
    "train --tr": "--trace",
    "train my": "my.yaml",
    "trace fo": "folder",
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


def test_bash_completes_commands_options_choices_files_and_experiments(script, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "my.yaml").touch()
    asked = "".join(_ASK.format(words=words, last=words.rpartition(" ")[2]) for words in WORDS)
    ran = subprocess.run(
        ["bash"], input=script("bash") + asked, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert dict(zip(WORDS, ran.stdout.splitlines(), strict=True)) == WORDS
    assert not ran.stderr


def test_zsh_has_the_same(script):
    text = script("zsh")
    assert text.startswith("#compdef dlcp")
    assert all(name in text for name in ("--watch-only[", "compadd ablation ", "leaf-spine", ":script:_files"))
