# SPDX-License-Identifier: Apache-2.0
"""The command line: ``dlcp COMMAND``. A command's module is imported when it is called."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

from dlcp import __version__
from dlcp.inputs.error_text import closest


class Command(NamedTuple):
    """A command: ``dlcp.commands.NAME`` has ``add_arguments(parser)`` and ``run(arguments) -> exit status``.

    ``run`` imports the packages of extras, so that help and completion work without them.

    If it wraps another program, ``arguments.script`` gets the words from the first that is neither an option nor an
    option's value, or those after ``--``, and ``arguments.torchrun`` the unknown options before.
    """

    purpose: str
    wraps: str = ""
    """The program that it wraps: torchrun, whose options it passes on, or a command."""
    needs: str = ""
    """The package extra that it needs, as in ``pip install 'dlcp[EXTRA]'``."""
    examples: str = ""
    """Command lines, one per line; the purpose of each may follow after two spaces."""


class _Help(argparse.HelpFormatter):
    """Help that does not wrap indented lines, which are examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = super()._fill_text
        return "\n".join(line if line.startswith(" ") else filled(line, width, indent) for line in text.split("\n"))


class _Parser(argparse.ArgumentParser):
    """A parser without abbreviations, also in subparsers: they would capture options meant for torchrun."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)


COMMANDS: Final = {
    "train": Command(
        "run an unchanged training script with DLCP, as torchrun would",
        "torchrun",
        needs="torch",
        examples="""
dlcp train --nproc-per-node 4 script.py --epochs 3
dlcp train --option precision=8 --live 9465 --nproc-per-node 4 -m package.training
""",
    ),
    "launch": Command(
        "start a command once per rank, whatever framework it uses",
        "a command",
        examples="""
dlcp launch -n 4 python script.py
dlcp launch -n 4 --nodes 2 --node 1 --master 10.0.0.1:29500 python script.py
""",
    ),
    "doctor": Command(
        "report what works here, which options are in force, and what DLCP can gain",
        "torchrun",
        examples="""
dlcp doctor --all-options
dlcp doctor --listen                                   on one machine, then
dlcp doctor --peer 10.0.0.1                            on another: the path between them
dlcp doctor --nproc-per-node 4 script.py               what DLCP can gain for a script
""",
    ),
    "plan": Command(
        "divide a model into the stages of a pipeline, and workers among them",
        needs="sim",
        examples="""
dlcp plan vgg16 --workers 8 --rate-mbps 10000 --batch 64
dlcp plan my.module:model --input 3,224,224 --workers 4 --rate-mbps 1000
""",
    ),
    "live": Command(
        "serve a live page and Prometheus metrics of running ranks",
        needs="live",
        examples="""
dlcp live --listen 0.0.0.0:9465 /shared/snapshots
""",
    ),
    "trace": Command(
        "merge the timelines of all ranks into one trace for Perfetto",
        examples="""
dlcp trace --out run.json /shared/timelines
""",
    ),
    "bench": Command(
        "time all-reduces of DLCP beside the framework's own, here or on a cluster",
        needs="torch",
        examples="""
dlcp bench allreduce --end 16MB
dlcp launch -n 4 dlcp bench allreduce --sizes 60KB 25MB --json found.json
""",
    ),
    "demo": Command(
        "train over a congested switch, with and without DLCP, and write a report page",
        needs="demo",
        examples="""
dlcp demo --seed 2
dlcp demo --precision 4 --only gloo dlcp --out out/coarse
""",
    ),
    "server": Command(
        "run a parameter server",
        needs="store",
        examples="""
dlcp server --bind node9:53696 --secret-file secret
""",
    ),
    "switch": Command(
        "run the built-in switch",
        needs="switch",
        examples="""
dlcp switch --hosts 4 --rate-bps 64000000 --watch
dlcp switch --port 1=packet:eth1 --port 2=packet:eth2 --p4runtime 127.0.0.1:9559 --insecure
""",
    ),
    "sim": Command(
        "simulate training on a cluster you do not have, and repeat published experiments",
        needs="sim",
        examples="""
dlcp sim list
dlcp sim run fct_144 --quick --point transport=DLCP
dlcp sim all speedup --quick
""",
    ),
    "fabric": Command(
        "program the switches of a fabric, and keep them programmed",
        needs="fabric",
        examples="""
dlcp fabric plan star.yaml
dlcp fabric apply star.yaml
""",
    ),
    "testbed": Command(
        "train over emulated links and switches in Mininet, and compare (needs root)",
        needs="fabric,demo",
        examples="""
dlcp testbed up
dlcp testbed trace host0 host3                         where packets go, and why they do not
dlcp testbed run --collective ps
dlcp testbed down
""",
    ),
    "completion": Command(
        "print a script that completes the command line in your shell",
        needs="completion",
        examples="""
dlcp completion bash                                   in ~/.bashrc: source <(dlcp completion bash)
dlcp completion zsh                                    as ~/.zfunc/_dlcp, in a folder of fpath
""",
    ),
}

_FIRST_STEPS: Final = """
where to begin:
  dlcp doctor                                          what works on this machine
  dlcp train --nproc-per-node 2 script.py              train your PyTorch script with DLCP
  dlcp doctor --nproc-per-node 2 script.py             measure what DLCP can gain for it
  dlcp demo                                            see DLCP and Gloo on a congested switch
  dlcp COMMAND --help                                  options of a command
