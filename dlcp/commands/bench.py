# SPDX-License-Identifier: Apache-2.0
"""``dlcp bench``: measure something, and print one JSON document."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from dlcp.bench.path import Path, RoutedPath, VethPair, loopback
from dlcp.bench.report import Result, say, show
from dlcp.namespace import NamespaceError, become_root

LOSSES_PERCENT: Final = (0.0, 0.1, 1.0, 3.0)
BYTES_PER_VALUE: Final = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp bench`` takes."""
    names = parser.add_subparsers(metavar="NAME", required=True)
    allreduce = names.add_parser("allreduce", help="all-reduce of 100 MB against Gloo, over a clean path")
    _declare(allreduce, _allreduce, rounds=9)
    _declare_buffer(allreduce)
    allreduce.add_argument("--ranks", type=int, nargs="+", metavar="N", help="(default: 2 4; over veth 2)")
    allreduce.add_argument("--over", choices=("loopback", "veth"), default="loopback", help="(default: loopback)")
    loss = names.add_parser("loss", help="the same through a router that loses packets at random")
    _declare(loss, _loss, rounds=7)
    _declare_buffer(loss)
    loss.add_argument("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    loss.add_argument("--percent", type=float, nargs="+", default=LOSSES_PERCENT, help="(default: 0 0.1 1 3)")
    _declare(names.add_parser("tags", help="tagging of 100 MB on one core"), _tags, rounds=15)
    step = names.add_parser("step", help="training step of a 25-million-parameter model, against DDP over Gloo")
    _declare(step, _step, rounds=9)
    step.add_argument("--ranks", type=int, default=4, metavar="N", help="(default: 4)")
    step.add_argument("--rate-mbps", type=float, metavar="R", help="of each rank's link (default: over loopback)")
    step.add_argument("--mtu", type=int, default=1500, metavar="BYTES", help="what packets fit (default: 1500)")
    step.add_argument("--sockets", action="store_true", help="over loopback, too (default: through memory there)")
    switch = names.add_parser("switch", help="the built-in switch between network interfaces, against simple_switch")
    _declare(switch, _switch, rounds=7)
    compression = names.add_parser("compression", help="compressors: bytes, CPU time and error on one core")
    _declare(compression, _compression, rounds=7)
    sim = names.add_parser("sim", help="packet-hops a second of the simulator, beside ns.py")
    sim.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds that count (default: 3)")
    sim.set_defaults(measure=_sim)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the document and return the exit status."""
    measure: Callable[[argparse.Namespace], Sequence[Result]] = arguments.measure
    try:
        results = measure(arguments)
    except NamespaceError as error:
        say(f"dlcp bench: {error}")
        show([])
        return 1
    show(results)
    return 0


def main(name: str) -> int:
    """Run one benchmark as a program of its own, which takes what ``dlcp bench NAME`` takes."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([name, *sys.argv[1:]]))


def _declare(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Sequence[Result]], rounds: int
) -> None:
    parser.set_defaults(measure=measure)
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help=f"that count (default: {rounds})")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="rounds before them (default: 2)")


def _declare_buffer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=100.0, metavar="MB", help="of float32 (default: 100)")
    parser.add_argument("--mtu", type=int, default=1500, metavar="BYTES", help="what packets fit (default: 1500)")


def _allreduce(arguments: argparse.Namespace) -> list[Result]:
    veth = arguments.over == "veth"
    counts = arguments.ranks or ([2] if veth else [2, 4])
    if veth:
        if counts != [2]:
            raise NamespaceError(f"a veth pair joins 2 ranks, not {counts}; leave --ranks out, or go over loopback")
        become_root()
    results = []
    for count in counts:
        name = f"allreduce.n{count}" + (".veth" if veth else "") + _mtu_suffix(arguments.mtu)
        results += _measure_allreduce(VethPair(arguments.mtu) if veth else loopback(count), name, arguments)
    return results


def _loss(arguments: argparse.Namespace) -> list[Result]:
    become_root()
    results = []
    for percent in arguments.percent:
        path = RoutedPath(arguments.ranks, percent / 100, arguments.mtu)
        name = f"allreduce.loss{percent:g}{_mtu_suffix(arguments.mtu)}"
        results += _measure_allreduce(path, name, arguments, by_control=True)
    return results


def _measure_allreduce(
    path: Path, name: str, arguments: argparse.Namespace, *, by_control: bool = False
) -> list[Result]:
    from dlcp.bench.allreduce import measure

    say(f"{name}: {path.words}, {arguments.megabytes:g} MB, times in ms")
    with path:
        found = measure(
            path,
            values=int(arguments.megabytes * 1e6) // BYTES_PER_VALUE,
            mtu_bytes=arguments.mtu,
            rounds=arguments.rounds,
            warm_up=arguments.warm_up,
            progress=say,
        )
    if not by_control:
        return found.results(name)
    return [entry for control in path.controls for entry in found.results(f"{name}.{control}", [control])]


def _tags(arguments: argparse.Namespace) -> list[Result]:
    from dlcp.bench.tags import measure

    return measure(rounds=arguments.rounds, warm_up=arguments.warm_up, progress=say)


def _compression(arguments: argparse.Namespace) -> list[Result]:
    from dlcp.bench.compression import measure

    return measure(rounds=arguments.rounds, warm_up=arguments.warm_up, progress=say)


def _step(arguments: argparse.Namespace) -> list[Result]:
    from dlcp.bench.step import measure

    if arguments.rate_mbps:
        become_root()
    return measure(
        ranks=arguments.ranks,
        rate_bps=round(arguments.rate_mbps * 1e6) if arguments.rate_mbps else None,
        mtu_bytes=arguments.mtu,
        shared_memory=not arguments.sockets,
        rounds=arguments.rounds,
        warm_up=arguments.warm_up,
        progress=say,
    )


def _switch(arguments: argparse.Namespace) -> list[Result]:
    from dlcp.bench.frames import TrafficError
    from dlcp.bench.switch import measure

    become_root()
    try:
        return measure(rounds=arguments.rounds, warm_up=arguments.warm_up, progress=say)
    except TrafficError as error:
        raise NamespaceError(str(error)) from error


def _sim(arguments: argparse.Namespace) -> list[Result]:
    from dlcp.bench.sim import measure

    return measure(rounds=arguments.rounds)


def _mtu_suffix(mtu_bytes: int) -> str:
    return "" if mtu_bytes == 1500 else f".mtu{mtu_bytes}"
