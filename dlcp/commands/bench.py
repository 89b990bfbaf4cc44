# SPDX-License-Identifier: Apache-2.0
"""``dlcp bench``: measure something, and print one JSON document."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from dlcp.bench.path import BenchPath, LinkOutages, RoutedPath, VethPair, loopback
from dlcp.bench.results import BenchError, BenchResult, mean_against, say, show, significant
from dlcp.commands.common import DURATIONS, MBPS, option, real, refuse, whole
from dlcp.configuration import Range
from dlcp.namespace import NamespaceError, become_root

_PERCENT: Final = Range(0.0, 100, below=True)
_MEGABYTES: Final = Range(0.001, 100_000)
_LOSSES_PERCENT: Final = (0.0, 0.1, 1.0, 3.0)
_OUTAGES_PERCENT: Final = (1.0, 3.0)
_RTTS_MS: Final = (1.0, 20.0, 100.0)
_BUFFERS: Final = (0.2, 1.0, 10.0)
_VALUE_BYTES: Final = 4
_CEILINGS: Final = (0.25, 0.5, 0.75)
_LOSSES: Final = (0.1, 0.3)
_RUNS: Final = Path("out/convergence.jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp bench`` takes."""
    names = parser.add_subparsers(metavar="NAME", required=True)

    def declare(
        name: str,
        purpose: str,
        rounds: int | None,
        measure: Callable[[argparse.Namespace], Sequence[BenchResult]] | None = None,
        root: bool = False,
    ) -> argparse.ArgumentParser:
        command = names.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        command.set_defaults(measure=measure or partial(_run, name), root=root)
        if rounds:
            command.add_argument(
                "--rounds", type=whole(1, 100_000), default=rounds, metavar="N", help=f"that count (default: {rounds})"
            )
        return command

    allreduce = declare("allreduce", "all-reduce of 100 MB against Gloo, over a clean path", 9, _allreduce)
    allreduce.add_argument("--ranks", type=whole(2, 10_000), nargs="+", metavar="N", help="(default: 2 4; over veth 2)")
    allreduce.add_argument("--over", choices=("loopback", "veth"), default="loopback", help="(default: loopback)")
    cpu = declare(
        "cpu", "processor time of an all-reduce through sockets, beside Gloo's and the least possible", 9, _cpu
    )
    cpu.add_argument("--ranks", type=whole(2, 10_000), nargs="+", default=[2, 4], metavar="N", help="(default: 2 4)")
    loss = declare("loss", "the same through a router that loses packets at random", 7, _loss, root=True)
    loss.add_argument("--ranks", type=whole(2, 10_000), default=2, metavar="N", help="(default: 2)")
    loss.add_argument("--percent", type=real(_PERCENT), nargs="+", default=_LOSSES_PERCENT, help="(default: 0 0.1 1 3)")
    loss.add_argument(
        "--outages",
        type=real(_PERCENT),
        nargs="*",
        default=_OUTAGES_PERCENT,
        help="loss beside links that fail (default: 1 3)",
    )
    loss.add_argument(
        "--outage-rounds", type=whole(1, 100_000), default=20, metavar="N", help="that count there (default: 20)"
    )
    tags = declare("tags", "tagging of 100 MB on one core", 15)
    step = declare("step", "training step of a 25-million-parameter model, against DDP over Gloo", 9, _step)
    step.add_argument("--ranks", type=whole(2, 10_000), default=4, metavar="N", help="(default: 4)")
    step.add_argument("--rate-mbps", type=real(MBPS), metavar="RATE", help="rate of each link (default: over loopback)")
    step.add_argument("--sockets", action="store_true", help="over loopback, too (default: through memory there)")
    switch = declare("switch", "the built-in switch between network interfaces, against simple_switch", 7, root=True)
    compression = declare("compression", "compressors: bytes, CPU time and error on one core", 7)
    convergence = declare(
        "convergence", "what deferral and loss cost in accuracy and steps: five tasks, an hour", None, _convergence
    )
    convergence.add_argument("--tasks", nargs="+", metavar="TASK", help="(default: digits patches text ratings table)")
    convergence.add_argument("--seeds", type=whole(1, 10_000), default=5, metavar="N", help="runs of each (default: 5)")
    convergence.add_argument(
        "--ceilings",
        type=real(Range(0.0, 1, below=True)),
        nargs="*",
        default=_CEILINGS,
        metavar="SHARE",
        help="to defer (default: 0.25 0.5 0.75)",
    )
    convergence.add_argument(
        "--losses",
        type=real(Range(0.0, 1, below=True)),
        nargs="*",
        default=_LOSSES,
        metavar="SHARE",
        help="to lose (default: 0.1 0.3)",
    )
    convergence.add_argument(
        "--length", type=whole(1, 10_000), default=1, metavar="N", help="times as many steps (default: 1)"
    )
    convergence.add_argument(
        "--runs",
        type=Path,
        default=_RUNS,
        metavar="FILE",
        help="of finished runs, which are kept (default: %(default)s)",
    )
    convergence.add_argument(
        "--curves", type=Path, metavar="FILE", help="where to write curves, as dlcp/convergence has them"
    )
    delay = declare("delay", "the same over long paths and through deep buffers, alone and beside TCP", 3, _delay, True)
    delay.add_argument(
        "--rtt-ms", type=real(DURATIONS), nargs="+", default=_RTTS_MS, metavar="MS", help="(default: 1 20 100)"
    )
    delay.add_argument(
        "--buffers",
        type=real(Range(0.0, 1000, above=True)),
        nargs="+",
        default=_BUFFERS,
        metavar="B",
        help="in bandwidth-delay products",
    )
    delay.add_argument("--rate-mbps", type=real(MBPS), default=40.0, metavar="RATE", help="of the path (default: 40)")
    delay.add_argument(
        "--seconds", type=real(DURATIONS), default=8.0, help="that a run takes at that rate (default: 8)"
    )
    sim = declare("sim", "packet-hops a second of the simulator, beside ns.py", 3, _sim)
    sim.add_argument(
        "--bytes", type=whole(1, 1 << 40), default=25_000_000, help="of each worker or rank (default: %(default)s)"
    )
    sim.add_argument(
        "--ranks", type=whole(2, 10_000), default=1024, metavar="N", help="of the ring (default: %(default)s)"
    )
    sim.add_argument("--packets", type=whole(1), default=2000, metavar="N", help="of each flow, beside ns.py")
    paths = declare(
        "paths", "all-reduce over four equal routes, one of which may be slow or lossy", 3, _paths, root=True
    )
    paths.add_argument(
        "--draws", type=whole(1, 10_000), default=3, metavar="N", help="how often ranks start anew (default: 3)"
    )
    paths.add_argument("--rate-mbps", type=real(MBPS), default=50.0, metavar="RATE", help="of each link (default: 50)")
    paths.add_argument(
        "--megabytes", type=real(_MEGABYTES), default=12.0, metavar="MB", help="of float32 (default: 12)"
    )
    slow_path = declare("slow-path", "all-reduce where one rank is behind a slow port", 7, _slow_path, root=True)
    slow_path.add_argument(
        "--ranks", type=whole(2, 10_000), nargs="+", default=[2, 4], metavar="N", help="(default: 2 4)"
    )
    slow_path.add_argument(
        "--rate-mbps", type=real(MBPS), default=100.0, metavar="RATE", help="of a port (default: 100)"
    )
    slow_path.add_argument(
        "--slowness", type=real(Range(1.0, 1000)), default=3.0, metavar="TIMES", help="of one port (default: 3)"
    )
    slow_path.add_argument(
        "--megabytes", type=real(_MEGABYTES), default=8.0, metavar="MB", help="of float32 (default: 8)"
    )
    slow_path.add_argument(
        "--deferral-bound", type=option("deferral_bound"), default=0.75, metavar="SHARE", help="(default: 0.75)"
    )
    tail = declare("tail", "all-reduce beside bursts of other traffic: growth with the tail", 60, _tail, root=True)
    tail.add_argument("--ranks", type=whole(2, 10_000), default=4, metavar="N", help="(default: 4)")
    tail.add_argument("--rate-mbps", type=real(MBPS), default=100.0, metavar="RATE", help="of a port (default: 100)")
    tail.add_argument("--megabytes", type=real(_MEGABYTES), default=1.0, metavar="MB", help="of float32 (default: 1)")
    tail.add_argument(
        "--probes", type=whole(1, 1_000_000), default=60, metavar="N", help="for each length of bursts (default: 60)"
    )
    tail.add_argument("--seed", type=whole(0), default=1, metavar="N", help="of the bursts (default: 1)")
    for command in (allreduce, cpu, delay, loss, tags, step, switch, compression, paths, slow_path, tail):
        command.add_argument(
            "--warm-up", type=whole(0, 100_000), default=2, metavar="N", help="rounds before them (default: 2)"
        )
    for command in (allreduce, loss, step):
        command.add_argument(
            "--mtu", type=whole(576, 65_535), default=1500, metavar="BYTES", help="MTU of the path (default: 1500)"
        )
    for command in (allreduce, cpu, loss):
        command.add_argument(
            "--megabytes", type=real(_MEGABYTES), default=100.0, metavar="MB", help="of float32 (default: 100)"
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the document and return the exit status."""
    try:
        if arguments.root:
            become_root()
        results = arguments.measure(arguments)
    except (BenchError, NamespaceError) as error:
        show([])
        return refuse("bench", error, 1)
    show(results)
    return 0


def _allreduce(arguments: argparse.Namespace) -> list[BenchResult]:
    veth = arguments.over == "veth"
    counts = arguments.ranks or ([2] if veth else [2, 4])
    if veth:
        if counts != [2]:
            raise BenchError(f"a veth pair joins 2 ranks, not {counts}; leave --ranks out, or go over loopback")
        become_root()
    results = []
    for count in counts:
        name = f"allreduce.n{count}" + (".veth" if veth else "") + _mtu_suffix(arguments.mtu)
        results += _measure_allreduce(VethPair(arguments.mtu) if veth else loopback(count), name, arguments)
    return results


def _cpu(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.cpu import measure

    values = int(arguments.megabytes * 1e6) // _VALUE_BYTES
    return [entry for count in arguments.ranks for entry in measure(count, values=values, **_rounds(arguments))]


def _convergence(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.convergence import measure
    from dlcp.bench.learning_tasks import TASKS

    return measure(
        runs=arguments.runs,
        tasks=arguments.tasks or list(TASKS),
        seeds=arguments.seeds,
        ceilings=arguments.ceilings,
        losses=arguments.losses,
        length=arguments.length,
        curves=arguments.curves,
        progress=say,
    )


def _delay(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.delay import measure

    return measure(
        rtts_s=[rtt_ms / 1e3 for rtt_ms in arguments.rtt_ms],
        buffers=arguments.buffers,
        rate_bps=round(arguments.rate_mbps * 1e6),
        seconds=arguments.seconds,
        **_rounds(arguments),
    )


def _loss(arguments: argparse.Namespace) -> list[BenchResult]:
    results = []
    for percent in arguments.percent:
        path = RoutedPath(arguments.ranks, percent / 100, arguments.mtu)
        name = f"allreduce.loss{percent:g}{_mtu_suffix(arguments.mtu)}"
        results += _measure_allreduce(path, name, arguments, by_control=True)
    for percent in arguments.outages:
        path = RoutedPath(arguments.ranks, percent / 100, arguments.mtu)
        results.append(_measure_outages(path, f"allreduce.outages.loss{percent:g}", arguments))
    return results


def _measure_outages(path: RoutedPath, name: str, arguments: argparse.Namespace) -> BenchResult:
    """Measure DLCP with its bound beside DLCP without, where links fail now and then."""
    from dlcp.bench.allreduce import LOSSLESS, LOSSY, contenders, measure

    say(f"{name}: {path.words}, links gone for 5-50 ms once a second, {arguments.megabytes:g} MB, times in ms")
    with path, LinkOutages(path, seed=1) as outages:
        ways = [way for way in contenders(path.controls) if way.name in (LOSSY, LOSSLESS) or way.control]
        settings = {**_rounds(arguments), "rounds": arguments.outage_rounds}
        values = int(arguments.megabytes * 1e6) // _VALUE_BYTES
        found = measure(path, values=values, ways=ways, mtu_bytes=arguments.mtu, **settings)
        details = {
            "path": found.path,
            "outages_s": significant(outages.seconds),
            "path_loss": significant(found.path_loss),
            "packets": found.ledgers[LOSSY],
        }
    return mean_against(name, "ms", found.samples, LOSSY, LOSSLESS, details)


def _tail(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.tail import measure

    return measure(
        ranks=arguments.ranks,
        rate_bps=round(arguments.rate_mbps * 1e6),
        megabytes=arguments.megabytes,
        probes=arguments.probes,
        seed=arguments.seed,
        **_rounds(arguments),
    )


def _slow_path(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.slow_path import measure

    settings = {
        "rate_bps": round(arguments.rate_mbps * 1e6),
        "slowness": arguments.slowness,
        "megabytes": arguments.megabytes,
        "deferral_bound": arguments.deferral_bound,
        **_rounds(arguments),
    }
    return [entry for ranks in arguments.ranks for entry in measure(ranks=ranks, **settings)]


def _measure_allreduce(
    path: BenchPath, name: str, arguments: argparse.Namespace, *, by_control: bool = False
) -> list[BenchResult]:
    from dlcp.bench.allreduce import measure

    say(f"{name}: {path.words}, {arguments.megabytes:g} MB, times in ms")
    with path:
        values = int(arguments.megabytes * 1e6) // _VALUE_BYTES
        found = measure(path, values=values, mtu_bytes=arguments.mtu, **_rounds(arguments))
    if not by_control:
        return found.results(name)
    return [entry for control in path.controls for entry in found.results(f"{name}.{control}", [control])]


def _run(name: str, arguments: argparse.Namespace) -> list[BenchResult]:
    """Run a benchmark that takes nothing but rounds."""
    results: list[BenchResult] = importlib.import_module(f"dlcp.bench.{name}").measure(**_rounds(arguments))
    return results


def _step(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.step import measure

    if arguments.rate_mbps:
        become_root()
    return measure(
        ranks=arguments.ranks,
        rate_bps=round(arguments.rate_mbps * 1e6) if arguments.rate_mbps else None,
        mtu_bytes=arguments.mtu,
        shared_memory=not arguments.sockets,
        **_rounds(arguments),
    )


def _paths(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.paths import measure

    return measure(
        rate_mbps=arguments.rate_mbps, megabytes=arguments.megabytes, draws=arguments.draws, **_rounds(arguments)
    )


def _sim(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.sim import measure

    sizes = {"size_bytes": arguments.bytes, "ranks": arguments.ranks, "packets": arguments.packets}
    return measure(rounds=arguments.rounds, **sizes)


def _rounds(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"rounds": arguments.rounds, "warm_up": arguments.warm_up, "progress": say}


def _mtu_suffix(mtu_bytes: int) -> str:
    return "" if mtu_bytes == 1500 else f".mtu{mtu_bytes}"
