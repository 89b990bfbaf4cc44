# SPDX-License-Identifier: Apache-2.0
"""All-reduces over several paths: DLCP's against Gloo's, by the same processes, in turns.

- ``allreduce``: loopback or a veth pair.
- ``loss``: a router, or the built-in switch, that loses packets at random; then links that fail now and then.
- ``delay``: a switch whose ports have a rate, a delay and one queue for all traffic: tags and marks count for nothing,
  as in a wide-area network. *Beside* means that in each direction two endless flows of CUBIC share that queue, so that
  a fair share is a third of the rate. DLCP runs with bound 0: what moves is known then.
- ``paths``: two hosts that choose among four spines by addresses and ports, as an ECMP fabric does. TCP has one route
  for a connection, whichever its ports lead to; DLCP sends from several ports. So that neither is judged by one draw of
  ports, the ranks are started several times.
- ``slow-path``: the last rank's port has a part of the others' rate. DLCP at 8 bits runs
  beside DLCP in full precision and Gloo. ``convergence`` says what lower precision costs.
- ``tail``: OptiReduce (NSDI '25) describes an environment by the ratio of the 99th percentile of latency to the median,
  which background traffic sets, and asks how much longer a step takes where that ratio is larger. The latency is that
  of Gloo's ring for 2,000 values, as there. Round trips of 10 ms make the network, not the processor, decide about it.
  Bursts of datagrams at twice the rate of the port go into each host's port, at random. How long they are is found by
  trying lengths out until the ring has the wanted ratio. Then all contenders take turns next to bursts of that length,
  in steps whose bytes take a second. The ratio that the ring had next to them is reported with the times.
- ``cpu``: fast links are limited by the processor, and what the transport takes of it, training lacks. Beside DLCP and
  Gloo runs ``floor.c``, which does nothing but what cannot be left out: bursts through the same kind of sockets, and
  additions.
"""

import argparse
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import add, attrgetter
from pathlib import Path
from typing import Any, Final

from dlcp.bench import BenchError, BenchResult, median, result, significant
from dlcp.commands.common import DURATIONS, whole
from dlcp.host.netlab import become_root
from dlcp.inputs.configuration import Range
from dlcp.policies.arms import AUTO_BITS
from dlcp.transport.path_mtu import payload_for_mtu
from tests.bench import reduction
from tests.bench.disturbances import RIVALS, BackgroundBursts, LinkOutages, Rival, SpineWatch, left_after_s
from tests.bench.harness import (
    MEGABYTES,
    MTU,
    SEED,
    VALUE_BYTES,
    Benchmark,
    Samples,
    Turns,
    against_best,
    float_option,
    floats_option,
    int_option,
    mean,
    mean_against,
    percentile,
    rate_option,
    scratch,
)
from tests.bench.paths import (
    FRAME_BYTES,
    PAYLOAD_BYTES,
    BenchPath,
    DelayedPath,
    RoutedPath,
    SpineFabric,
    VethPair,
    loopback,
)
from tests.bench.ranks import Ranks
from tests.bench.reduction import DIVIDED, LOSSLESS, LOSSY, AllReduceContender, RunCost, contenders
from tests.bench.sweep import Cells, Row, has_memory, measure_cell, sweep_options

_PERCENT: Final = Range(0.0, 100, below=True)


def values_in(megabytes: float) -> int:
    """Return how many float32 values a size has room for."""
    return int(megabytes * 1e6) // VALUE_BYTES


def bits_per_s(arguments: argparse.Namespace) -> int:
    """Return ``--rate-mbps`` in bit/s."""
    return round(arguments.rate_mbps * 1e6)


def gloo_of(path: BenchPath) -> list[AllReduceContender]:
    """Return Gloo's settings over a path."""
    return [way for way in contenders(path.controls) if way.control]


def _mtu_suffix(mtu_bytes: int) -> str:
    return "" if mtu_bytes == 1500 else f".mtu{mtu_bytes}"


# Clean paths ----------------------------------------------------------------------------------------------------------


