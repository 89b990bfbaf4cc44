# SPDX-License-Identifier: Apache-2.0
"""``dlcp fabric``: check a description, show what differs, write it, keep it in force, and show its state."""

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlcp.commands.common import DIFFERS, DURATIONS, add, add_json, real, refuse, whole
from dlcp.inputs.addresses import parse_address

if TYPE_CHECKING:
    from dlcp.controller.compiled_program import CompiledProgram
    from dlcp.controller.fabric import Fabric
    from dlcp.controller.switch_client import Outcome, Plan, Readings, Session

WATCHING: Final = "watching"
"""Start of the line that says that the switches are watched."""
_METRICS: Final = "127.0.0.1:9464"
"""Where ``watch`` serves metrics by default: the customary port of exporters."""
_FILE_COLUMNS: Final = 120
"""Width of output that does not go to a terminal."""
_WATCH_EVERY_S: Final = 1.0
_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp fabric``."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="fabric_command")
    for name, purpose in {
        "check": "check a fabric file: print its errors, or the number of table entries of each switch",
        "plan": f"show what differs between switches and description (exit status {DIFFERS}), and change nothing",
        "apply": "write what differs",
        "watch": "write what differs whenever it differs, and serve metrics to Prometheus",
        "status": "show the state of the switches and their counters",
        "export": "print the configuration of a switch that runs no P4 program, for Linux (tc) or SONiC",
    }.items():
        command = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if name == "export":
            command.add_argument("system", choices=("tc", "sonic"), help="what runs on the switch")
        command.add_argument("file", type=Path, metavar="FILE", help="the fabric and its policy, as YAML or JSON")
        if name != "export":
            add(command, "--program", "FOLDER", Path, "compiled program to use instead of DLCP's own")
        if name == "export":
            command.add_argument("switch", metavar="SWITCH", help="name of the switch in the fabric")
        if name in ("plan", "status"):
            add_json(command)
        if name == "status":
            live = "show the counters of each queue live; without a terminal, print what has changed"
            command.add_argument("--watch", action="store_true", help=live)
            add(command, "--every", "SECONDS", real(DURATIONS), "interval of --watch", default=_WATCH_EVERY_S)
        if name == "plan":
            command.add_argument("--all", action="store_true", help="show all changes, however many")
        if name in ("apply", "watch"):
            election = "of several controllers, the highest id writes"
            add(command, "--election-id", "N", whole(1, (1 << 63) - 1), election, default=10)
        if name == "watch":
            add(command, "--every", "SECONDS", real(DURATIONS), "interval of comparisons", default=5.0)
            add(command, "--metrics", "HOST:PORT", str, "where to serve metrics", default=_METRICS)


def run(arguments: argparse.Namespace) -> int:
    """Run one of the commands; return 0, 1 if a switch failed, 2 if the description is wrong, or ``DIFFERS``."""
    from dlcp.controller.compiled_program import CompiledProgram
    from dlcp.controller.fabric import load

    try:
        fabric = load(arguments.file)
        if arguments.fabric_command == "export":
            return _export(arguments, fabric)
        pipeline = CompiledProgram() if arguments.program is None else CompiledProgram(arguments.program)
        status: int = _COMMANDS[arguments.fabric_command](arguments, fabric, pipeline)
        return status
    except (OSError, ValueError) as error:
        return refuse("fabric", error)


def _check(arguments: argparse.Namespace, fabric: "Fabric", pipeline: "CompiledProgram") -> int:
    from dlcp.controller.display import fabric_table
    from dlcp.controller.entries import entries

    held = {switch.name: entries(fabric, switch.name) for switch in fabric.switches}
    for found in held.values():
        pipeline.encode(found)
    console().print(fabric_table(fabric, held))
    return 0


def _plan(arguments: argparse.Namespace, fabric: "Fabric", pipeline: "CompiledProgram") -> int:
    from dlcp.controller.display import plan_json, plan_tree
    from dlcp.controller.switch_client import ask_all, plan, wanted

    async def ask(session: "Session") -> "Plan":
        return await plan(session, wanted(fabric, session.switch, pipeline))

    found = asyncio.run(ask_all(fabric, pipeline, ask))
    plans = [answer for answer in found.values() if not isinstance(answer, str)]
    if arguments.json:
        shown = {
            name: {"error": answer} if isinstance(answer, str) else plan_json(answer, pipeline)
            for name, answer in found.items()
        }
        print(json.dumps({"switches": shown}, indent=2))
    else:
        for each in plans:
            console().print(plan_tree(each, pipeline, every=arguments.all))
    return _print_errors(found) or (DIFFERS if any(plans) else 0)


def _apply(arguments: argparse.Namespace, fabric: "Fabric", pipeline: "CompiledProgram") -> int:
    from dlcp.controller.display import outcome_line
    from dlcp.controller.switch_client import ask_all, program

    async def write(session: "Session") -> "Outcome":
        return await program(session, fabric)

    found = asyncio.run(ask_all(fabric, pipeline, write, election_id=arguments.election_id))
    for answer in found.values():
        if not isinstance(answer, str):
            console().print(outcome_line(answer))
            if answer.unset:
                console().print(answer.unset, style="yellow")
    return _print_errors(found)


