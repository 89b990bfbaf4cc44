# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.bench NAME [options]``: run one benchmark of the table and print its JSON document."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from tests.bench.harness import Benchmark


class Entry(NamedTuple):
    """The subject of a benchmark, and its module."""

    purpose: str
    module: str
    attribute: str = "BENCHMARK"


TABLE = {
    "allreduce": Entry("all-reduce against Gloo's, over a clean path", "allreduce", "ALLREDUCE"),
    "loss": Entry("the same through a router that loses packets at random, and while links fail", "allreduce", "LOSS"),
    "delay": Entry("the same over long paths and through deep buffers, alone and beside TCP", "allreduce", "DELAY"),
    "paths": Entry("the same over four equal routes, one of which may be slow or lossy", "allreduce", "PATHS"),
    "slow-path": Entry("the same where one rank is behind a slow port", "allreduce", "SLOW_PATH"),
    "tail": Entry("the same beside bursts of other traffic: growth with the tail", "allreduce", "TAIL"),
    "cpu": Entry("processor time of an all-reduce, beside Gloo's and the least possible", "allreduce", "CPU"),
    "step": Entry("training step of a 25-million-parameter model, against DDP over Gloo", "step"),
    "mixed-speeds": Entry("ranks of unequal speed with equal and with balanced batches", "mixed_speeds"),
    "convergence": Entry("what loss and lower precision cost in accuracy and steps: an hour", "convergence"),
    "alternatives": Entry(
        "time to the same loss beside what people use instead: PyTorch's hooks and model averaging: hours",
        "alternatives",
    ),
    "choice": Entry("what averages each step, chosen while the network changes, against an oracle", "choice"),
    "testbed": Entry("training over Mininet, against Gloo: hours", "testbed"),
    "incast": Entry("sixteen ranks that send to one through a shallow port", "incast"),
    "switch": Entry("the built-in switch between network interfaces, against simple_switch", "switch"),
    "switch-memory": Entry("the built-in switch's program in memory", "switch_memory"),
    "fabric": Entry("the controller, which writes ten thousand entries", "fabric"),
    "tags": Entry("tagging of 100 MB on one core", "tags"),
    "compression": Entry("compressors: bytes, CPU time and error on one core", "compression"),
    "sim": Entry("packet-hops a second of the simulator, beside ns.py", "sim"),
    "sim-flows": Entry("the simulator's flow-level engine beside packets: step times and speed", "flows"),
    "sim-skip": Entry("long trainings in the simulator with steps skipped, beside all steps", "skipping"),
    "sim-trimming": Entry("simulated incasts over a switch that trims, beside one that drops", "trimming"),
    "ns3": Entry("the same DCTCP flows in ns-3 and in the simulator", "ns3"),
    "trace": Entry("simulated beside measured steps: a job that trains for real, and its trace", "trace_replay"),
    "demo": Entry("the demo's runs beside the same training in the simulator", "simulated_demo"),
    "live": Entry("the processor time of being watched", "live"),
    "slow-rank": Entry("whether the slow rank and the cause are named, and what watching costs", "slow_rank"),
    "elastic": Entry("training that outlives ranks: notice, go on, come back", "elastic"),
    "timeline": Entry("the processor time of notes for a trace", "timeline"),
}


def benchmark(name: str) -> Benchmark:
    """Return a benchmark of the table. Only its own module is loaded, as some need packages that others do not."""
    found: Benchmark = getattr(importlib.import_module(f"tests.bench.{TABLE[name].module}"), TABLE[name].attribute)
    return found


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options."""
    purpose = TABLE[name].purpose
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.bench {name}", description=f"{purpose[0].upper()}{purpose[1:]}."
    )
    benchmark(name).add_arguments(parser)
    return parser


def main(words: Sequence[str]) -> int:
    """Run one benchmark; return the exit status."""
    if not words or words[0] not in TABLE:
        width = max(map(len, TABLE))
        lines = [f"  {name:{width}}  {entry.purpose}" for name, entry in TABLE.items()]
        print("usage: python -m tests.bench NAME [options]", *lines, sep="\n", file=sys.stderr)
        return 2
    name, *options = words
    return benchmark(name).run(name, parser_of(name).parse_args(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
