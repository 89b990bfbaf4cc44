# SPDX-License-Identifier: Apache-2.0
"""``dlcp testbed``: Mininet's hosts and links with real switches between them; train over them, and compare."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlcp.commands import testbed_tools
from dlcp.commands.common import add, add_link, add_training, check_folder, refuse
from dlcp.host.ip import IPV6, family_of
from dlcp.inputs.error_text import short

if TYPE_CHECKING:
    from dlcp.controller.fabric import Fabric, SwitchKind
    from dlcp.controller.testbed.layout import TestbedState
    from dlcp.demo.run import Progress
    from dlcp.demo.testbed_runs import TestbedSetup
    from dlcp.demo.variants import Variant

_NAME: Final = "dlcp"
_PROPER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_RATE_BPS: Final = 32_000_000
"""A port's rate by default, as in the demo."""
_DEPTH_PACKETS: Final = {"builtin": 32, "bmv2": 64}
"""Depth of each queue by default: the demo's, and BMv2's own."""
_STAR_HOSTS: Final = 7
"""Four workers, a parameter server and two sources of background traffic."""
_LEAF_HOSTS: Final = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp testbed``."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = commands.add_parser("up", help="create hosts, links and switches, program them, and leave them running")
    run = commands.add_parser("run", help="train over a testbed with Gloo and with DLCP, and write a report page")
    status = commands.add_parser("status", help="show the running testbed")
    down = commands.add_parser("down", help="remove a testbed, or the rest of a crashed one")
    live = "show the counters of each queue live; without a terminal, print what has changed"
    status.add_argument("--watch", action="store_true", help=live)
    for each in (up, run, status, down, *testbed_tools.add_commands(commands)):
        add(each, "--name", "NAME", _name, "prefix of its namespaces and files", default=_NAME)
    for each in (up, run):
        _add_shape(each)
    add_training(run.add_argument_group("what to train"), 24, Path("out/testbed"))


def _name(text: str) -> str:
    """Check that files, namespaces and interfaces can have this name."""
    if not _PROPER_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"takes up to 32 letters, digits, - and _, got {short(text)}")
    return text


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to build")
    add(group, "--fabric", "star|leaf-spine|FILE", str, "shape, or a fabric as YAML (default: star)")
    group.add_argument("--switch", choices=["builtin", "bmv2"], help="kind of switches (default: builtin)")
    group.add_argument("--ipv6", action="store_true", help="give hosts IPv6 addresses, and no others")
    add_link(group, None, None, ("32", "32; BMv2: 64"))


def run(arguments: argparse.Namespace) -> int:
    """Run one of the actions and return the exit status."""
    from dlcp.controller.testbed import TestbedError
    from dlcp.host.netlab import NamespaceError

    actions = {"up": _up, "run": _run, "status": _status, "down": _down, **testbed_tools.ACTIONS}
    try:
        return actions[arguments.action](arguments)
    except PermissionError as error:
        return refuse("testbed", f"{error}; run it as root, with sudo")
    except (TestbedError, NamespaceError, OSError, ValueError) as error:
        return refuse("testbed", error)


