# SPDX-License-Identifier: Apache-2.0
"""The work of ``dlcp fabric``: check a description, show what differs, write it, keep it in force, show its state."""

import argparse
import asyncio
import contextlib
import json
import logging
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from rich.console import Console

from dlcp.commands.common import DIFFERS, refuse
from dlcp.controller.compiled_program import CompiledProgram
from dlcp.controller.display import (
    fabric_table,
    outcome_line,
    plan_json,
    plan_tree,
    ports_table,
    status_json,
    status_table,
)
from dlcp.controller.entries import entries, most_switches
from dlcp.controller.fabric import Fabric, FabricSwitch, load
from dlcp.controller.switch_client import (
    ControlError,
    Outcome,
    Plan,
    QueueDepthError,
    Readings,
    Session,
    plan,
    queue_depths_unavailable,
    read_counters,
    reconcile,
    set_queue_depths,
    wanted,
)
from dlcp.controller.watch import Watcher, serve

WATCHING: Final = "watching"
"""Start of the line that says that the switches are watched."""

_FILE_COLUMNS: Final = 120
"""Width of output that does not go to a terminal."""
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:]*):[0-9]{1,5}")
_T = TypeVar("_T")


def run(arguments: argparse.Namespace) -> int:
    """Run one of the commands; return 0, 1 if a switch failed, 2 if the description is wrong, or ``DIFFERS``."""
    try:
        fabric = load(arguments.file)
        pipeline = CompiledProgram() if arguments.program is None else CompiledProgram(arguments.program)
        status: int = _COMMANDS[arguments.fabric_command](arguments, fabric, pipeline)
        return status
    except (OSError, ValueError) as error:
        return refuse("fabric", error)


def _check(arguments: argparse.Namespace, fabric: Fabric, pipeline: CompiledProgram) -> int:
    held = {switch.name: entries(fabric, switch.name) for switch in fabric.switches}
    for found in held.values():
        pipeline.encode(found)
    _console().print(fabric_table(fabric, held))
    switches = most_switches(fabric)
    _console().print(f"a message crosses up to {switches} switches: give its ranks DLCP_SWITCH_HOPS={switches}")
    return 0


def _plan(arguments: argparse.Namespace, fabric: Fabric, pipeline: CompiledProgram) -> int:
    async def ask(session: Session) -> Plan:
        return await plan(session, wanted(fabric, session.switch, pipeline))

    found = asyncio.run(_everywhere(fabric, pipeline, ask))
    plans = [answer for answer in found.values() if not isinstance(answer, str)]
    if arguments.json:
        shown = {
            name: {"error": answer} if isinstance(answer, str) else plan_json(answer, pipeline)
            for name, answer in found.items()
        }
        print(json.dumps({"switches": shown}, indent=2))
    else:
        for each in plans:
            _console().print(plan_tree(each, pipeline, every=arguments.all))
    return _print_errors(found) or (DIFFERS if any(plans) else 0)


def _apply(arguments: argparse.Namespace, fabric: Fabric, pipeline: CompiledProgram) -> int:
    async def write(session: Session) -> Outcome:
        await session.become_primary()
        outcome = await reconcile(session, wanted(fabric, session.switch, pipeline))
        if session.switch.kind == "bmv2" and not queue_depths_unavailable(session.switch):
            await set_queue_depths(session.switch, entries(fabric, session.switch.name).ports)
        return outcome

    found = asyncio.run(_everywhere(fabric, pipeline, write, election_id=arguments.election_id))
    for name, answer in found.items():
        if not isinstance(answer, str):
            _console().print(outcome_line(answer))
            reason = queue_depths_unavailable(fabric.switch(name))
            if reason:
                _console().print(reason, style="yellow")
    return _print_errors(found)


def _status(arguments: argparse.Namespace, fabric: Fabric, pipeline: CompiledProgram) -> int:
    async def ask(session: Session) -> tuple[Plan, Readings | None]:
        found = await plan(session, wanted(fabric, session.switch, pipeline))
        counted = None if found.install else await read_counters(session, fabric.neighbours[session.switch.name])
        return found, counted

    found = asyncio.run(_everywhere(fabric, pipeline, ask))
    if arguments.json:
        print(json.dumps(status_json(fabric, found), indent=2))
        return _print_errors(found)
    shown = {name: "does not answer" if isinstance(answer, str) else answer for name, answer in found.items()}
    _console().print(status_table(fabric, shown))
    counted = {name: answer[1] for name, answer in found.items() if not isinstance(answer, str) and answer[1]}
    if counted:
        _console().print(ports_table(fabric, counted))
    return _print_errors(found)


def _watch(arguments: argparse.Namespace, fabric: Fabric, pipeline: CompiledProgram) -> int:
    if not _ADDRESS.fullmatch(arguments.metrics):
        raise ValueError(f"--metrics {arguments.metrics}: expected HOST:PORT, as in 127.0.0.1:9464")
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


async def _until_signal(work: Awaitable[None]) -> None:
    """Await some work until SIGTERM or SIGINT."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _everywhere(
    fabric: Fabric, pipeline: CompiledProgram, ask: Callable[[Session], Awaitable[_T]], **options: Any
) -> dict[str, _T | str]:
    """Query all switches concurrently; return each one's answer, or its error as text, by the name of the switch."""

    async def talk(switch: FabricSwitch) -> _T | str:
        try:
            async with Session(switch, pipeline, **options) as session:
                return await ask(session)
        except (ControlError, QueueDepthError) as error:
            return str(error)

    switches = [switch for switch in fabric.switches if switch.grpc]
    if not switches:
        raise ValueError("no switch has a control address; add one to the file, as in grpc: 127.0.0.1:9559")
    answers = await asyncio.gather(*map(talk, switches))
    return {switch.name: answer for switch, answer in zip(switches, answers, strict=True)}


def _print_errors(found: dict[str, Any]) -> int:
    """Print errors, and return the exit status."""
    wrong = [answer for answer in found.values() if isinstance(answer, str)]
    for message in wrong:
        refuse("fabric", message)
    return int(bool(wrong))


def _console() -> Any:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_COLUMNS)


_COMMANDS: Final = {"check": _check, "plan": _plan, "apply": _apply, "status": _status, "watch": _watch}
