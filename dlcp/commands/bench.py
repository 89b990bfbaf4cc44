# SPDX-License-Identifier: Apache-2.0
"""``dlcp bench``: measure something, and print one JSON document."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from dlcp.bench import sweep
from dlcp.bench.path import BenchPath, LinkOutages, RoutedPath, VethPair, loopback
from dlcp.bench.results import LEAST_ROUNDS, BenchError, BenchResult, mean_against, say, show, significant
from dlcp.bench.sweep import FailedCellsError, Sweep, SweepCell
from dlcp.commands.common import DURATIONS, MBPS, option, real, refuse, whole
from dlcp.configuration import Range
from dlcp.netlab import NamespaceError, become_root

_PERCENT: Final = Range(0.0, 100, below=True)
_MEGABYTES: Final = Range(0.001, 100_000)
_LOSSES_PERCENT: Final = (0.0, 0.1, 1.0, 3.0)
_SWEPT_LOSSES_PERCENT: Final = (0.0, 0.1, 1.0, 3.0, 5.0)
_OUTAGES_PERCENT: Final = (1.0, 3.0)
_ALLREDUCE_CONTENDERS: Final = 7
_DELAY_CONTENDERS: Final = 5
"""Alone and beside other flows."""
_SLOW_PATH_CONTENDERS: Final = 6
_SLOW_PATH_WARM_UP: Final = 5
_TAIL_CONTENDERS: Final = 25
"""Six at each of three ratios, and one for each length of bursts that is tried."""
_BUFFER: Final = 2.0
"""Bandwidth-delay products that the queues hold where `loss` has a round trip: enough for CUBIC to fill the path."""
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
    allreduce.add_argument("--over", choices=("loopback", "veth"), default="loopback", help="(default: loopback)")
    cpu = declare(
        "cpu", "processor time of an all-reduce through sockets, beside Gloo's and the least possible", 9, _cpu
    )
    cpu.add_argument("--ranks", type=whole(2, 10_000), nargs="+", default=[2, 4], metavar="N", help="(default: 2 4)")
    loss = declare("loss", "the same through a router that loses packets at random", 7, _loss, root=True)
    loss.add_argument(
        "--percent", type=real(_PERCENT), nargs="+", metavar="P", help="(default: 0 0.1 1 3; of a sweep 0 0.1 1 3 5)"
    )
    loss.add_argument(
        "--outages",
        type=real(_PERCENT),
        nargs="*",
        metavar="P",
        help="loss beside links that fail (default: 1 3; of a sweep, or with a round trip, none)",
    )
    loss.add_argument(
        "--outage-rounds", type=whole(1, 100_000), default=20, metavar="N", help="that count there (default: 20)"
    )
    loss.add_argument(
        "--rtt-ms",
        type=real(Range(0.0, 10_000)),
        default=0.0,
        metavar="MS",
        help="round trip, through the built-in switch (default: 0, through a router)",
    )
    loss.add_argument(
        "--rate-mbps", type=real(MBPS), default=100.0, metavar="RATE", help="of a port of that switch (default: 100)"
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
        "--rate-mbps", type=real(MBPS), default=100.0, metavar="RATE", help="of a port (default: 100)"
    )
    slow_path.add_argument(
        "--slowness", type=real(Range(1.0, 1000)), default=3.0, metavar="TIMES", help="of one port (default: 3)"
    )
    slow_path.add_argument(
        "--deferral-bound", type=option("deferral_bound"), default=0.75, metavar="SHARE", help="(default: 0.75)"
    )
    tail = declare("tail", "all-reduce beside bursts of other traffic: growth with the tail", 60, _tail, root=True)
    tail.add_argument("--rate-mbps", type=real(MBPS), default=100.0, metavar="RATE", help="of a port (default: 100)")
    tail.add_argument(
        "--probes", type=whole(1, 1_000_000), default=60, metavar="N", help="for each length of bursts (default: 60)"
    )
    tail.add_argument("--seed", type=whole(0), default=1, metavar="N", help="of the bursts (default: 1)")
    for command in (allreduce, cpu, delay, loss, tags, step, switch, compression, paths, slow_path, tail):
        swept = ", of a sweep 1" if command in (allreduce, delay, loss, slow_path, tail) else ""
        command.add_argument(
            "--warm-up", type=whole(0, 100_000), metavar="N", help=f"rounds before them (default: 2{swept})"
        )
    for command in (allreduce, loss, step):
        command.add_argument(
            "--mtu", type=whole(576, 65_535), default=1500, metavar="BYTES", help="MTU of the path (default: 1500)"
        )
    cpu.add_argument(
        "--megabytes", type=real(_MEGABYTES), default=100.0, metavar="MB", help="of float32 (default: 100)"
    )
    _add_sweep(allreduce, "100", "2 4; over veth 2")
    _add_sweep(delay, "those of --seconds", None)
    _add_sweep(loss, "100", "2")
    _add_sweep(slow_path, "8", "2 4")
    _add_sweep(tail, "1", "4")


def _add_sweep(command: argparse.ArgumentParser, megabytes: str, ranks: str | None) -> None:
    """Declare sizes, numbers of ranks, and what makes a sweep of them."""
    command.add_argument(
        "--megabytes", type=real(_MEGABYTES), nargs="+", metavar="MB", help=f"of float32 (default: {megabytes})"
    )
    if ranks:
        command.add_argument("--ranks", type=whole(2, 10_000), nargs="+", metavar="N", help=f"(default: {ranks})")
    sizes = " ".join(f"{size:g}" for size in sweep.SWEPT_SIZES_MB)
    counts = f", and {' '.join(map(str, sweep.SWEPT_RANKS))} ranks" if ranks else ""
    command.add_argument(
        "--sweep",
        action="store_true",
        help=f"{sizes} MB{counts}, where not given and the path allows; prints a table of all ratios",
    )
    command.add_argument(
        "--cell-seconds",
        type=real(DURATIONS),
        metavar="S",
        help="time for the rounds of one size, number of ranks and setting, but not fewer than "
        f"{LEAST_ROUNDS} rounds (default: unlimited; of a sweep {sweep.CELL_S:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the document and return the exit status."""
    try:
        if arguments.root:
            become_root()
        results = arguments.measure(arguments)
    except FailedCellsError as error:
        show(error.results, error.failed)
        return refuse("bench", error, 1)
    except (BenchError, NamespaceError) as error:
        show([])
        return refuse("bench", error, 1)
    show(results)
    return 0