"""
_PITCH: Final = (
    "DLCP makes data-parallel training faster on slow, lossy or congested Ethernet, without changes to your script."
)
_CLOSED_PIPE: Final = 141
"""Exit status of a program killed by SIGPIPE: 128 + 13."""
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


def parser_of(wanted: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the options of the ``wanted`` commands only."""
    parser = _Parser(
        prog="dlcp",
        description=_PITCH,
        epilog=_FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"dlcp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for name, command in COMMANDS.items():
        purpose = f"{command.purpose[0].upper()}{command.purpose[1:]}."
        subparser = commands.add_parser(name, help=command.purpose, description=purpose, formatter_class=_Help)
        if name in wanted:
            module = importlib.import_module(f"dlcp.commands.{name}")
            module.add_arguments(subparser)
            examples = "".join(f"\n  {line}" for line in command.examples.strip().splitlines())
            subparser.epilog = f"{subparser.epilog or ''}\n\nexamples:{examples}".lstrip()
            subparser.set_defaults(run=module.run, wraps=command.wraps, parser=parser)
    return parser


def _how_to_install(command: str, error: ImportError) -> str:
    """Return what a command lacks and how to install it; ``""`` if it lacks a module of DLCP, which is a defect."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package in ("", "dlcp"):
        return ""
    needs = COMMANDS[command].needs
    install = f"'dlcp[{needs}]'" if needs else package
    return f"{command}: {package} is missing: pip install {install}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. ``run`` of the result is the command's function, to be called with the result.

    Raises
    ------
    SystemExit
        The command line is wrong, or asks for help.
    """
    wanted = next((word for word in argv if not word.startswith("-")), "")
    if wanted and wanted not in COMMANDS:
        hint = closest(wanted, COMMANDS)
        print(f"dlcp: there is no command {wanted!r}; dlcp --help lists them{hint}", file=sys.stderr)
        raise SystemExit(2)
    parser = parser_of(COMMANDS if wanted == "completion" else [wanted])
    if not wanted or not COMMANDS[wanted].wraps:
        return parser.parse_args(argv)
    try:
        end = _options_end(argv, argv.index(wanted) + 1, _options_of(parser, wanted), wanted)
    except LookupError as error:
        print(f"dlcp {wanted}: {error.args[0]}", file=sys.stderr)
        raise SystemExit(2) from None
    arguments, unknown = parser.parse_known_args(argv[:end])
    arguments.torchrun, arguments.script = unknown, list(argv[end:])
    if arguments.script[:1] == ["--"]:
        del arguments.script[0]
    elif arguments.script[:1] == ["--module"]:
        arguments.script[0] = "-m"
    return arguments


def _options_end(argv: Sequence[str], start: int, own: Mapping[str, argparse.Action], command: str) -> int:
    """Return where the options of a command and of torchrun end, and a script, ``-m`` or ``--`` begins.

    Raises
    ------
    LookupError
        An option is neither the command's nor torchrun's, so nobody knows whether the next word is its value.
    """
    known, is_all = own, COMMANDS[command].wraps != "torchrun"
    while start < len(argv) and argv[start].startswith("-") and argv[start] not in ("--", "-m", "--module"):
        flag, equals, _ = argv[start].partition("=")
        if flag not in known and not is_all:
            torchrun = _options_of_torchrun()
            known, is_all = {**torchrun, **own}, bool(torchrun)
        meant = _meant(flag, known, own)
        if is_all and not meant and not flag[1:2].isdecimal():  # otherwise it is a negative number
            places = f"dlcp {command}" if known is own else f"dlcp {command} or torchrun"
            raise LookupError(f"{flag} is no option of {places}{closest(flag, known)}")
        # Only the word itself counts: everything after it may belong to the script.
        follows = start + 1 < len(argv) and not argv[start + 1].startswith("-")
        has_value = bool(meant) and all(action.nargs != 0 for action in meant)
        attached = equals or (flag not in known and flag[:2] != "--")
        start += 1 + (follows and has_value and not attached)
    return start


def _meant(
    flag: str, known: Mapping[str, argparse.Action], own: Mapping[str, argparse.Action]
) -> list[argparse.Action]:
    """Return the options that a word may mean. Unlike the command's ``own``, torchrun's may be abbreviated."""
    if flag in known:
        return [known[flag]]
    if flag[:2] != "--":  # with its value, as in -r3
        return [known[flag[:2]]] if flag[:2] in known else []
    return [known[name] for name in known if name not in own and name.startswith(flag)]


def _options_of(parser: argparse.ArgumentParser, command: str) -> Mapping[str, argparse.Action]:
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    options: Mapping[str, argparse.Action] = commands.choices[command]._option_string_actions
    return options


def _options_of_torchrun() -> Mapping[str, argparse.Action]:
    try:
        from torch.distributed.run import get_args_parser
    except ModuleNotFoundError:
        return {}
    return get_args_parser()._option_string_actions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            with _signals_unwind():
                arguments = parse(argv or ["--help"])
                status: int = arguments.run(arguments)
                return status
        except ImportError as error:
            if (error.name or "").startswith("dlcp.native"):  # not compiled, as the error says
                print(f"dlcp: {error}", file=sys.stderr)
            elif install := _how_to_install(argv[0], error):
                print(f"dlcp {install}", file=sys.stderr)
            else:
                raise
            return 2
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of standard output has closed it, as `head` does. Redirect the final flush, which would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that a command ends its processes and removes its folders.

    Commands that handle signals themselves replace these handlers.
    """

    def unwind(number: int, _: FrameType | None) -> None:
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    ours = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


if __name__ == "__main__":
    sys.exit(main())