def _up(arguments: argparse.Namespace) -> int:
    from dlcp.controller.testbed.accounts import port_rates

    state = _bring_up(arguments)
    _show(arguments.name, state)
    for rate in port_rates(state.layout):
        queues = "one queue" if rate.queues == 1 else f"{rate.queues} queues"
        print(f"a port carries {rate.carried_bps / 1e6:.1f} Mbit/s over {queues}, asked: {rate.asked_bps / 1e6:.1f}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from dlcp.controller.testbed.layout import StateFile

    state = StateFile(arguments.name).read()
    if state is None:
        print(f"no testbed {arguments.name!r} is up")
        return 1
    if not (state.alive and state.ready):
        print(f"testbed {arguments.name!r} has crashed; `dlcp testbed down` removes what it left")
        return 1
    if arguments.watch:
        return testbed_tools.watch(arguments.name)
    _show(arguments.name, state)
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from dlcp.controller.testbed.lifecycle import down

    ended = down(arguments.name)
    print(f"testbed {arguments.name!r} is down; {ended} processes ended" if ended else "nothing was up")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from dlcp.controller.testbed.layout import StateFile
    from dlcp.controller.testbed.lifecycle import down, fabric_of, find

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


def _train(arguments: argparse.Namespace, state: "TestbedState", fabric: "Fabric") -> int:
    """Make the chosen runs; write the page once the folder holds all."""
    from rich.console import Console

    from dlcp.controller.testbed.accounts import IDLE_MIN
    from dlcp.demo.run import DemoError, report, run_series, select
    from dlcp.demo.testbed_runs import check, disagreements, train
    from dlcp.demo.variants import variants

    setup = _setup(arguments, state, fabric)
    check(setup, state)
    console = Console()

    def train_variant(variant: "Variant", *, progress: "Progress") -> dict[str, Any]:
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


def _bring_up(arguments: argparse.Namespace) -> "TestbedState":
    from dlcp.controller.testbed.lifecycle import up

    kind: SwitchKind = arguments.switch or "builtin"
    return up(_fabric(arguments, kind), kind, arguments.name)


def _fabric(arguments: argparse.Namespace, kind: "SwitchKind") -> "Fabric":
    """Return the fabric that the options describe."""
    from dlcp.controller.fabric import leaf_spine, load, star
    from dlcp.switch import PortQueueing

    shape = "star" if arguments.fabric is None else arguments.fabric
    rate = _RATE_BPS if arguments.rate_mbps is None else round(arguments.rate_mbps * 1e6)
    depth = _DEPTH_PACKETS[kind] if arguments.depth is None else arguments.depth
    queueing = PortQueueing(rate_bps=rate, depth_packets=depth)
    if shape == "star":
        return star(_STAR_HOSTS, ports="packet", queueing=queueing, ipv6=arguments.ipv6)
    if shape == "leaf-spine":
        return leaf_spine(2, 2, _LEAF_HOSTS, queueing=queueing, ipv6=arguments.ipv6)
    if arguments.ipv6:
        raise ValueError(f"--ipv6 is for the shapes star and leaf-spine; {shape} names the addresses of its hosts")
    fabric = load(Path(shape))
    if arguments.rate_mbps is None and arguments.depth is None:
        return fabric
    changes: dict[str, Any] = {"rate_bps": rate} if arguments.rate_mbps is not None else {}
    if arguments.depth is not None:
        changes["depth_packets"] = depth
    return dataclasses.replace(fabric, queueing=dataclasses.replace(fabric.queueing, **changes))


def _setup(arguments: argparse.Namespace, state: "TestbedState", fabric: "Fabric") -> "TestbedSetup":
    from dlcp.demo.testbed_runs import TestbedSetup

    port = state.layout.switches[0].ports[0]
    bmv2 = state.layout.kind == "bmv2"
    collective = arguments.collective or ("ps" if bmv2 else "direct")
    return TestbedSetup(
        seed=arguments.seed,
        steps=arguments.steps,
        rate_bps=port.queueing.rate_bps,
        depth_packets=port.queueing.depths()[0],
        loss_bound=arguments.loss_bound,
        precision=arguments.precision,
        collective="server" if collective == "ps" else "direct",
        switch=state.layout.kind,
        shape="star" if len(state.layout.switches) == 1 else "leaf-spine",
        one_port=bmv2,
    )


def _refuse_other(arguments: argparse.Namespace, state: "TestbedState") -> None:
    """Refuse to run on a testbed that the command line does not describe."""
    from dlcp.controller.testbed import TestbedError

    given = [arguments.fabric, arguments.rate_mbps, arguments.depth]
    is_other = any(value is not None for value in given) or arguments.switch not in (None, state.layout.kind)
    if is_other or (arguments.ipv6 and family_of(state.layout.hosts[0].address) is not IPV6):
        raise TestbedError(
            f"testbed {state.layout.name!r} is up, with {state.layout.kind} switches; leave out options that describe "
            "another one, take it down, or choose another --name"
        )


def _show(name: str, state: "TestbedState") -> None:
    """Print the hosts and switches of a testbed, and how to reach them."""
    from dlcp.controller.testbed.faults import changes
    from dlcp.controller.testbed.layout import StateFile
    from dlcp.controller.testbed.lifecycle import FABRIC

    layout = state.layout
    print(f"testbed {name!r} is up: {len(layout.hosts)} hosts, switches: {len(layout.switches)} ({layout.kind})")
    for plan in layout.switches:
        made = state.switches[plan.name]
        runs = "runs" if made.process.alive else "is being started again"
        again = f", started again {made.restarts} times" if made.restarts else ""
        print(f"  switch {plan.name:<8} {runs}, process {made.process.pid}, {len(plan.ports)} ports{again}")
    for host in layout.hosts:
        print(f"  host {host.name:<10} {host.address:<12} at {host.switch}:{host.port}")
    for a, b in layout.trunks:
        print(f"  link {a} - {b}")
    for line in changes(state):
        print(f"  {line}")
    print(f"  in a host:  dlcp testbed shell {layout.hosts[0].name} COMMAND")
    print(f"  switches:   dlcp fabric status {StateFile(name).path(FABRIC)}")
