# SPDX-License-Identifier: Apache-2.0
"""``dlcp demo``: train over a congested switch, with and without DLCP, and write a report page."""

import argparse
from functools import partial
from pathlib import Path

from dlcp.commands.common import DURATIONS, add, add_link, add_training, check_folder, real, refuse
from dlcp.demo.background import BURST_S
from dlcp.demo.variants import OPTIMIZERS, DemoSetup, variants
from dlcp.host import netlab


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp demo``."""
    add_training(parser, 60, Path("out/demo"))
    add_link(parser, 64, 32)
    add(parser, "--burst-seconds", "S", real(DURATIONS), "mean length of background bursts", default=BURST_S)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default: %(default)s)")
    parser.add_argument("--fp16", action="store_true", help="send 16 bits of each value; Gloo with PyTorch's fp16 hook")
    parser.add_argument("--loopback", action="store_true", help="use no network namespaces, and so no Gloo")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    from rich.console import Console

    from dlcp.demo.run import DemoError, LoopbackNetwork, NamespaceNetwork, execute, report, run_series, select
    from dlcp.switch.built_in import SwitchProcessError

    console = Console()
    namespaces, reason = (False, "--loopback") if arguments.loopback else try_namespaces()
    if not namespaces:
        console.print(f"No network namespaces ({reason}): runs on loopback, without Gloo and without real TCP.")
    network = NamespaceNetwork if namespaces else LoopbackNetwork
    try:
        check_folder("--out", arguments.out)
        setup = DemoSetup(
            seed=arguments.seed,
            steps=arguments.steps,
            rate_bps=round(arguments.rate_mbps * 1e6),
            depth_packets=arguments.depth,
            loss_bound=arguments.loss_bound,
            precision=arguments.precision,
            collective="server" if arguments.collective == "ps" else "direct",
            fp16=arguments.fp16,
            optimizer=arguments.optimizer,
            burst_s=arguments.burst_seconds,
        )
        possible = [variant for variant in variants(setup) if namespaces or variant.mode != "gloo"]
        chosen = select(possible, arguments.only, arguments.out)
        run_series(console, arguments.out, chosen, setup.steps, partial(execute, network, setup))
        report(console, arguments.out, arguments.only)
    except (DemoError, SwitchProcessError, ValueError) as error:
        return refuse("demo", error, 1)
    return 0


def try_namespaces() -> tuple[bool, str]:
    """Return whether network namespaces work, and the reason if not.

    May restart this program as root of a user namespace.
    """
    try:
        netlab.become_root()
    except netlab.NamespaceError as error:
        return False, str(error)
    return netlab.available()