def _status(arguments: argparse.Namespace, fabric: "Fabric", pipeline: "CompiledProgram") -> int:
    from dlcp.controller.display import ports_table, status_json, status_table
    from dlcp.controller.switch_client import ask_all, plan, read_counters, wanted

    if arguments.watch:
        if arguments.json:
            raise ValueError("--json and --watch exclude each other: leave out one")
        return watch_counters(fabric, pipeline, arguments.every)

    async def ask(session: "Session") -> "tuple[Plan, Readings | None]":
        found = await plan(session, wanted(fabric, session.switch, pipeline))
        counted = None if found.install else await read_counters(session, fabric.neighbours[session.switch.name])
        return found, counted

    found = asyncio.run(ask_all(fabric, pipeline, ask))
    if arguments.json:
        print(json.dumps(status_json(fabric, found), indent=2))
        return _print_errors(found)
    shown = {name: "does not answer" if isinstance(answer, str) else answer for name, answer in found.items()}
    console().print(status_table(fabric, shown))
    counted = {name: answer[1] for name, answer in found.items() if not isinstance(answer, str) and answer[1]}
    if counted:
        console().print(ports_table(fabric, counted))
    return _print_errors(found)


def _watch(arguments: argparse.Namespace, fabric: "Fabric", pipeline: "CompiledProgram") -> int:
    from dlcp.controller.watch import Watcher, serve

    try:
        parse_address(arguments.metrics)
    except ValueError as error:
        raise ValueError(f"--metrics: {error}, as in {_METRICS}") from None
    watcher = Watcher(fabric, pipeline, election_id=arguments.election_id, every_s=arguments.every)
    if not watcher.states:
        raise ValueError(f"{arguments.file}: no switch has a control address (grpc)")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("dlcp.fabric").setLevel(logging.INFO)
    stop_metrics = serve(watcher.states, arguments.metrics)
    try:
        print(f"{WATCHING}: {', '.join(watcher.states)}; metrics at http://{arguments.metrics}/metrics", flush=True)
        asyncio.run(_until_signal(watcher.run()))
    finally:
        stop_metrics()
    return 0


def watch_counters(
    fabric: "Fabric",
    pipeline: "CompiledProgram",
    every_s: float,
    tail_drops: "Callable[[str], Mapping[tuple[int, int], int] | None]" = lambda switch: None,
) -> int:
    """Show the switches' counters until a signal; return the exit status.

    Parameters
    ----------
    every_s
        Interval of readings, in seconds.
    tail_drops
        Returns the tail drops of a switch, by port and queue; None if it does not count them.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from dlcp.controller.display import queue_lines, queues_table
    from dlcp.controller.switch_client import ask_all, read_counters
    from dlcp.switch.event_counters import SwitchAccount

    async def ask(session: "Session") -> "SwitchAccount":
        readings = await read_counters(session, fabric.neighbours[session.switch.name])
        return SwitchAccount.of(readings.events, tail_drops(session.switch.name))

    async def show() -> None:
        before: dict[str, SwitchAccount] = {}
        said: set[str] = set()
        with Live(console=console(), auto_refresh=False) if sys.stdout.isatty() else contextlib.nullcontext() as live:
            while True:
                found = await ask_all(fabric, pipeline, ask)
                now = {name: answer for name, answer in found.items() if not isinstance(answer, str)}
                errors = {answer for answer in found.values() if isinstance(answer, str)}
                if live is not None:
                    live.update(Group(queues_table(fabric, now), *map(Text, sorted(errors))), refresh=True)
                else:
                    new = {name: now[name].since(before.get(name, SwitchAccount(Counter()))) for name in now}
                    for line in [*queue_lines(fabric, new), *sorted(errors - said)]:
                        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
                before, said = before | now, errors
                await asyncio.sleep(every_s)

    asyncio.run(_until_signal(show()))
    return 0


async def _until_signal(work: Awaitable[None]) -> None:
    """Await some work until SIGTERM or SIGINT."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _print_errors(found: dict[str, Any]) -> int:
    """Print errors, and return the exit status."""
    wrong = [answer for answer in found.values() if isinstance(answer, str)]
    for message in wrong:
        refuse("fabric", message)
    return int(bool(wrong))


def console() -> Any:
    """Return a console of a fixed width, unless it is a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_COLUMNS)


def _export(arguments: argparse.Namespace, fabric: "Fabric") -> int:
    from dlcp.controller.ordinary_switches import export_sonic, export_tc

    print({"tc": export_tc, "sonic": export_sonic}[arguments.system](fabric, arguments.switch), end="")
    return 0


_COMMANDS: Final = {"check": _check, "plan": _plan, "apply": _apply, "status": _status, "watch": _watch}
