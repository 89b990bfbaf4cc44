# SPDX-License-Identifier: Apache-2.0
"""Break and mend parts of a testbed that is up, and change its links, to see how training copes.

The controller is not informed: routes, shares and thresholds stay as the fabric file has them.
"""

import asyncio
import dataclasses
import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

from dlcp.controller.compiled_program import CompiledProgram
from dlcp.controller.fabric import Fabric
from dlcp.controller.switch_client import ELECTION_ID, ControlError, QueueError, Session, plan, program, wanted
from dlcp.controller.testbed import TestbedError, came_true
from dlcp.controller.testbed.keeper import limit_port
from dlcp.controller.testbed.layout import StateFile, TestbedState, WireEnd
from dlcp.controller.testbed.lifecycle import PROGRAM_DEADLINE_S, UP_DEADLINE_S, fabric_of
from dlcp.controller.watch import RETRY_S
from dlcp.host.netlab import NamedNamespace
from dlcp.switch import PortQueueing, read_ports, write_ports

_Link = tuple[WireEnd, WireEnd]
_NO_ROOM: Final = ("pfifo", "limit", "0")
"""A queueing discipline that drops every packet."""


def break_links(state: TestbedState, names: Sequence[str]) -> list[_Link]:
    """Take links down, as if their cables were pulled; return them.

    Parameters
    ----------
    names
        As for :meth:`Layout.links_of`.

    Raises
    ------
    TestbedError
        There is no such link.
    NamespaceError
        An interface does not go down.
    """
    links = state.layout.links_of(names)
    for link in links:
        if state.layout.kind == "bmv2":
            # BMv2 would receive nothing at any port while an interface is down. A queue without room stops both ends.
            for end in link:
                NamedNamespace(end.namespace).tc("qdisc", "replace", "dev", end.interface, "root", *_NO_ROOM)
        else:
            # Only the switch's end: a host whose own interface goes down loses its routes.
            NamedNamespace(link[0].namespace).ip(f"link set {link[0].interface} down")
    return links


def mend_links(state: TestbedState, names: Sequence[str]) -> list[_Link]:
    """Bring links up, with the rate, delay and loss of the fabric; return them.

    Raises
    ------
    TestbedError, NamespaceError
        As for :func:`break_links`.
    """
    links = state.layout.links_of(names)
    for link in links:
        NamedNamespace(link[0].namespace).ip(f"link set {link[0].interface} up")
        for end in link:
            if _drops_all(end):
                NamedNamespace(end.namespace).tc("qdisc", "delete", "dev", end.interface, "root")
            if end.port:
                _set_queueing(state, end, state.layout.port(end.node, end.port).queueing)
    return links


def break_switch(state: TestbedState, name: str) -> None:
    """End the process of a switch, and do not restart it until :func:`mend_switch`.

    Raises
    ------
    TestbedError
        There is no such switch.
    """
    plan = state.layout.switch(name)
    StateFile(state.layout.name).broken(plan.name).touch()
    state.switches[plan.name].process.end()


def mend_switch(state: TestbedState, name: str) -> None:
    """Let the keeper start a broken switch, and program it.

    Raises
    ------
    TestbedError
        There is no such switch, or it does not start.
    """
    files, layout = StateFile(state.layout.name), state.layout.switch(name)
    if not files.broken(layout.name).exists():
        raise TestbedError(f"switch {name} is not broken; `dlcp testbed status` shows what is")
    files.broken(layout.name).unlink()

    def runs() -> bool:
        now = files.read()
        if now is None:
            raise TestbedError(f"testbed {state.layout.name!r} is no longer up")
        return now.switches[layout.name].process.alive

    if not came_true(runs, UP_DEADLINE_S):
        raise TestbedError(f"switch {name} has not started; read {files.path(f'.{name}.log')}")
    asyncio.run(_program(fabric_of(state.layout.name), name))


