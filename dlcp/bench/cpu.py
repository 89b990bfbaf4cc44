# SPDX-License-Identifier: Apache-2.0
"""Processor time of an all-reduce through sockets, by DLCP, by Gloo, and by a program that only moves and adds.

Fast links are limited by the processor, and what the transport takes of it, training lacks. Beside DLCP and Gloo runs
``floor.c``, which does nothing but what cannot be left out: bursts through the same kind of sockets, and additions.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from operator import add, attrgetter
from pathlib import Path
from typing import Any, Final

from dlcp.bench import allreduce
from dlcp.bench.allreduce import DIVIDED, LOSSLESS, LOSSY, AllReduceContender, RunCost, contenders
from dlcp.bench.path import loopback
from dlcp.bench.results import BenchError, BenchResult, Samples, against_best, median, significant
from dlcp.transport.path_mtu import payload_for_mtu

_FLOOR: Final = "only moves and adds"
_FLOOR_ROUNDS: Final = 2
"""Of which the last counts: in the first one memory is touched for the first time."""
_FLOOR_DEADLINE_S: Final = 100.0
_MTU_BYTES: Final = 1500
_SMALL_BUCKETS: Final = 48
_SMALL_BUCKET_VALUES: Final = 50_000
"""Of a model with small tensors, or of DDP with small buckets. Chosen by us: here messages cost more than bytes."""


def measure(
    ranks: int,
    *,
    values: int,
    rounds: int = 9,
    warm_up: int = 2,
    progress: Callable[[str], None] | None = None,
) -> list[BenchResult]:
    """Measure the processor time of an all-reduce of ``values`` float32 values between ``ranks`` over loopback.

    Parameters
    ----------
    rounds, warm_up, progress
        See :func:`dlcp.bench.results.interleave`.

    Returns
    -------
    ``cpu.nN``, ``cpu.nN.reliable`` (bound 0) and ``cpu.nN.buckets``: processor seconds of all ranks together per
    gigabyte of the buffer, beside the least of Gloo's settings. ``cpu.nN.small``: processor microseconds per bucket and
    rank, where a step has many small buckets, whatever ``values`` is.
    """
    large = _measure_large(ranks, values=values, rounds=rounds, warm_up=warm_up, progress=progress)
    return [*large, _measure_small(ranks, rounds=rounds, warm_up=warm_up, progress=progress)]


def _measure_large(
    ranks: int, *, values: int, rounds: int, warm_up: int, progress: Callable[[str], None] | None
) -> list[BenchResult]:
    costs: dict[str, list[list[RunCost]]] = {}
    with tempfile.TemporaryDirectory(prefix="dlcp-floor-") as folder:
        floor = _compiled_floor(Path(folder))
        path = loopback(ranks)
        with path:
            beside = {}
            if floor:
                runs = costs.setdefault(_FLOOR, [])
                beside = {_FLOOR: lambda: _run_floor(floor, ranks, values, runs)}
            ways = contenders(path.controls)
            found = allreduce.measure(
                path, values=values, ways=ways, rounds=rounds, warm_up=warm_up, progress=progress, beside=beside
            )
    costs |= found.costs
    seconds, parts = _per(4e-9 * values, costs, rounds)
    peers = [way.name for way in ways if way.control]
    results = []
    for suffix, ours in (("", LOSSY), (".reliable", LOSSLESS), (".buckets", DIVIDED)):
        details: dict[str, Any] = {
            "path": path.words,
            "seconds_by": parts,
            "milliseconds": {name: significant(median(found.samples[name])) for name in found.samples},
            "floor": significant(median(seconds[_FLOOR])) if floor else "no C compiler here",
        }
        results.append(against_best(f"cpu.n{ranks}{suffix}", "s/GB", seconds, ours, peers, details))
    return results


def _measure_small(ranks: int, *, rounds: int, warm_up: int, progress: Callable[[str], None] | None) -> BenchResult:
    path = loopback(ranks)
    with path:
        ours = AllReduceContender(f"dlcp, {_SMALL_BUCKETS} small buckets", _SMALL_BUCKETS, bound=0.1)
        gloo = [
            AllReduceContender(f"gloo, {control}, {_SMALL_BUCKETS} small buckets", _SMALL_BUCKETS, control=control)
            for control in path.controls
        ]
        found = allreduce.measure(
            path,
            values=_SMALL_BUCKETS * _SMALL_BUCKET_VALUES,
            ways=(ours, *gloo),
            rounds=rounds,
            warm_up=warm_up,
            progress=progress,
        )
    microseconds, parts = _per(1e-6 * _SMALL_BUCKETS * ranks, found.costs, rounds)
    details = {"path": path.words, "bucket_bytes": 4 * _SMALL_BUCKET_VALUES, "microseconds_by": parts}
    return against_best(f"cpu.n{ranks}.small", "us", microseconds, ours.name, [way.name for way in gloo], details)


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


def _compiled_floor(folder: Path) -> Path | None:
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
    """Run the program, add what it cost to ``runs``, and return its milliseconds."""
    words = [str(number) for number in (ranks, values, payload_for_mtu(_MTU_BYTES), _FLOOR_ROUNDS)]
    command = [str(program), *words]
    done = subprocess.run(  # in a session of its own, whose processes it ends if one of them fails
        command, capture_output=True, text=True, check=False, timeout=_FLOOR_DEADLINE_S, start_new_session=True
    )
    if done.returncode:
        raise BenchError(f"the program that only moves and adds failed: {done.stderr.strip()}")
    ms, user_s, system_s = map(float, done.stdout.splitlines()[-1].split())
    runs.append([RunCost(ms / 1e3, user_s, system_s)])
    return ms
