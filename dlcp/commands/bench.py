# SPDX-License-Identifier: Apache-2.0
"""``dlcp bench allreduce``: time all-reduces of DLCP and of the framework, on this machine or as ranks of a job."""

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dlcp.bench import BenchError, BenchResult, document, say
from dlcp.commands.common import add, add_option, check_writable, real, refuse, whole
from dlcp.host.processes import JobLayout, Processes, python_command
from dlcp.inputs.configuration import Range
from dlcp.inputs.error_text import short

_ELSEWHERE: Final = (
    *("compression", "convergence", "cpu", "delay", "loss", "paths", "sim", "slow-path", "step", "switch", "tags"),
    "tail",
)
"""Measurements of DLCP itself, which are of no use on a cluster."""
_UNITS: Final = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_MOST_BYTES: Final = 1 << 34
_VALUE_BYTES: Final = 4
_SWEPT_SIZES: Final = (4_000, 60_000, 600_000, 4_000_000, 25_000_000, 100_000_000)
_RANKS: Final = (2, 4)
_SWEPT_RANKS: Final = (2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp bench``."""
    parser.epilog = (
        "Without a launcher, it starts ranks on this machine. Under torchrun, dlcp launch or dlcp train, each process "
        "is one rank of that job: torchrun ... -m dlcp.cli bench allreduce. Rank 0 prints a table to a terminal, else "
        "one JSON document."
    )
    parser.add_argument("name", type=_name, metavar="NAME", help="allreduce")
    add(parser, "--begin", "SIZE", _size, "smallest size, in bytes or as 4KB", default=8)
    add(parser, "--end", "SIZE", _size, "largest size, such as 1GB (default: 128MiB)", default=_size("128MiB"))
    add(parser, "--factor", "N", whole(2, 1 << 30), "ratio of a size to the one before", default=4)
    add(parser, "--sizes", "SIZE", _size, "these sizes instead", nargs="+")
    add(parser, "--megabytes", "MB", real(Range(0.001, 17_000)), "these sizes instead, in MB", nargs="+")
    sweep = "sizes from 4 kB to 100 MB, and 2, 4 and 8 ranks on this machine, unless given"
    parser.add_argument("--sweep", action="store_true", help=sweep)
    timed = "timed iterations of each size (default: 20)"
    parser.add_argument("--iterations", "--rounds", type=whole(1, 100_000), default=20, metavar="N", help=timed)
    add(parser, "--warm-up", "N", whole(0, 100_000), "iterations before them", default=5)
    add(parser, "--ranks", "N", whole(2, 10_000), "ranks on this machine, without a launcher (default: 2 4)", nargs="+")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are; cuda: beside NCCL (default: cpu)"
    )
    add(parser, "--seed", "N", whole(0), "seed of the values and of the order of turns", default=1)
    add_option(parser)
    add(parser, "--json", "FILE", str, "print one JSON document, or write it to a file", nargs="?", const="-")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the results, and return the exit status."""
    from dlcp.session.options import Options
    from dlcp.train.launcher import check_torch, set_options

    try:
        check_torch()
        set_options(arguments.option)
        options = Options()
        sizes = _sizes(arguments)
        target = arguments.json or ("" if sys.stdout.isatty() else "-")
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first and target not in ("", "-"):
            check_writable("--json", Path(target))
    except ValueError as error:
        return refuse("bench", error)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return _start_ranks(arguments, sizes, target)
    from dlcp.bench.allreduce import AllReduceSeries, measure, table_head, table_row

    series = AllReduceSeries(sizes, arguments.iterations, arguments.warm_up, arguments.device, arguments.seed)
    show = say if target else print

    def report(found: BenchResult) -> None:
        if is_first:
            if found.details["bytes"] == sizes[0]:
                show(f"{_about(found)}\n{table_head(found.details['peer'])}")
            show(table_row(found))
            sys.stdout.flush()

    try:
        results = measure(series, options, report)
    except BenchError as error:
        status = refuse("bench", error, 1)
        sys.stdout.flush()
        os._exit(status)  # a process group whose peers are gone may not end its threads
    if is_first:
        _write(document(results, seed=arguments.seed), target)
    return 0


def _start_ranks(arguments: argparse.Namespace, sizes: Sequence[int], target: str) -> int:
    """Start ranks on this machine, each running this command; return the exit status."""
    documents: list[dict[str, Any]] = []
    for ranks in arguments.ranks or (_SWEPT_RANKS if arguments.sweep else _RANKS):
        with tempfile.TemporaryDirectory(prefix="dlcp-bench-") as folder:
            file = Path(folder, "results.json")
            words = ["allreduce", "--sizes", *map(str, sizes), "--iterations", str(arguments.iterations)]
            words += ["--warm-up", str(arguments.warm_up), "--device", arguments.device, "--seed", str(arguments.seed)]
            words += ["--json", str(file)] if target else []
            command = [*python_command("dlcp.cli", "bench"), *words]
            with Processes(JobLayout.local(ranks), command, os.environ) as processes:
                status = processes.run()
            if status:
                return status
            if target:
                documents.append(json.loads(file.read_text(encoding="utf-8")))
    if target:
        results = [entry for each in documents for entry in each["results"]]
        _write(documents[0] | {"command": shlex.join(sys.argv), "results": results}, target)
    return 0


def _write(found: dict[str, Any], target: str) -> None:
    text = json.dumps(found, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    elif target:
        Path(target).write_text(text, encoding="utf-8")


def _about(found: BenchResult) -> str:
    details = found.details
    hosts = f"{details['hosts']} host{'s' * (details['hosts'] != 1)}"
    return f"{details['ranks']} ranks on {hosts}, tensors on {details['device']}, DLCP through {details['through']}"


def _name(text: str) -> str:
    if text in _ELSEWHERE:
        raise argparse.ArgumentTypeError(f"{text} is measured in a checkout of DLCP: python -m tests.bench {text}")
    if text != "allreduce":
        raise argparse.ArgumentTypeError(f"there is no measurement {short(text)}; it is allreduce")
    return text


def _size(text: str) -> int:
    """Parse a size in bytes, as ``4096``, ``60KB`` or ``1GiB``, of whole float32 values."""
    match = re.fullmatch(r"(\d{1,12})\s*([KMG]i?)?B?", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size, such as 4096, 60KB or 1GiB, got {short(text)}")
    size = int(match[1]) * _UNITS[(match[2] or "").capitalize()]
    if not _VALUE_BYTES <= size <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"must lie in 4 bytes..16 GiB, got {short(text)}")
    return size // _VALUE_BYTES * _VALUE_BYTES


def _sizes(arguments: argparse.Namespace) -> list[int]:
    """Return the sizes of a command line, in bytes."""
    if arguments.sizes:
        return sorted(set(arguments.sizes))
    if arguments.megabytes:
        return sorted({int(1e6 * each) // _VALUE_BYTES * _VALUE_BYTES for each in arguments.megabytes})
    if arguments.sweep:
        return list(_SWEPT_SIZES)
    if arguments.end < arguments.begin:
        raise ValueError(f"--end {arguments.end} is smaller than --begin {arguments.begin}")
    sizes = [arguments.begin]
    while sizes[-1] * arguments.factor <= arguments.end:
        sizes.append(sizes[-1] * arguments.factor)
    return sizes