def everything(
    path: BenchPath, name: str, megabytes: float, turns: Turns, *, mtu_bytes: int = 1500, by_control: bool = False
) -> list[BenchResult]:
    """Measure all contenders; ``by_control``: against Gloo over each congestion control by itself."""
    found = reduction.measure(path, values_in(megabytes), turns, mtu_bytes=mtu_bytes)
    if not by_control:
        return found.results(name)
    return [entry for control in path.controls for entry in found.results(f"{name}.{control}", [control])]


def _allreduce(arguments: argparse.Namespace) -> Sequence[BenchResult]:
    veth = arguments.over == "veth"
    if veth:
        if arguments.ranks not in (None, [2]):
            raise BenchError(
                f"a veth pair joins 2 ranks, not {arguments.ranks}; leave --ranks out, or go over loopback"
            )
        become_root()
    row = Row(
        "allreduce.n{ranks}{size}" + (".veth" if veth else "") + _mtu_suffix(arguments.mtu),
        "veth pair" if veth else "one host",
        (lambda _: VethPair(arguments.mtu)) if veth else loopback,
        partial(everything, mtu_bytes=arguments.mtu),
    )
    return Cells(arguments, [2] if veth else [2, 4], 100.0, swept_ranks=not veth).measure([row])


ALLREDUCE: Final = Benchmark(
    _allreduce,
    {
        "--over": {"choices": ("loopback", "veth"), "default": "loopback", "help": "(default: loopback)"},
        **MTU,
        **sweep_options("100", "2 4; over veth 2"),
    },
    rounds=9,
)

# Random loss ----------------------------------------------------------------------------------------------------------

_LOSSES: Final = (0.0, 0.1, 1.0, 3.0)
_SWEPT_LOSSES: Final = (0.0, 0.1, 1.0, 3.0, 5.0)
_OUTAGES: Final = (1.0, 3.0)
"""All in per cent."""
_BUFFER: Final = 2.0
"""Bandwidth-delay products that the queues hold where `loss` has a round trip: enough for CUBIC to fill the path."""
_CONTENDERS: Final = 7


def beside_outages(
    path: RoutedPath, name: str, megabytes: float, turns: Turns, *, mtu_bytes: int, rounds: int
) -> list[BenchResult]:
    """Compare DLCP with its bound and without, while links fail for 5-50 ms about once a second."""
    ways = [way for way in contenders(path.controls) if way.name in (LOSSY, LOSSLESS) or way.control]
    turns = replace(turns, rounds=rounds)
    with LinkOutages(path, seed=1) as outages:
        found = reduction.measure(path, values_in(megabytes), turns, ways=ways, mtu_bytes=mtu_bytes, all_stay=True)
        details = {
            "path": found.path,
            "outages_s": significant(outages.seconds),
            "path_loss": significant(found.path_loss),
            "packets": found.ledgers[LOSSY],
        }
    return [mean_against(name, "ms", found.samples, LOSSY, LOSSLESS, details)]


def lossy_path(arguments: argparse.Namespace, loss: float, ranks: int) -> BenchPath:
    """Return a router that loses packets; with a round trip, the built-in switch."""
    if not arguments.rtt_ms:
        return RoutedPath(ranks, loss, arguments.mtu)
    return DelayedPath(bits_per_s(arguments), arguments.rtt_ms / 1e3, _BUFFER, ranks, loss)


