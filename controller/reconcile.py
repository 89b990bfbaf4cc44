# SPDX-License-Identifier: Apache-2.0
"""Finds what a switch lacks of what it should hold, and writes that and nothing else.

P4Runtime cannot set the depth of BMv2's queues. BMv2's own command line can, over Thrift.
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
    """What one switch has to be told.

    Parameters
    ----------
    switch
        Which one.
    install
        Whether it has to be given the program first, which empties its tables.
    difference
        What has to be written to its tables.
    """

    switch: FabricSwitch
    install: bool
    difference: Difference

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self.install or len(self.difference) > 0


@dataclass(frozen=True)
class Outcome:
    """What was done to one switch.

    Parameters
    ----------
    plan
        What had to be done.
    writes
        Write requests that it took.
    elapsed_s
        How long it took from the first question on, in seconds.
    """

    plan: Plan
    writes: int
    elapsed_s: float


def wanted(fabric: Fabric, switch: FabricSwitch, pipeline: CompiledProgram) -> list[p4r.Entity]:
    """Return everything that a switch of a fabric should hold.

    Raises
    ------
    PipelineError
        The program has no room for it, in name or in width.
    """
    return pipeline.encode(entries(fabric, switch.name))


async def plan(session: Session, should_hold: list[p4r.Entity]) -> Plan:
    """Return what a switch has to be told so that it holds what it should; asks, and changes nothing.

    Raises
    ------
    ControlError
        It does not answer.
    """
    install = await session.cookie() != session.pipeline.cookie
    holds = [] if install else await session.entities()
    return Plan(session.switch, install, difference(should_hold, holds))


async def reconcile(session: Session, should_hold: list[p4r.Entity]) -> Outcome:
    """Make a switch hold what it should. What is right already is not touched; ``session`` must be the primary.

    Raises
    ------
    ControlError
        It does not answer, or refuses a change.
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
"""How long that command may take. Chosen by us: it needs a second to start where processors are busy."""


class QueueDepthError(RuntimeError):
    """The depths could not be set; the message names the switch and says why."""


def queue_depths_unavailable(switch: FabricSwitch) -> str:
    """Return why the queue depths of a switch cannot be set; nothing if they can, or need not."""
    if switch.kind != "bmv2":
        return ""
    if not switch.thrift:
        return f"switch {switch.name} has no thrift address, so its queues keep the depth they were started with"
    if shutil.which(_CLI) is None:
        return f"{_CLI} is not on PATH (p4lang's package p4lang-bmv2 brings it), so {switch.name} keeps its depths"
    return ""


async def set_queue_depths(switch: FabricSwitch, ports: Mapping[int, PortQueueing]) -> None:
    """Set the depth of all queues of a switch. The rate is not set: BMv2 has one for each queue and none for a port.

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
            f"switch {switch.name}: {_CLI}: no answer of {switch.thrift} within {_CLI_DEADLINE_S:g} s"
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
    """Return what to tell BMv2: one line for a port whose queues are equally deep, else one for each queue."""
    lines = []
    for port, queueing in ports.items():
        depths = queueing.depths()
        if len(set(depths)) == 1:
            lines.append(f"set_queue_depth {depths[0]} {port}")
        else:
            lines += [f"set_queue_depth {depth} {port} {queue}" for queue, depth in enumerate(depths)]
    return [*lines, ""]
