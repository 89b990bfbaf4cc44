# SPDX-License-Identifier: Apache-2.0
"""The depth of BMv2's queues, which P4Runtime cannot set: through BMv2's own command line and Thrift."""

import asyncio
import shutil
from collections.abc import Mapping
from typing import Final

from dlcp.controller.deadlines import within
from dlcp.controller.fabric import Switch

from dlcp.switch import PortQueueing

COMMAND: Final = "simple_switch_CLI"
DEADLINE_S: Final = 20.0
"""How long that command may take. Chosen by us: it needs a second to start where processors are busy."""


class QueueDepthError(RuntimeError):
    """The depths could not be set; the message names the switch and says why."""


def unavailable(switch: Switch) -> str:
    """Return why the queue depths of a switch cannot be set; nothing if they can, or need not."""
    if switch.kind != "bmv2":
        return ""
    if not switch.thrift:
        return f"switch {switch.name} has no thrift address, so its queues keep the depth they were started with"
    if shutil.which(COMMAND) is None:
        return f"{COMMAND} is not on PATH (p4lang's package p4lang-bmv2 brings it), so {switch.name} keeps its depths"
    return ""


async def set_depths(switch: Switch, ports: Mapping[int, PortQueueing]) -> None:
    """Set the depth of all queues of a switch. The rate is not set: BMv2 has one for each queue and none for a port.

    Raises
    ------
    QueueDepthError
        The command is missing or failed.
    """
    host, _, port = switch.thrift.rpartition(":")
    try:
        process = await asyncio.create_subprocess_exec(
            COMMAND, "--thrift-ip", host.strip("[]"), "--thrift-port", port,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise QueueDepthError(f"switch {switch.name}: {COMMAND}: {error.strerror}") from None
    try:
        answer, _ = await within(process.communicate("\n".join(_commands(ports)).encode()), DEADLINE_S)
    except asyncio.TimeoutError:
        raise QueueDepthError(
            f"switch {switch.name}: {COMMAND}: no answer of {switch.thrift} within {DEADLINE_S:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = answer.decode(errors="replace")
    if process.returncode or "Error" in said:
        last = "; ".join(said.strip().splitlines()[-2:]) or f"exit status {process.returncode}"
        raise QueueDepthError(f"switch {switch.name}: {COMMAND} at {switch.thrift}: {last}")


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