def _loss(arguments: argparse.Namespace) -> Sequence[BenchResult]:
    rtt_ms, mtu_bytes = arguments.rtt_ms, arguments.mtu
    if rtt_ms and mtu_bytes != 1500:
        raise BenchError("with a round trip the MTU is 1500; leave --mtu or --rtt-ms out")
    if rtt_ms and arguments.outages:
        raise BenchError("links fail at the router alone; leave --outages or --rtt-ms out")
    cells = Cells(arguments, [2], 100.0)
    end = (f".rtt{rtt_ms:g}" if rtt_ms else "") + _mtu_suffix(mtu_bytes)
    rows = [
        Row(
            f"allreduce.loss{percent:g}{{cell}}{end}",
            f"{percent:g} % lost",
            partial(lossy_path, arguments, percent / 100),
            partial(everything, mtu_bytes=mtu_bytes, by_control=True),
            percent,
            rtt_ms,
        )
        for percent in arguments.percent or (_SWEPT_LOSSES if arguments.sweep else _LOSSES)
    ]
    outages = arguments.outages
    if outages is None:
        outages = () if arguments.sweep or rtt_ms else _OUTAGES
    rows += [
        Row(
            f"allreduce.outages.loss{percent:g}{{cell}}",
            f"{percent:g} % lost, outages",
            lambda ranks, loss=percent / 100: RoutedPath(ranks, loss, mtu_bytes),
            partial(beside_outages, mtu_bytes=mtu_bytes, rounds=arguments.outage_rounds),
            percent,
        )
        for percent in outages
    ]
    fits = cells.has_time(_CONTENDERS, bits_per_s(arguments)) if rtt_ms else has_memory
    return cells.measure(rows, fits)


LOSS: Final = Benchmark(
    _loss,
    {
        "--percent": floats_option(None, "(default: 0 0.1 1 3; of a sweep 0 0.1 1 3 5)", _PERCENT, "P"),
        "--outages": floats_option(
            None,
            "loss beside links that fail (default: 1 3; of a sweep, or with a round trip, none)",
            _PERCENT,
            "P",
            nargs="*",
        ),
        "--outage-rounds": int_option(20, "that count there"),
        "--rtt-ms": float_option(
            0.0, "round trip, through the built-in switch; 0: through a router", Range(0.0, 10_000), "MS"
        ),
        "--rate-mbps": rate_option(100.0, "of a port of that switch"),
        **MTU,
        **sweep_options("100", "2"),
    },
    rounds=7,
    root=True,
)

# Long paths -----------------------------------------------------------------------------------------------------------

_RIVAL_CONTROL: Final = "cubic"
_SETTLE_S: Final = 3.0
_SETTLE_ROUNDS: Final = 50
"""How long rivals have the path to themselves, at least and in round trips of the idle path, to find their windows."""
_DELAY_CONTENDERS: Final = 5
"""Alone and next to other flows."""


def alone_and_beside(path: DelayedPath, name: str, megabytes: float, turns: Turns) -> list[BenchResult]:
    """Measure ms of an all-reduce against the better of Gloo's two; then shares of the rate next to rivals.

    Half the budget is for each of the two.
    """
    turns = turns.share(0.5)
    seconds = seconds_for(megabytes, path.rate_bps)
    ways = [way for way in contenders(path.controls) if (way.name == LOSSLESS or way.control) and way.buckets == 1]
    found = reduction.measure(path, values_in(megabytes), turns, ways=ways)
    used = 1e3 * seconds / median(found.samples[LOSSLESS])
    details = {"path": path.words, "rate_share": significant(used), "switch_busy": significant(path.busy())}
    peers = [way.name for way in ways if way.control]
    cubic = [way for way in ways if way.control in (None, _RIVAL_CONTROL)]
    return [
        against_best(name, "ms", found.samples, LOSSLESS, peers, details),
        _beside(name, path, megabytes, seconds, cubic, turns),
    ]