def _allreduce(arguments: argparse.Namespace) -> list[BenchResult]:
    veth = arguments.over == "veth"
    if veth:
        if arguments.ranks not in (None, [2]):
            raise BenchError(
                f"a veth pair joins 2 ranks, not {arguments.ranks}; leave --ranks out, or go over loopback"
            )
        become_root()
    cells = _Cells(arguments, [2] if veth else [2, 4], 100.0, sweepable_ranks=not veth)
    swept = Sweep(cells.several)
    for ranks, megabytes in cells.all(sweep.has_memory):
        name = f"allreduce.n{ranks}{cells.suffix(None, megabytes)}" + (".veth" if veth else "")
        name += _mtu_suffix(arguments.mtu)
        make = partial(VethPair, arguments.mtu) if veth else partial(loopback, ranks)
        cell = SweepCell("veth pair" if veth else "one host", ranks, megabytes)
        swept.measure(name, cell, partial(_measure_allreduce, make, name, arguments, megabytes))
    return swept.finish()


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
    from dlcp.bench.delay import measure, megabytes_in, seconds_for

    rate_bps = round(arguments.rate_mbps * 1e6)
    cells = _Cells(arguments, [2], megabytes_in(arguments.seconds, rate_bps), sweepable_ranks=False)
    swept = Sweep(cells.several)
    settings = [(rtt_ms, buffer) for rtt_ms in arguments.rtt_ms for buffer in arguments.buffers]
    for rtt_ms, buffer in settings:
        for _, megabytes in cells.all(partial(_has_time, arguments, _DELAY_CONTENDERS, 0, rate_bps)):
            suffix = cells.suffix(None, megabytes)
            run = partial(
                measure,
                rtts_s=[rtt_ms / 1e3],
                buffers=[buffer],
                rate_bps=rate_bps,
                seconds=seconds_for(megabytes, rate_bps),
                suffix=suffix,
                **_rounds(arguments),
                budget_s=_budget_s(arguments),
            )
            setting = f"rtt{rtt_ms:g}.buffer{buffer:g}"
            swept.measure(f"delay.{setting}{suffix}", SweepCell(setting, 2, megabytes, rtt_ms=rtt_ms), run)
    return swept.finish()


