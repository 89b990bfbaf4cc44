# SPDX-License-Identifier: Apache-2.0
"""The work of ``dlcp testbed``: bring up hosts, links and real switches between them; train over them, compare."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from dlcp.commands.common import check_folder, refuse
from dlcp.controller.entries import most_switches
from dlcp.controller.fabric import Fabric, SwitchKind, leaf_spine, load, star
from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.accounts import IDLE_MIN, port_rates
from dlcp.controller.testbed.layout import StateFile, TestbedState
from dlcp.controller.testbed.lifecycle import FABRIC, down, fabric_of, find, up
from dlcp.demo.run import DemoError, Progress, report, run_series, select
from dlcp.demo.testbed_runs import TestbedSetup, check, disagreements, train
from dlcp.demo.variants import Variant, variants
from dlcp.host.netlab import NamespaceError
from dlcp.switch import PortQueueing

_RATE_BPS: Final = 32_000_000
"""A port's rate by default, as in the demo."""
_DEPTH_PACKETS: Final[dict[SwitchKind, int]] = {"builtin": 32, "bmv2": 64}
"""Depth of each queue by default: the demo's, and BMv2's own."""
_STAR_HOSTS: Final = 7
"""Four workers, a parameter server and two sources of background traffic."""
_LEAF_HOSTS: Final = 4


def run(arguments: argparse.Namespace) -> int:
    """Run one of the actions and return the exit status."""
    actions = {"up": _up, "run": _run, "status": _status, "down": _down}
    try:
        return actions[arguments.action](arguments)
    except (TestbedError, NamespaceError, OSError, ValueError) as error:
        return refuse("testbed", error)


def _up(arguments: argparse.Namespace) -> int:
    state = _bring_up(arguments)
    _show(arguments.name, state)
    for rate in port_rates(state.layout):
        queues = "one queue" if rate.queues == 1 else f"{rate.queues} queues"
        print(f"a port carries {rate.carried_bps / 1e6:.1f} Mbit/s over {queues}, asked: {rate.asked_bps / 1e6:.1f}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    state = StateFile(arguments.name).read()
    if state is None:
        print(f"no testbed {arguments.name!r} is up")
        return 1
    if not (state.alive and state.ready):
        print(f"testbed {arguments.name!r} has crashed; `dlcp testbed down` removes what it left")
        return 1
    _show(arguments.name, state)
    return 0


def _down(arguments: argparse.Namespace) -> int:
    ended = down(arguments.name)
    print(f"testbed {arguments.name!r} is down; {ended} processes ended" if ended else "nothing was up")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    check_folder("--out", arguments.out)
    if StateFile(arguments.name).read() is not None:
        state = find(arguments.name)
        _refuse_other(arguments, state)
        return _train(arguments, state, fabric_of(arguments.name))
    _bring_up(arguments)
    try:
        return _train(arguments, find(arguments.name), fabric_of(arguments.name))
    finally:
        down(arguments.name)


def _train(arguments: argparse.Namespace, state: TestbedState, fabric: Fabric) -> int:
    """Make the chosen runs; write the page once the folder holds all."""
    setup = _setup(arguments, state, fabric)
    check(setup, state)
    console = Console()

    def train_variant(variant: Variant, *, progress: Progress) -> dict[str, Any]:
        record = train(state, fabric, setup, variant, progress=progress)
        idle = record["fabric"]["idle"]
        if idle < IDLE_MIN:
            console.print(
                f"[bold]the machine was busy[/] during {variant.title!r} ({idle:.0%} idle): its processors were the "
                "bottleneck, not the network's rates. Stop other programs, or choose a lower --rate-mbps"
            )
        return record

    try:
        chosen = select(variants(setup), arguments.only, arguments.out)
        run_series(console, arguments.out, chosen, setup.steps, train_variant)
    except DemoError as error:
        return refuse("testbed", error, 1)
    wrong = disagreements(report(console, arguments.out, arguments.only))
    for line in wrong:
        console.print(f"[bold]hosts and switches disagree[/] {line}")
    return 1 if wrong else 0


def _bring_up(arguments: argparse.Namespace) -> TestbedState:
    kind: SwitchKind = arguments.switch or "builtin"
    return up(_fabric(arguments, kind), kind, arguments.name)


def _fabric(arguments: argparse.Namespace, kind: SwitchKind) -> Fabric:
    """Return the fabric that the options describe."""
    shape = "star" if arguments.fabric is None else arguments.fabric
    rate = _RATE_BPS if arguments.rate_mbps is None else round(arguments.rate_mbps * 1e6)
    depth = _DEPTH_PACKETS[kind] if arguments.depth is None else arguments.depth
    queueing = PortQueueing(rate_bps=rate, depth_packets=depth)
    if shape == "star":
        return star(_STAR_HOSTS, ports="packet", queueing=queueing)
    if shape == "leaf-spine":
        return leaf_spine(2, 2, _LEAF_HOSTS, queueing=queueing)
    fabric = load(Path(shape))
    if arguments.rate_mbps is None and arguments.depth is None:
        return fabric
    changes: dict[str, Any] = {"rate_bps": rate} if arguments.rate_mbps is not None else {}
    if arguments.depth is not None:
        changes["depth_packets"] = depth
    return dataclasses.replace(fabric, queueing=dataclasses.replace(fabric.queueing, **changes))


def _setup(arguments: argparse.Namespace, state: TestbedState, fabric: Fabric) -> TestbedSetup:
    port = state.layout.switches[0].ports[0]
    bmv2 = state.layout.kind == "bmv2"
    collective = arguments.collective or ("ps" if bmv2 else "direct")
    return TestbedSetup(
        seed=arguments.seed,
        steps=arguments.steps,
        rate_bps=port.rate_bps,
        depth_packets=port.depth_packets,
        loss_bound=arguments.loss_bound,
        precision=arguments.precision,
        collective="server" if collective == "ps" else "direct",
        switch=state.layout.kind,
        shape="star" if len(state.layout.switches) == 1 else "leaf-spine",
        one_port=bmv2,
        hops=most_switches(fabric),
    )


def _refuse_other(arguments: argparse.Namespace, state: TestbedState) -> None:
    """Refuse to run on a testbed that the command line does not describe."""
    given = [arguments.fabric, arguments.rate_mbps, arguments.depth]
    if any(value is not None for value in given) or arguments.switch not in (None, state.layout.kind):
        raise TestbedError(
            f"testbed {state.layout.name!r} is up, with {state.layout.kind} switches; leave out options that describe "
            "another one, take it down, or choose another --name"
        )


def _show(name: str, state: TestbedState) -> None:
    """Print the hosts and switches of a testbed, and how to reach them."""
    layout = state.layout
    print(f"testbed {name!r} is up: {len(layout.hosts)} hosts, switches: {len(layout.switches)} ({layout.kind})")
    for plan in layout.switches:
        made = state.switches[plan.name]
        runs = "runs" if made.process.alive else "is being started again"
        again = f", started again {made.restarts} times" if made.restarts else ""
        print(f"  switch {plan.name:<8} {runs}, process {made.process.pid}, {len(plan.ports)} ports{again}")
    for host in layout.hosts:
        print(f"  host {host.name:<10} {host.address:<12} at {host.switch}:{host.port}")
    print(f"  in a host:  ip netns exec {layout.hosts[0].namespace} COMMAND")
    print(f"  switches:   dlcp fabric status {StateFile(name).path(FABRIC)}")