def _beside(
    name: str,
    path: DelayedPath,
    megabytes: float,
    seconds: float,
    ways: Sequence[AllReduceContender],
    turns: Turns,
) -> BenchResult:
    """Return DLCP's share of the rate next to endless flows, in fair shares, and Gloo's."""
    addresses = [path.tcp_address(rank, _RIVAL_CONTROL) for rank in range(2)]
    with Ranks(Rival, [addresses], path.namespaces) as rivals:
        rivals.call("start", rivals.call("where"))
        time.sleep(max(_SETTLE_S, _SETTLE_ROUNDS * path.rtt_s))
        before = rivals.call("received")
        found = reduction.measure(path, values_in(megabytes), turns, ways=ways)
        after = rivals.call("received")
    shares: Samples = {
        way.name: [(1 + RIVALS) * 1e3 * seconds / took_ms for took_ms in found.samples[way.name]] for way in ways
    }
    theirs = [(now - then) * 8 / (now_s - then_s) for (then, then_s), (now, now_s) in zip(before, after, strict=True)]
    peer = next(way.name for way in ways if way.control)
    details = {
        "path": path.words,
        "peer": peer,
        "rivals_mbps": [significant(each / 1e6) for each in theirs],
        "switch_busy": significant(path.busy()),
    }
    return result(
        f"{name}.beside", "fair shares", shares[LOSSLESS], shares[peer], smaller_is_better=False, details=details
    )


def megabytes_in(seconds: float, rate_bps: int) -> float:
    """Return the MB of values that DLCP's packets carry through a port in a given time."""
    return seconds * rate_bps / 8e6 * PAYLOAD_BYTES / FRAME_BYTES


def seconds_for(megabytes: float, rate_bps: int) -> float:
    """Return the time that a port takes for a given size of values in DLCP's packets."""
    return megabytes / megabytes_in(1.0, rate_bps)


def _delay(arguments: argparse.Namespace) -> Sequence[BenchResult]:
    rate_bps = bits_per_s(arguments)
    rows = [
        Row(
            f"delay.rtt{rtt_ms:g}.buffer{buffer:g}{{size}}",
            f"rtt{rtt_ms:g}.buffer{buffer:g}",
            lambda ranks, rtt_ms=rtt_ms, buffer=buffer: DelayedPath(rate_bps, rtt_ms / 1e3, buffer, ranks),
            alone_and_beside,
            rtt_ms=rtt_ms,
        )
        for rtt_ms in arguments.rtt_ms
        for buffer in arguments.buffers
    ]
    cells = Cells(arguments, [2], megabytes_in(arguments.seconds, rate_bps), swept_ranks=False)
    return cells.measure(rows, cells.has_time(_DELAY_CONTENDERS, rate_bps))


DELAY: Final = Benchmark(
    _delay,
    {
        "--rtt-ms": floats_option((1.0, 20.0, 100.0), "round trips", DURATIONS, "MS"),
        "--buffers": floats_option((0.2, 1.0, 10.0), "in bandwidth-delay products", Range(0.0, 1000, above=True), "B"),
        "--rate-mbps": rate_option(40.0, "of the path"),
        "--seconds": float_option(8.0, "that a run takes at that rate", DURATIONS, "S"),
        **sweep_options("those of --seconds", None),
    },
    rounds=3,
    root=True,
)

# Several routes -------------------------------------------------------------------------------------------------------

_WATCHED_RUNS: Final = 4


def over_spines(fabric: SpineFabric, name: str, megabytes: float, turns: Turns, *, draws: int) -> list[BenchResult]:
    """Measure everything from several starts, each time at other ports.

    Details say how many times longer each took than the good spines together allow, and the worst such draw. For a
    lossy fabric there is ``.left`` too: after how many seconds DLCP had left the lossy spine.
    """
    allowed_ms = 1e3 * megabytes * 1e6 * 8 / fabric.allowed_bps
    samples: Samples = {}
    worst = watched_s = 0.0
    left: list[float | None] = []
    for draw in range(draws):
        found = reduction.measure(fabric, values_in(megabytes), replace(turns, seed=draw + 1))
        for contender, times in found.samples.items():
            samples.setdefault(contender, []).extend(times)
        worst = max(worst, median(found.samples[LOSSLESS]) / allowed_ms)
        if fabric.lossy:
            reliable = [each for each in found.contenders if each.name == LOSSLESS]
            with SpineWatch(fabric) as watch:
                reduction.measure(
                    fabric, values_in(megabytes), replace(turns, rounds=_WATCHED_RUNS, warm_up=0), ways=reliable
                )
            left.append(left_after_s(watch.noted))
            watched_s = max(watched_s, watch.noted[-1][0] - watch.noted[0][0])
    peers = [way.name for way in gloo_of(fabric)]
    results = []
    for suffix, ours in (("", LOSSY), (".reliable", LOSSLESS), (".buckets", DIVIDED)):
        details = {
            "path": fabric.words,
            "allowed_ms": significant(allowed_ms),
            "over_allowed": significant(median(samples[ours]) / allowed_ms),
        }
        if ours == LOSSLESS:
            details["over_allowed_in_worst_draw"] = significant(worst)
        results.append(against_best(name + suffix, "ms", samples, ours, peers, details))
    if left:
        # A spine that was never left was used for as long as it was watched.
        slowest_s = max(watched_s if each is None else each for each in left)
        details = {
            "left_in_every_draw": None not in left,
            "draws_s": [None if each is None else significant(each) for each in left],
        }
        results.append(BenchResult(f"{name}.left", slowest_s, "s", None, None, len(left), 0.0, details))
    return results


