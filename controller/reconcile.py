# SPDX-License-Identifier: Apache-2.0
"""Compare a switch's state with the wanted state, and write only the difference.

P4Runtime cannot set the depth of BMv2's queues; BMv2's own command-line tool can, over Thrift.
"""

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from finsy.proto import p4r

from dlcp.controller.entries import entries
from dlcp.controller.fabric import Fabric, FabricSwitch
from dlcp.controller.pipeline import CompiledProgram, Difference, difference
from dlcp.controller.session import Session, within
from dlcp.switch import PortQueueing


@dataclass(frozen=True)
class Plan:
    """The changes that one switch needs.

    Parameters
    ----------
    switch
        The switch.
    install
        Whether the program has to be installed first, which empties its tables.
    difference
        The changes to its tables.
    """

    switch: FabricSwitch
    install: bool
    difference: Difference

    def __bool__(self) -> bool:
        """Whether there is anything to change."""
        return self.install or len(self.difference) > 0


@dataclass(frozen=True)
class Outcome:
    """The result of reconciling one switch.

    Parameters
    ----------
    plan
        The changes it needed.
    writes
        Number of write requests sent.
    elapsed_s
        Time from the first read to the last write, in seconds.
    """

    plan: Plan
    writes: int
    elapsed_s: float


def wanted(fabric: Fabric, switch: FabricSwitch, pipeline: CompiledProgram) -> list[p4r.Entity]:
    """Return all entities that a switch of a fabric should hold.

    Raises
    ------
    PipelineError
        The program lacks a table, field or action, or a table or field is too small.
    """
    return pipeline.encode(entries(fabric, switch.name))


async def plan(session: Session, should_hold: list[p4r.Entity]) -> Plan:
    """Return the changes that a switch needs to hold ``should_hold``; reads its state and changes nothing.

    Raises
    ------
    ControlError
        The switch does not answer.
    """
    install = await session.cookie() != session.pipeline.cookie
    holds = [] if install else await session.entities()
    return Plan(session.switch, install, difference(should_hold, holds))


async def reconcile(session: Session, should_hold: list[p4r.Entity]) -> Outcome:
    """Make a switch hold ``should_hold``. Correct entities are not touched; ``session`` must be the primary.

    Raises
    ------
    ControlError
        The switch does not answer, or refuses a change.
    """
    start = time.monotonic()
    before = session.writes
    found = await plan(session, should_hold)
    if found.install:
        await session.install()
    for batch in found.difference.batches():
        await session.write(batch)
    return Outcome(found, session.writes - before, time.monotonic() - start)


_CLI: Final = "simple_switch_CLI"
_CLI_DEADLINE_S: Final = 20.0
"""Deadline for that command. It needs a second to start on a busy machine."""


class QueueDepthError(RuntimeError):
    """The queue depths could not be set; the message names the switch and the reason."""


def queue_depths_unavailable(switch: FabricSwitch) -> str:
    """Return why the queue depths of a switch cannot be set; empty if they can be, or need not be."""
    if switch.kind != "bmv2":
        return ""
    if not switch.thrift:
        return f"switch {switch.name} has no thrift address, so its queues keep the depth they were started with"
    if shutil.which(_CLI) is None:
        return f"{_CLI} is not on PATH (install p4lang's package p4lang-bmv2), so {switch.name} keeps its queue depths"
    return ""


async def set_queue_depths(switch: FabricSwitch, ports: Mapping[int, PortQueueing]) -> None:
    """Set the depth of all queues of a switch. The rate is not set: BMv2 has rates per queue, not per port.

    Raises
    ------
    QueueDepthError
        The command is missing or failed.
    """
    host, _, port = switch.thrift.rpartition(":")
    try:
        process = await asyncio.create_subprocess_exec(
            _CLI, "--thrift-ip", host.strip("[]"), "--thrift-port", port,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise QueueDepthError(f"switch {switch.name}: {_CLI}: {error.strerror}") from None
    try:
        answer, _ = await within(process.communicate("\n".join(_commands(ports)).encode()), _CLI_DEADLINE_S)
    except asyncio.TimeoutError:
        raise QueueDepthError(
            f"switch {switch.name}: {_CLI}: no answer from {switch.thrift} within {_CLI_DEADLINE_S:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = answer.decode(errors="replace")
    if process.returncode or "Error" in said:
        last = "; ".join(said.strip().splitlines()[-2:]) or f"exit status {process.returncode}"
        raise QueueDepthError(f"switch {switch.name}: {_CLI} at {switch.thrift}: {last}")


def _commands(ports: Mapping[int, PortQueueing]) -> list[str]:
    """Return the commands for BMv2: one for a port whose queues are equally deep, else one for each queue."""
    lines = []
    for port, queueing in ports.items():
        depths = queueing.depths()
        if len(set(depths)) == 1:
            lines.append(f"set_queue_depth {depths[0]} {port}")
        else:
            lines += [f"set_queue_depth {depth} {port} {queue}" for queue, depth in enumerate(depths)]
    return [*lines, ""]