def _loss(arguments: argparse.Namespace) -> list[BenchResult]:
    if arguments.rtt_ms and arguments.mtu != 1500:
        raise BenchError("with a round trip the MTU is 1500; leave --mtu or --rtt-ms out")
    if arguments.rtt_ms and arguments.outages:
        raise BenchError("links fail at the router alone; leave --outages or --rtt-ms out")
    cells = _Cells(arguments, [2], 100.0)
    swept = Sweep(cells.several)
    rate_bps = round(arguments.rate_mbps * 1e6)
    fits = partial(_has_time, arguments, _ALLREDUCE_CONTENDERS, 0, rate_bps) if arguments.rtt_ms else sweep.has_memory
    rtt = f".rtt{arguments.rtt_ms:g}" if arguments.rtt_ms else ""
    tail = rtt + _mtu_suffix(arguments.mtu)
    for percent in arguments.percent or (_SWEPT_LOSSES_PERCENT if arguments.sweep else _LOSSES_PERCENT):
        for ranks, megabytes in cells.all(fits):
            name = f"allreduce.loss{percent:g}{cells.suffix(ranks, megabytes)}{tail}"
            cell = SweepCell(f"{percent:g} % lost", ranks, megabytes, percent, arguments.rtt_ms)
            make = partial(_lossy_path, arguments, ranks, percent / 100)
            run = partial(_measure_allreduce, make, name, arguments, megabytes, by_control=True)
            swept.measure(name, cell, run)
    no_outages = arguments.sweep or arguments.rtt_ms
    for percent in (() if no_outages else _OUTAGES_PERCENT) if arguments.outages is None else arguments.outages:
        for ranks, megabytes in cells.all(fits):
            name = f"allreduce.outages.loss{percent:g}{cells.suffix(ranks, megabytes)}"
            cell = SweepCell(f"{percent:g} % lost, outages", ranks, megabytes, percent)
            routed = partial(RoutedPath, ranks, percent / 100, arguments.mtu)
            swept.measure(name, cell, partial(_measure_outages, routed, name, arguments, megabytes))
    return swept.finish()


def _lossy_path(arguments: argparse.Namespace, ranks: int, loss: float) -> BenchPath:
    if not arguments.rtt_ms:
        return RoutedPath(ranks, loss, arguments.mtu)
    from dlcp.bench.delay import DelayedPath

    return DelayedPath(round(arguments.rate_mbps * 1e6), arguments.rtt_ms / 1e3, _BUFFER, ranks, loss)


def _measure_outages(
    make: Callable[[], RoutedPath], name: str, arguments: argparse.Namespace, megabytes: float
) -> list[BenchResult]:
    """Measure DLCP with its bound beside DLCP without, where links fail now and then."""
    from dlcp.bench.allreduce import LOSSLESS, LOSSY, contenders, measure

    path = make()
    say(f"{name}: {path.words}, links gone for 5-50 ms once a second, {megabytes:g} MB, times in ms")
    with path, LinkOutages(path, seed=1) as outages:
        ways = [way for way in contenders(path.controls) if way.name in (LOSSY, LOSSLESS) or way.control]
        settings = {**_rounds(arguments), "rounds": arguments.outage_rounds, "budget_s": _budget_s(arguments)}
        values = int(megabytes * 1e6) // _VALUE_BYTES
        found = measure(path, values=values, ways=ways, mtu_bytes=arguments.mtu, all_stay=True, **settings)
        details = {
            "path": found.path,
            "outages_s": significant(outages.seconds),
            "path_loss": significant(found.path_loss),
            "packets": found.ledgers[LOSSY],
        }
    return [mean_against(name, "ms", found.samples, LOSSY, LOSSLESS, details)]