def _paths(arguments: argparse.Namespace) -> Sequence[BenchResult]:
    rate_bps = bits_per_s(arguments)
    fabrics: dict[str, dict[str, bool]] = {"equal": {}, "slow": {"slow": True}, "lossy": {"lossy": True}}
    rows = [
        Row(
            f"paths.{name}",
            name,
            lambda _, odd=odd: SpineFabric(rate_bps, **odd),
            partial(over_spines, draws=arguments.draws),
        )
        for name, odd in fabrics.items()
    ]
    return [entry for row in rows for entry in measure_cell(row, row.name, 2, arguments.megabytes, arguments.turns)]


PATHS: Final = Benchmark(
    _paths,
    {
        "--draws": int_option(3, "how often ranks start anew"),
        "--rate-mbps": rate_option(50.0, "of each link"),
        "--megabytes": float_option(12.0, "of float32", MEGABYTES, "MB"),
    },
    rounds=3,
    root=True,
)

# Behind a slow port ---------------------------------------------------------------------------------------------------

_SLOW_BUCKETS: Final = 4
_SLOW_CONTENDERS: Final = 6


def behind_slow_port(path: RoutedPath, name: str, megabytes: float, turns: Turns) -> list[BenchResult]:
    """Measure ms of an all-reduce at 8 bits, against one in full. ``.gloo``: against Gloo's best."""
    gloo = gloo_of(path)
    ours = [
        AllReduceContender(LOSSY, _SLOW_BUCKETS, bound=0.1, bits=AUTO_BITS),
        AllReduceContender(LOSSLESS, _SLOW_BUCKETS, bound=0),
    ]
    found = reduction.measure(path, values_in(megabytes), turns, ways=[*ours, *gloo])
    details = {"path": path.words, "packets": found.ledgers[LOSSY]}
    return [
        against_best(name, "ms", found.samples, LOSSY, [LOSSLESS], details),
        against_best(f"{name}.gloo", "ms", found.samples, LOSSY, [way.name for way in gloo], details),
    ]


def _slow_path(arguments: argparse.Namespace) -> Sequence[BenchResult]:
    rate_bps = bits_per_s(arguments)
    slowest_bps = round(rate_bps / arguments.slowness)
    row = Row(
        "slow_path.n{ranks}{size}",
        "one slow port",
        lambda ranks: RoutedPath(ranks, rate_bps=rate_bps, slowest_bps=slowest_bps),
        behind_slow_port,
    )
    cells = Cells(arguments, [2, 4], 8.0)
    return cells.measure([row], cells.has_time(_SLOW_CONTENDERS, rate_bps / arguments.slowness))


SLOW_PATH: Final = Benchmark(
    _slow_path,
    {
        "--rate-mbps": rate_option(100.0),
        "--slowness": float_option(3.0, "how many times slower one port is", Range(1.0, 1000), "TIMES"),
        **sweep_options("8", "2 4"),
    },
    rounds=7,
    root=True,
)