async def _program(fabric: Fabric, name: str) -> None:
    """Program a switch, unless another controller does, such as that of `dlcp testbed run`."""
    pipeline, give_up_s = CompiledProgram(), time.monotonic() + PROGRAM_DEADLINE_S
    while True:
        try:
            async with Session(fabric.switch(name), pipeline, election_id=ELECTION_ID - 1) as session:
                try:
                    await program(session, fabric)
                    return
                except ControlError:
                    if not await plan(session, wanted(fabric, session.switch, pipeline)):
                        return
                    raise
        except (ControlError, QueueError) as error:
            if time.monotonic() > give_up_s:
                raise TestbedError(
                    f"switch {name} is not programmed after {PROGRAM_DEADLINE_S:.0f} s: {error}"
                ) from error
        await asyncio.sleep(RETRY_S)


def change_links(
    state: TestbedState,
    names: Sequence[str],
    *,
    rate_bps: int | None = None,
    delay_s: float | None = None,
    loss: float | None = None,
) -> list[_Link]:
    """Change the rate, delay or loss of links while they carry traffic; return them.

    Parameters
    ----------
    names
        As for :meth:`Layout.links_of`.
    rate_bps
        Rate of the switches' ports at both ends, in bit/s.
    delay_s
        Delay of what leaves those ports, in seconds.
    loss
        Share of frames lost in each direction, 0..1.

    Raises
    ------
    TestbedError
        There is no such link, or BMv2 is to delay or lose packets.
    """
    if state.layout.kind == "bmv2" and (delay_s is not None or loss is not None):
        raise TestbedError("BMv2 has neither delay nor loss: change only the rate, or use built-in switches")
    links = state.layout.links_of(names)
    for link in links:
        for number, end in enumerate(link):
            # A port loses frames in both directions, so one end is enough.
            given: dict[str, Any] = {"rate_bps": rate_bps, "delay_s": delay_s, "loss": None if number else loss}
            wanted = {name: value for name, value in given.items() if value is not None}
            if end.port:
                _set_queueing(state, end, dataclasses.replace(_queueing(state, end), **wanted))
    return links


def changes(state: TestbedState) -> list[str]:
    """Return what is broken or changed by hand, one line each."""
    files = StateFile(state.layout.name)
    broken = [switch.name for switch in state.layout.switches if files.broken(switch.name).exists()]
    found = [f"switch {name} is broken: dlcp testbed mend switch {name}" for name in broken]
    for link in state.layout.links:
        wrong = ["is broken"] if _is_broken(link[0]) else []
        for end in link:
            now = _queueing(state, end) if end.port else None
            if now is not None and now != state.layout.port(end.node, end.port).queueing:
                wrong.append(f"has {now.rate_bps / 1e6:g} Mbit/s, {now.delay_s * 1e3:g} ms, loss {now.loss:g} at {end}")
        if wrong:
            found.append(f"link {link[0]} - {link[1]} {'; '.join(wrong)}: dlcp testbed mend link {link[0]}")
    return found


def _is_broken(end: WireEnd) -> bool:
    flags = _shown(end, "ip", "-o", "link", "show", end.interface).partition("<")[2].partition(">")[0].split(",")
    return "UP" not in flags or _drops_all(end)


def _drops_all(end: WireEnd) -> bool:
    """Return whether an interface has the queueing discipline that :func:`break_links` sets."""
    shown = _shown(end, "tc", "qdisc", "show", "dev", end.interface)
    return re.match(r"qdisc pfifo \S+ root .*limit 0p", shown) is not None


def _shown(end: WireEnd, *argv: str) -> str:
    """Return what a command prints in the network namespace of an interface."""
    output: str = NamedNamespace(end.namespace).run(argv, capture_output=True, text=True).stdout
    return output


def _queueing(state: TestbedState, end: WireEnd) -> PortQueueing:
    """Return the queueing of a port as it is now."""
    return read_ports(StateFile(state.layout.name).queueing(end.node))[end.port]


def _set_queueing(state: TestbedState, end: WireEnd, queueing: PortQueueing) -> None:
    """Change the queueing of a port, also for the switch's next start."""
    path = StateFile(state.layout.name).queueing(end.node)
    write_ports(path, {**read_ports(path), end.port: queueing})
    process = state.switches[end.node].process
    if state.layout.kind == "bmv2" and not _is_broken(end):
        limit_port(NamedNamespace(end.namespace), end.interface, queueing.rate_bps)
    if state.layout.kind == "builtin" and process.alive:
        os.kill(process.pid, signal.SIGHUP)