def _tail(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.tail import measure

    rate_bps = round(arguments.rate_mbps * 1e6)
    cells = _Cells(arguments, [4], 1.0)
    swept = Sweep(cells.several)
    for ranks, megabytes in cells.all(partial(_has_time, arguments, _TAIL_CONTENDERS, 0, rate_bps)):
        suffix = cells.suffix(ranks, megabytes)
        run = partial(
            measure,
            ranks=ranks,
            rate_bps=rate_bps,
            megabytes=megabytes,
            probes=arguments.probes,
            seed=arguments.seed,
            suffix=suffix,
            **_rounds(arguments),
            budget_s=_budget_s(arguments),
        )
        swept.measure(f"tail{suffix}", SweepCell("bursts", ranks, megabytes), run)
    return swept.finish()


def _slow_path(arguments: argparse.Namespace) -> list[BenchResult]:
    from dlcp.bench.slow_path import measure

    rate_bps = round(arguments.rate_mbps * 1e6)
    settings = {
        "rate_bps": rate_bps,
        "slowness": arguments.slowness,
        "deferral_bound": arguments.deferral_bound,
        **_rounds(arguments),
        "budget_s": _budget_s(arguments),
    }
    cells = _Cells(arguments, [2, 4], 8.0)
    swept = Sweep(cells.several)
    slowest_bps = rate_bps / arguments.slowness
    fits = partial(_has_time, arguments, _SLOW_PATH_CONTENDERS, _SLOW_PATH_WARM_UP, slowest_bps)
    for ranks, megabytes in cells.all(fits):
        name = f"slow_path.n{ranks}{cells.suffix(None, megabytes)}"
        run = partial(measure, ranks=ranks, megabytes=megabytes, name=name, **settings)
        swept.measure(name, SweepCell("one slow port", ranks, megabytes), run)
    return swept.finish()


class _Cells:
    """The sizes and numbers of ranks of a command: those given, those of a sweep, or the defaults."""

    def __init__(
        self, arguments: argparse.Namespace, ranks: list[int], megabytes: float, *, sweepable_ranks: bool = True
    ) -> None:
        self._sweep = arguments.sweep
        swept_ranks = list(sweep.SWEPT_RANKS) if arguments.sweep and sweepable_ranks else ranks
        given: list[int] | None = getattr(arguments, "ranks", None)
        self._ranks = given or swept_ranks
        self._sizes: list[float] = arguments.megabytes or (
            list(sweep.SWEPT_SIZES_MB) if arguments.sweep else [megabytes]
        )
        self._default = (ranks[0], megabytes)
        self.several = arguments.sweep or len(self._sizes) > 1 or len(given or ()) > 1

    def all(self, fits: Callable[[int, float], bool]) -> list[tuple[int, float]]:
        """Return the cells, without those of a sweep that do not fit; these are said."""
        cells = [(ranks, megabytes) for megabytes in self._sizes for ranks in self._ranks]
        if self._sweep:
            for ranks, megabytes in cells:
                if not fits(ranks, megabytes):
                    say(f"left out: {ranks} ranks, {sweep.size_words(megabytes)}, which would take too long here")
            cells = [cell for cell in cells if fits(*cell)]
        return cells

    def suffix(self, ranks: int | None, megabytes: float) -> str:
        """Return the part of a name that tells cells apart; where there is one cell, nothing."""
        return sweep.suffix(ranks, megabytes, self._default) if self.several else ""


def _has_time(
    arguments: argparse.Namespace, contenders: int, warm_up: int, rate_bps: float, ranks: int, megabytes: float
) -> bool:
    rounds = max(warm_up, _rounds(arguments)["warm_up"])
    return sweep.has_time(ranks, megabytes, contenders, rounds, rate_bps, _budget_s(arguments) or sweep.CELL_S)


def _budget_s(arguments: argparse.Namespace) -> float | None:
    budget_s: float | None = arguments.cell_seconds
    return sweep.CELL_S if budget_s is None and arguments.sweep else budget_s


def _measure_allreduce(
    make: Callable[[], BenchPath],
    name: str,
    arguments: argparse.Namespace,
    megabytes: float,
    *,
    by_control: bool = False,
) -> list[BenchResult]:
    from dlcp.bench.allreduce import measure

    path = make()
    say(f"{name}: {path.words}, {megabytes:g} MB, times in ms")
    with path:
        values = int(megabytes * 1e6) // _VALUE_BYTES
        settings = {**_rounds(arguments), "budget_s": _budget_s(arguments)}
        found = measure(path, values=values, mtu_bytes=arguments.mtu, **settings)
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
    warm_up = arguments.warm_up
    if warm_up is None:
        warm_up = 1 if getattr(arguments, "sweep", False) else 2
    return {"rounds": arguments.rounds, "warm_up": warm_up, "progress": say}


def _mtu_suffix(mtu_bytes: int) -> str:
    return "" if mtu_bytes == 1500 else f".mtu{mtu_bytes}"