# Beside bursts --------------------------------------------------------------------------------------------------------

RATIOS: Final = (1.0, 1.5, 3.0)
"""Those that OptiReduce compares."""
_PROBE_VALUES: Final = 2000
"""The all-reduce whose latency has the ratio, as in OptiReduce."""
_LENGTHS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
"""Mean lengths of bursts that are tried, the shortest first, until one has the largest ratio."""
_TAIL_RTT_S: Final = 0.01
_TAIL_BUFFER: Final = 4.0
"""Of a port, in bandwidth-delay products."""
_TAIL_CONTENDERS: Final = 12
"""Four at each of three ratios. Compared with them, probes take no time."""


def ratio_of(times: Sequence[float]) -> float:
    """Return the 99th percentile over the median."""
    return percentile(times, 99) / percentile(times, 50)


def length_for(ratio: float, tried: Sequence[tuple[float, float]]) -> float:
    """Return the mean length of bursts that leads to a ratio, by interpolation, or else the nearest.

    Parameters
    ----------
    tried
        Pairs of length in seconds, growing, and the ratio that it has led to.
    """
    if ratio <= tried[0][1]:
        return tried[0][0]
    for (shorter_s, below), (longer_s, above) in pairwise(tried):
        if below <= ratio <= above:
            part = (ratio - below) / (above - below) if above > below else 0.0
            return shorter_s + part * (longer_s - shorter_s)
    return max(tried, key=lambda pair: pair[1])[0]


def beside_bursts(
    path: DelayedPath, name: str, megabytes: float, turns: Turns, *, probes: int, seed: int
) -> list[BenchResult]:
    """Measure at all ratios: mean ms of a step and that of Gloo's ring, with the ratio that was reached.

    ``tail.growth``: by how many per cent the mean grows from the second to the third ratio, and the ring's growth.
    """
    ours = [AllReduceContender(LOSSY, 1, bound=0.1), AllReduceContender(LOSSLESS, 1, bound=0)]
    gloo = [AllReduceContender(f"gloo, {control}", 1, control=control) for control in path.controls]
    ring, suffix = gloo[0], name.removeprefix("tail")
    tried = _try_lengths(path, ring, turns, probes, seed)
    results, samples = [], []
    for ratio in RATIOS:
        length_s = 0.0 if ratio == RATIOS[0] else length_for(ratio, tried)
        turns.progress(f"tail.ratio{ratio:g}{suffix}: bursts of {1e3 * length_s:.1f} ms in the mean")
        with BackgroundBursts(path, path.hosts[-1], length_s, seed):
            reached = _probe(path, ring, turns, probes)
            found = reduction.measure(
                path,
                values_in(megabytes),
                turns.share(1 / len(RATIOS)),
                ways=[*ours, *gloo],
                all_stay=True,  # rare runs count, so that two fast ones say little
            )
        samples.append(found.samples)
        details = {
            "path": path.words,
            "burst_ms": significant(1e3 * length_s),
            "ratio_wanted": ratio,
            "ratio_reached": significant(ratio_of(reached)),
            "small_ms": significant(median(reached)),
            "gloo_best": min((way.name for way in gloo), key=lambda each: mean(samples[-1][each])),
            "packets": found.ledgers[LOSSY],
        }
        results.append(mean_against(f"tail.ratio{ratio:g}{suffix}", "ms", found.samples, LOSSY, ring.name, details))
    return [*results, _growth(samples, ring.name, suffix)]


def _try_lengths(
    path: DelayedPath, ring: AllReduceContender, turns: Turns, probes: int, seed: int
) -> list[tuple[float, float]]:
    """Return pairs of length and ratio, from none at all up to the largest that is wanted."""
    tried: list[tuple[float, float]] = []
    for length_s in (0.0, *_LENGTHS_S):
        with BackgroundBursts(path, path.hosts[-1], length_s, seed):
            times = _probe(path, ring, turns, probes)
        tried.append((length_s, ratio_of(times)))
        turns.progress(
            f"tail: bursts of {1e3 * length_s:g} ms: ring of {median(times):.2f} ms, ratio {tried[-1][1]:.2f}"
        )
        if tried[-1][1] >= RATIOS[-1]:
            break
    return tried


