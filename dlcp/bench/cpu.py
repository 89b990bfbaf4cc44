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
from dlcp.bench.allreduce import DIVIDED, LOSSLESS, LOSSY, RunCost, contenders
from dlcp.bench.path import loopback
from dlcp.bench.results import BenchError, BenchResult, Samples, against_best, median, significant
from dlcp.transport.path_mtu import payload_for_mtu

_FLOOR: Final = "only moves and adds"
_FLOOR_ROUNDS: Final = 2
"""Of which the last counts: in the first one memory is touched for the first time."""
_FLOOR_DEADLINE_S: Final = 100.0
_MTU_BYTES: Final = 1500


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
    gigabyte of the buffer, beside the least of Gloo's settings.
    """
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
    gigabytes = 4e-9 * values
    user, kernel = (
        {name: [sum(map(of, run)) / gigabytes for run in runs[-rounds:]] for name, runs in costs.items()}
        for of in (attrgetter("user_s"), attrgetter("system_s"))
    )
    seconds: Samples = {name: list(map(add, user[name], kernel[name])) for name in costs}
    parts = {
        name: {"user": significant(median(user[name])), "kernel": significant(median(kernel[name]))} for name in costs
    }
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
