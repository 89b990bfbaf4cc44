# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole."""

import os
import re
import sys

import pytest

from dlcp import cli
from dlcp.cli import main
from dlcp.commands import fabric


def test_a_command_whose_packages_are_missing_says_how_to_get_them(monkeypatch, capsys):
    def without(_arguments):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(fabric, "run", without)
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


@pytest.mark.parametrize(
    ("words", "torchrun", "script"),
    [
        ("script.py", "", "script.py"),
        ("-- script.py --steps 3", "", "script.py --steps 3"),
        (
            "--standalone --nproc-per-node 2 script.py --n 3 -- x",
            "--standalone --nproc-per-node 2",
            "script.py --n 3 -- x",
        ),
        ("--nproc_per_node=2 -m module --help", "--nproc_per_node=2", "-m module --help"),
        ("--nproc-per-node 2 --module module", "--nproc-per-node 2", "-m module"),
        ("--option loss_bound=0 --measure script.py --option x=1", "", "script.py --option x=1"),
        ("--max-rest 3 -- script.py", "--max-rest 3", "script.py"),
        ("--max-rest 3 script.py --max-rest 4", "--max-rest 3", "script.py --max-rest 4"),
        ("--stand script.py -- --stand", "--stand", "script.py -- --stand"),
        ("-r3 script.py -- -r 3", "-r3", "script.py -- -r 3"),
    ],
)
def test_a_script_begins_where_the_options_end(words, torchrun, script):
    pytest.importorskip("torch")
    arguments = cli.parse(["train", *words.split()])
    assert arguments.torchrun == torchrun.split()
    assert arguments.script == script.split()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("train --bogus 1 script.py", "dlcp train: --bogus is no option of dlcp train or torchrun\n"),
        ("train --bogus=1 script.py", "--bogus is no option"),
        ("train --trce x.json script.py", "--trce is no option of dlcp train or torchrun; did you mean --trace?"),
        (
            "train --nproc-per-nod=2 --nprocpernode 2 script.py",
            "--nprocpernode is no .*; did you mean --nproc.per.node?",
        ),
        ("train --nnodes 1 -z 3 script.py", "-z is no option"),
        ("doctor --liste", "dlcp doctor: --liste is no option of dlcp doctor or torchrun; did you mean --listen?"),
        ("launch --port 3 -- true", "dlcp launch: --port is no option of dlcp launch"),
    ],
)
def test_an_unknown_option_is_named_and_not_its_value(capsys, words, problem):
    pytest.importorskip("torch")
    with pytest.raises(SystemExit) as stopped:
        cli.parse(words.split())
    assert stopped.value.code == 2
    assert re.search(problem, capsys.readouterr().err)


@pytest.mark.parametrize("words", ["--vers", "sim list --js", "fabric plan star.yaml --js", "bench allreduce --ite 3"])
def test_options_have_no_abbreviations(capsys, words):
    with pytest.raises(SystemExit) as stopped:
        cli.parse(words.split())
    assert stopped.value.code == 2
    assert "argument" in capsys.readouterr().err


def test_a_mistyped_command_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.parse(["trian"])
    assert stopped.value.code == 2
    assert "there is no command 'trian'; dlcp --help lists them; did you mean train?" in capsys.readouterr().err


EXAMPLES = [line.split("  ")[0] for command in cli.COMMANDS.values() for line in command.examples.strip().splitlines()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_in_the_help_are_accepted(example):
    program, *words = example.split()
    assert program == "dlcp"
    arguments = cli.parse(words)
    assert not getattr(arguments, "torchrun", [])[2:], "nothing but --nproc-per-node N goes to torchrun"


def test_every_command_has_examples_in_its_help(capsys):
    for name, command in cli.COMMANDS.items():
        with pytest.raises(SystemExit):
            cli.parse([name, "--help"])
        printed = capsys.readouterr().out
        assert command.examples.strip()
        for line in command.examples.strip().splitlines():
            assert f"\n  {line}\n" in printed + "\n"