def _probe(path: DelayedPath, ring: AllReduceContender, turns: Turns, probes: int) -> Sequence[float]:
    """Return times of small all-reduces in ms."""
    often = replace(turns, rounds=probes, warm_up=probes // 10, budget_s=None, progress=lambda _: None)
    return reduction.measure(path, _PROBE_VALUES, often, ways=[ring]).samples[ring.name]


def _growth(samples: Sequence[Samples], ring: str, suffix: str) -> BenchResult:
    """Return by how many per cent mean steps grow from one ratio to the next, in all; ``samples`` are by ratio."""
    means = {name: [mean(found[name]) for found in samples] for name in samples[0]}
    grown = {name: [100 * (later / first - 1) for first, later in pairwise(row)] for name, row in means.items()}
    details = {
        f"{first:g}_to_{later:g}": {name: significant(row[place]) for name, row in grown.items()}
        for place, (first, later) in enumerate(pairwise(RATIOS))
    }
    value, peer = grown[LOSSY][-1], grown[ring][-1]
    ratio = (1 + peer / 100) / (1 + value / 100)
    return BenchResult(f"tail.growth{suffix}", value, "%", peer, ratio, len(samples[0][LOSSY]), 0.0, details)


def _tail(arguments: argparse.Namespace) -> Sequence[BenchResult]:
    rate_bps = bits_per_s(arguments)
    row = Row(
        "tail{cell}",
        "bursts",
        lambda ranks: DelayedPath(rate_bps, _TAIL_RTT_S, _TAIL_BUFFER, ranks, bystander=True),
        partial(beside_bursts, probes=arguments.probes, seed=arguments.seed),
    )
    cells = Cells(arguments, [4], 8.0)
    return cells.measure([row], cells.has_time(_TAIL_CONTENDERS, rate_bps))


TAIL: Final = Benchmark(
    _tail,
    {
        "--rate-mbps": rate_option(100.0),
        "--probes": int_option(400, "small all-reduces for each length of bursts"),
        "--seed": int_option(SEED, "of the bursts", least=0),
        **sweep_options("8", "4"),
    },
    rounds=20,
    root=True,
)

# Processor time -------------------------------------------------------------------------------------------------------

_ENCODED: Final = f"dlcp, {AUTO_BITS} bits"
_FLOOR: Final = "only moves and adds"
_FLOOR_ROUNDS: Final = 2
"""Only the last one counts: the first one touches memory for the first time."""
_FLOOR_DEADLINE_S: Final = 100.0
_SMALL_BUCKETS: Final = 48
_SMALL_BUCKET_VALUES: Final = 50_000
"""Of a model with small tensors, or of DDP with small buckets: here messages cost more than bytes."""


def processor_time(path: BenchPath, name: str, megabytes: float, turns: Turns) -> list[BenchResult]:
    """Measure processor seconds of all ranks together per gigabyte of the buffer, against the least of Gloo's settings.

    ``.reliable`` has bound 0, ``.encoded`` the precision of ``auto``. ``.small`` are processor microseconds per bucket
    and rank, where a step has many small buckets, whatever the size.
    """
    values, ranks = values_in(megabytes), len(path.namespaces)
    costs: dict[str, list[list[RunCost]]] = {}
    with scratch() as folder:
        floor, beside = compiled_floor(folder), {}
        if floor:
            runs = costs.setdefault(_FLOOR, [])
            beside = {_FLOOR: lambda: _run_floor(floor, ranks, values, runs)}
        ways = (*contenders(path.controls), AllReduceContender(_ENCODED, 1, bound=0.1, bits=AUTO_BITS))
        found = reduction.measure(path, values, turns, ways=ways, beside=beside)
    costs |= found.costs
    seconds, parts = _per(4e-9 * values, costs, turns.rounds)
    details: dict[str, Any] = {
        "path": path.words,
        "seconds_by": parts,
        "milliseconds": {each: significant(median(found.samples[each])) for each in found.samples},
        "floor": significant(median(seconds[_FLOOR])) if floor else "no C compiler here",
    }
    peers = [way.name for way in gloo_of(path)]
    results = [
        against_best(f"{name}{suffix}", "s/GB", seconds, ours, peers, details)
        for suffix, ours in (("", LOSSY), (".reliable", LOSSLESS), (".buckets", DIVIDED), (".encoded", _ENCODED))
    ]
    return [*results, _small_buckets(path, name, turns)]


def _small_buckets(path: BenchPath, name: str, turns: Turns) -> BenchResult:
    many = f"{_SMALL_BUCKETS} small buckets"
    ours = AllReduceContender(f"dlcp, {many}", _SMALL_BUCKETS, bound=0.1)
    gloo = [
        AllReduceContender(f"gloo, {control}, {many}", _SMALL_BUCKETS, control=control) for control in path.controls
    ]
    found = reduction.measure(path, _SMALL_BUCKETS * _SMALL_BUCKET_VALUES, turns, ways=(ours, *gloo))
    microseconds, parts = _per(1e-6 * _SMALL_BUCKETS * len(path.namespaces), found.costs, turns.rounds)
    details = {"path": path.words, "bucket_bytes": 4 * _SMALL_BUCKET_VALUES, "microseconds_by": parts}
    return against_best(f"{name}.small", "us", microseconds, ours.name, [way.name for way in gloo], details)


def _per(amount: float, costs: dict[str, list[list[RunCost]]], rounds: int) -> tuple[Samples, dict[str, Any]]:
    """Return the processor seconds of all ranks together in the last ``rounds``, per ``amount``, and their parts."""
    user, kernel = (
        {name: [sum(map(of, run)) / amount for run in runs[-rounds:]] for name, runs in costs.items()}
        for of in (attrgetter("user_s"), attrgetter("system_s"))
    )
    both: Samples = {name: list(map(add, user[name], kernel[name])) for name in costs}
    parts = {
        name: {"user": significant(median(user[name])), "kernel": significant(median(kernel[name]))} for name in costs
    }
    return both, parts


def compiled_floor(folder: Path) -> Path | None:
    """Compile ``floor.c``; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    program = folder / "floor"
    command = [compiler, "-O3", "-o", str(program), str(Path(__file__).with_name("floor.c")), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"floor.c does not compile: {done.stderr.strip()}")
    return program


def _run_floor(program: Path, ranks: int, values: int, runs: list[list[RunCost]]) -> float:
    """Run the program, add its cost to ``runs``, and return its milliseconds."""
    words = [str(each) for each in (ranks, values, payload_for_mtu(1500), _FLOOR_ROUNDS)]
    done = subprocess.run(  # in a session of its own, whose processes it ends if one of them fails
        [str(program), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=_FLOOR_DEADLINE_S,
        start_new_session=True,
    )
    if done.returncode:
        raise BenchError(f"the program that only moves and adds failed: {done.stderr.strip()}")
    ms, user_s, system_s = map(float, done.stdout.splitlines()[-1].split())
    runs.append([RunCost(ms / 1e3, user_s, system_s)])
    return ms


def _cpu(arguments: argparse.Namespace) -> Sequence[BenchResult]:
    row = Row("cpu", "one host", loopback, processor_time)
    return [
        entry
        for ranks in arguments.ranks
        for entry in measure_cell(row, f"cpu.n{ranks}", ranks, arguments.megabytes, arguments.turns)
    ]


CPU: Final = Benchmark(
    _cpu,
    {
        "--ranks": {
            "type": whole(2, 10_000),
            "nargs": "+",
            "default": [2, 4],
            "metavar": "N",
            "help": "(default: 2 4)",
        },
        "--megabytes": float_option(100.0, "of float32", MEGABYTES, "MB"),
    },
    rounds=9,
)
