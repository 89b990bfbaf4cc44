# SPDX-License-Identifier: Apache-2.0
"""Damage files of all formats that the simulator reads, and check that each is refused in words or simulated rightly.

``python -m tests.sim.mutations --count 1000`` damages a thousand of each format, and prints those that end with a
traceback, a warning, status 0 and an impossible result, or after more than `LIMIT_S`.
"""

import argparse
import contextlib
import copy
import importlib
import io
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dlcp.cli import main
from dlcp.sim.jobs.models import parse_size
from dlcp.sim.scenario import TraceJob
from dlcp.sim.traces import chakra
from dlcp.sim.traces.operations import OperationKind
from dlcp.sim.traces.traced_jobs import read_trace

LIMIT_S = 10
"""Longest run of a damaged file in seconds of the processor. The undamaged ones take less than a tenth of one."""
_HANGS_S = 600
"""After this time, a run that waits for nothing is ended, even on a busy machine."""
VALUES: tuple[Any, ...] = (
    *(0, 1, 2, -1, 7, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1, 10**30),
    *(0.0, 0.5, 1.0, -0.5, 1e-300, 1e-12, 1e-6, 1e6, 1e12, 1e18, 1e300, 1.7e308, math.inf, -math.inf, math.nan),
    *("", "x", "1e309", "12", "1MiB", "0B", "99999999GB", None, True, False, [], {}, [0], [1, 1], {"x": 1}),
)
"""Replacements of a value: the ends of integers and floats, and other types."""
SCENARIO = """\
name: small
title: A small one
question: Does it run?
setting:
  topology: {kind: star, hosts: 4, host_link: {rate_gbps: 100, delay_us: 1}}
  transports:
    t: {kind: dctcp, packet_bytes: 1500}
  training:
    - {name: job, model: 1MB, workers: 4, collective: ring, transport: t, steps: 2, start_s: 0.0001, jitter: 0.1}
  traffic:
    - {name: others, load: 0.1, transport: t, stop_s: 0.0005, most_bytes: 100000}
  failures:
    - {nodes: [host0, switch0], loss_ratio: 0.01, start_s: 0.0001, stop_s: 0.0002}
  seed: 3
  stop_s: 0.01
"""
TABLE = """\
name: table
title: Flows of a table
question: Does it run?
setting:
  topology: {kind: star, hosts: 4}
  traffic:
    - name: flows
      load: 0.3
      stop_s: 0.0005
      sizes: [[0, 0], [10000, 15], [20000, 20], [50000, 40], [100000, 100]]
  stop_s: 0.05
"""
PROFILE = """\
name: own
batch: 4
source: made up for this test
layers:
  - {name: front, parameters: 20000, forward_s: 1e-5, backward_s: 2e-5, output_bytes: 100}
  - {name: middle, parameters: 50000, forward_s: 1e-5, backward_s: 2e-5}
  - {name: back, parameters: 100000, forward_s: 1e-5, backward_s: 2e-5}
"""
OF_PROFILE = """\
name: own
title: A profile of one's own
question: Does it run?
setting:
  topology: {kind: star, hosts: 4}
  training: [{name: job, model: PATH, workers: 4, transport: dctcp, steps: 2}]
  stop_s: 0.05
"""
NETWORK = """\
hosts: [a, b, c]
switches: [left, right]
links:
  - {between: [a, left], rate_gbps: 100, delay_us: 1}
  - {between: [b, left], rate_gbps: 100}
  - {between: [c, right], rate_gbps: 40, loss_ratio: 0.001}
  - {between: [left, right], rate_gbps: 100}
"""
INFRASTRUCTURE = """\
name: rack
devices:
  - name: server
    components: [{name: xpu, count: 1, choice: xpu}, {name: nic, count: 1, choice: nic}]
    links: [{name: pcie}]
    edges: [{ep1: {component: xpu}, ep2: {component: nic}, scheme: one2one, link: pcie}]
  - name: switch
    components: [{name: asic, count: 1, choice: cpu}, {name: port, count: 4, choice: port}]
    links: [{name: ic}]
    edges: [{ep1: {component: asic}, ep2: {component: port}, scheme: many2many, link: ic}]
instances: [{name: host, device: server, count: 3}, {name: leaf, device: switch, count: 1}]
links:
  - name: access
    physical: {bandwidth: {choice: gigabits_per_second, gigabits_per_second: 100}, latency: {choice: us, us: 2}}
edges:
  - ep1: {instance: "host[0:3]", component: "nic[0]"}
    ep2: {instance: "leaf[0]", component: "port[0:3]"}
    scheme: one2one
    link: access
"""
OF_NETWORK = """\
name: network
title: A network of one's own
question: Does it run?
setting:
  topology: {kind: file, file: PATH}
  training: [{name: job, model: 1MB, workers: 3, transport: dctcp, steps: 1}]
  stop_s: 0.05
"""
GOAL = """\
num_ranks 3
rank 0 {
  l1: calc 1500 cpu 0
  l2: send 40960b to 1 tag 7 nic 0
  l2 requires l1
  l3: recv 100b from 2 tag 3 nic 1
  l3 irequires l2
}
rank 1 {
  l1: recv 40960b from 0 tag 7
  l2: send 100000b to 2 tag 1
  l2 requires l1
}
rank 2 {
  l1: recv 100000b from 1 tag 1
  l2: calc 400 cpu 1
  l2 requires l1
  l3: send 100b to 0 tag 3
  l3 requires l2
}
"""


class Outcome(NamedTuple):
    """How a command ended: its status, what it printed, and the traceback if there was one.

    A negative status is a signal: SIGXCPU or SIGALRM if it ran for too long.
    """

    status: int
    printed: str
    trace: str


# ------------------------------------------------------------------------------------------------------------- damaging


def _places(content: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value in some content."""
    if way:
        yield way
    for key, inner in (
        content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    ):
        yield from _places(inner, (*way, key))


def damaged_content(content: Any, dice: random.Random) -> Any:
    """Return content with one to three values replaced, removed, repeated or exchanged."""
    changed = copy.deepcopy(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = list(_places(changed))
        if not places:
            return changed
        *way, last = dice.choice(places)
        inner = changed
        for step in way:
            inner = inner[step]
        match dice.randrange(8):
            case 0:
                del inner[last]
            case 1 if isinstance(inner, list):
                inner.insert(last, copy.deepcopy(inner[last]))
            case 2 if isinstance(inner, list):
                dice.shuffle(inner)
            case 3 if isinstance(inner[last], int | float) and not isinstance(inner[last], bool):
                inner[last] *= dice.choice((-1, 0.001, 10, 1000, 1e9))
            case _:
                inner[last] = copy.deepcopy(dice.choice(VALUES))
    return changed


def damaged_text(text: str, dice: random.Random) -> str:
    """Return text with numbers replaced, lines removed, repeated or exchanged, or letters changed."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        numbers = list(re.finditer(r"\d+(?:\.\d+)?", text))
        lines = text.split("\n")
        at = dice.randrange(len(lines))
        match dice.randrange(6):
            case 0:
                del lines[at]
                text = "\n".join(lines)
            case 1:
                lines.insert(at, dice.choice(lines))
                text = "\n".join(lines)
            case 2:
                letter = dice.randrange(len(text))
                text = text[:letter] + dice.choice("\0{}[]:,-0é \n") + text[letter + 1 :]
            case 3:
                text = text[: dice.randrange(len(text)) + 1]
            case _ if numbers:
                number = dice.choice(numbers)
                text = text[: number.start()] + str(dice.choice(VALUES)) + text[number.end() :]
        text = text or "\n"
    return text


def damaged_bytes(content: bytes, dice: random.Random) -> bytes:
    """Return bytes with some of them changed, removed or added."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 2, 4))):
        at = dice.randrange(len(changed)) if changed else 0
        match dice.randrange(4):
            case 0:
                del changed[at : at + dice.randrange(1, 9)]
            case 1:
                changed[at:at] = dice.randbytes(dice.randrange(1, 9))
            case _:
                changed[at : at + 1] = dice.randbytes(1)
    return bytes(changed)


def _yaml_or_text(text: str, dice: random.Random) -> str:
    if dice.random() < 0.3:
        return damaged_text(text, dice)
    return yaml.safe_dump(damaged_content(yaml.safe_load(text), dice), sort_keys=False)


# -------------------------------------------------------------------------------------------------------------- formats


def _write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))
    return path


def scenario(folder: Path, dice: random.Random) -> list[str]:
    """Write a damaged experiment; return the command that runs it."""
    engine = dice.choice(("packets", "flows"))
    return ["sim", "run", str(_write(folder, "a.yaml", _yaml_or_text(SCENARIO, dice))), "--engine", engine]


def table(folder: Path, dice: random.Random) -> list[str]:
    """Write an experiment with a damaged table of flow sizes."""
    content = yaml.safe_load(TABLE)
    traffic = content["setting"]["traffic"][0]
    traffic["sizes"] = damaged_content([traffic["sizes"]], dice)[:1] or []
    traffic["sizes"] = traffic["sizes"][0] if traffic["sizes"] else []
    return ["sim", "run", str(_write(folder, "a.yaml", yaml.safe_dump(content)))]


def profile(folder: Path, dice: random.Random) -> list[str]:
    """Write a damaged profile, and an experiment that uses it."""
    path = _write(folder, "own.yaml", _yaml_or_text(PROFILE, dice))
    return ["sim", "run", str(_write(folder, "a.yaml", OF_PROFILE.replace("PATH", str(path))))]


def network(folder: Path, dice: random.Random) -> list[str]:
    """Write a damaged network, and an experiment that uses it."""
    path = _write(folder, "network.yaml", _yaml_or_text(NETWORK, dice))
    return ["sim", "run", str(_write(folder, "a.yaml", OF_NETWORK.replace("PATH", str(path))))]


def infrastructure(folder: Path, dice: random.Random) -> list[str]:
    """Write a damaged InfraGraph infrastructure, and an experiment that uses it."""
    path = _write(folder, "network.yaml", _yaml_or_text(INFRASTRUCTURE, dice))
    return ["sim", "run", str(_write(folder, "a.yaml", OF_NETWORK.replace("PATH", str(path))))]


def goal(folder: Path, dice: random.Random) -> list[str]:
    """Write a damaged job in GOAL."""
    return ["sim", "replay", str(_write(folder, "job.goal", damaged_text(GOAL, dice)))]


def _message(content: bytes) -> bytes:
    assert len(content) < 1 << 14
    return bytes([len(content) & 127 | 128, len(content) >> 7]) + content


def _nodes(rank: int) -> list[dict[str, Any]]:
    peer = {"comm_dst": 1, "comm_src": 0, "comm_size": 5000, "comm_tag": 1}
    return [
        {"id": 1, "type": 4, "duration_micros": 20, "data_deps": [], "attr": {"is_cpu_op": False}},
        {"id": 2, "type": 7, "data_deps": [1], "attr": {"comm_type": 0, "comm_size": 100000, "pg_name": "0"}},
        {"id": 3, "type": 6 if rank else 5, "data_deps": [2], "attr": {**peer, "dlcp_queue": 3}},
        {"id": 4, "type": 4, "duration_micros": 5, "data_deps": [2], "attr": {"is_cpu_op": True}},
    ]


def chakra_trace(folder: Path, dice: random.Random) -> list[str]:
    """Write a Chakra trace with damaged values, or damaged bytes."""
    ranks = [_nodes(0), _nodes(1)]
    in_values = dice.random() < 0.6
    if in_values:
        ranks = damaged_content([ranks], dice)
        ranks = ranks[0] if ranks and isinstance(ranks[0], list) else []
    for rank, nodes in enumerate(ranks):
        content = _message(chakra._Metadata(version="0.0.4").SerializeToString())
        for described in nodes if isinstance(nodes, list) else []:
            with contextlib.suppress(TypeError, ValueError, AttributeError):  # what protobuf cannot hold
                node = chakra._Node(**{name: each for name, each in described.items() if name != "attr"}, name="n")
                for name, each in (described.get("attr") or {}).items():
                    with contextlib.suppress(TypeError, ValueError, KeyError):
                        node.attr.append(chakra._attribute(name, each))
                content += _message(node.SerializeToString())
        _write(folder, f"job.{rank}.et", content if in_values else damaged_bytes(content, dice))
    return ["sim", "replay", str(folder / "job.0.et")]


def _dlcp_events() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for rank in range(2):
        for step in range(4):
            begin = 100 + step * 1000
            where = {"ph": "X", "cat": "bucket", "pid": rank + 1, "tid": 100_000}
            events += [
                {**where, "name": "bucket 0", "ts": begin, "dur": 500, "args": {"step": step, "bytes": 100_000}},
                {**where, "name": "tag", "ts": begin, "dur": 50, "args": {"step": step, "bits": 32}},
            ]
            waiting = {"cat": "step", "name": "wait", "pid": rank + 1, "tid": rank + 1, "id2": {"local": f"{step}"}}
            events += [{"ph": "b", **waiting, "ts": begin + 100}, {"ph": "e", **waiting, "ts": begin + 500}]
    return events


def dlcp_trace(folder: Path, dice: random.Random) -> list[str]:
    """Write a damaged trace of ``dlcp train``."""
    text = json.dumps(damaged_content({"traceEvents": _dlcp_events()}, dice))
    text = damaged_text(text, dice) if dice.random() < 0.2 else text
    return ["sim", "replay", str(_write(folder, "trace.json", text))]


def pytorch_profile(folder: Path, dice: random.Random) -> list[str]:
    """Write a damaged profile of PyTorch."""
    gpu = dice.random() < 0.5
    shapes = {"Input Dims": [[25000]], "Input type": ["float"], "Group size": 2}
    nccl = {"Collective name": "allreduce", "In msg nelems": 50000, "dtype": "BFloat16", "Group size": 2}
    first = ("kernel", "gemm") if gpu else ("cpu_op", "aten::mm")
    exchange = ("kernel", "ncclDevKernel_AllReduce") if gpu else ("user_annotation", "gloo:all_reduce")
    events = []
    for step in range(2):
        begin = 1000 + 350 * step
        for (category, name), at, took, tid in (
            (("user_annotation", f"ProfilerStep#{step}"), 0, 350, 1),
            (first, 0, 60, 1),
            (("cpu_op", "c10d::allreduce_"), 60, 10, 1),
            (exchange, 80, 220, 9),
            (first, 300, 50, 1),
        ):
            arguments = (nccl if gpu else shapes) if (category, name) == exchange else {}
            event = {"ph": "X", "cat": category, "name": name, "ts": begin + at, "dur": took, "tid": tid}
            events.append({**event, "args": arguments})
    about = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    text = json.dumps(damaged_content({"distributedInfo": about, "traceEvents": events}, dice))
    return ["sim", "replay", str(_write(folder, "trace.json", text))]


FORMATS: dict[str, Callable[[Path, random.Random], list[str]]] = {
    made.__name__: made
    for made in (*(scenario, table, profile, network, infrastructure, goal, chakra_trace, dlcp_trace, pytorch_profile),)
}


# ------------------------------------------------------------------------------------------------------------- checking


def run(command: list[str]) -> Outcome:
    """Run a command in a fork, which has all compiled code, and end it after `LIMIT_S`."""
    with tempfile.TemporaryFile("w+") as printed:
        child = os.fork()
        if not child:
            status, trace = 70, ""
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
            signal.alarm(_HANGS_S)
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), write_through=True)
            sys.stderr = sys.stdout
            try:
                warnings.simplefilter("always", RuntimeWarning)  # NumPy's, of overflows
                status = main(command)
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 70
            except BaseException:
                trace = traceback.format_exc()
            sys.stdout.write(f"\n{trace}")
            sys.stdout.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        text = printed.read()
    return Outcome(status, text, text[text.index("Traceback") :] if "Traceback" in text else "")


def metrics(printed: str) -> dict[str, float]:
    """Return the metrics in the output of a run."""
    return {name: float(value) for name, value in re.findall(r"^  (\w+) +(\S+)$", printed, re.MULTILINE)}


def fault(command: list[str], outcome: Outcome) -> str:
    """Return the fault of an outcome; empty if there is none."""
    if outcome.status in (-signal.SIGXCPU, -signal.SIGALRM, -signal.SIGKILL):
        return f"it took more than {LIMIT_S} s"
    if outcome.trace or outcome.status not in (0, 1, 2):
        return f"status {outcome.status}: {outcome.trace[-600:]}"
    if warned := re.search(r".*Warning:.*", outcome.printed):
        return f"it warns: {warned[0]}"
    if outcome.status:
        lines = [line for line in outcome.printed.splitlines() if line.startswith(("dlcp", "usage"))]
        foreign = re.search(r"Expected `|got `", outcome.printed)
        return "" if lines and not foreign else f"it does not say why: {outcome.printed[-300:]}"
    found = metrics(outcome.printed)
    if not {"step_s", "fct_mean_s", "other_mean_s"} & found.keys() or not found.get("simulated_s"):
        return f"status 0 without a result: {outcome.printed}"
    wrong = [name for name, value in found.items() if not 0 <= value < math.inf and name != "waiting_s"]
    if wrong:
        return f"{wrong[0]} is {found[wrong[0]]}"
    # The first step of several is no part of the mean, so all steps of a trace are compared with all that it sends.
    least, took = least_s(command), found["simulated_s"] if command[1] == "replay" else found.get("step_s", math.inf)
    return f"it takes {took} s, and at least {least} are needed" if took < least else ""


def least_s(command: list[str]) -> float:
    """Return the shortest step, or trace, that the network allows: the bytes that a rank sends over its link."""
    if command[1] == "replay":
        workload = read_trace(TraceJob(name="trace", file=command[2]))
        sent = [0.0] * len(workload.ranks)
        for rank, operations in enumerate(workload.ranks):
            for each in operations:
                if each.kind is OperationKind.SEND:
                    sent[rank] += each.size_bytes
                elif each.kind is OperationKind.COLLECTIVE and each.collective == "all_reduce":
                    sent[rank] += 2 * (len(each.group) - 1) / len(each.group) * each.size_bytes
        return max(sent) * 8 / 100e9
    setting = yaml.safe_load(Path(command[2]).read_text())["setting"]
    jobs = setting.get("training") or []
    if len(jobs) != 1 or (
        jobs[0].keys() - {"name", "model", "workers", "collective", "transport", "steps", "start_s", "jitter"}
    ):
        return 0.0
    size, workers = parse_size(str(jobs[0].get("model"))), jobs[0].get("workers", 8)
    topology = setting.get("topology") or {}
    rate = (topology.get("host_link") or {}).get("rate_gbps", 100) if topology.get("kind") == "star" else 10_000
    return 0.999 * 2 * (workers - 1) / workers * size * 8 / (float(rate) * 1e9)


def faults(name: str, count: int, seed: int) -> Iterator[tuple[int, list[str], str]]:
    """Damage files of a format, and yield the number, the command and the fault of each that has one."""
    for number in range(count):
        dice = random.Random(f"{name} {seed} {number}")
        with tempfile.TemporaryDirectory() as folder:
            command = FORMATS[name](Path(folder), dice)
            if wrong := fault(command, run(command)):
                files = {
                    path.name: path.read_bytes()[:3000]
                    for path in Path(folder).iterdir()
                    if path.name != "a.yaml" or name in ("scenario", "table")
                }
                yield number, command, f"{wrong}\n{files}"


def warm_up() -> None:
    """Load the engines and other modules that take long, so that forks have them."""
    with contextlib.suppress(ImportError):
        importlib.import_module("infragraph.infragraph_service")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for engine in ("packets", "flows"):
            path = _write(Path(folder), "a.yaml", SCENARIO)
            assert main(["sim", "run", str(path), "--engine", engine]) == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    options = parser.parse_args()
    warm_up()
    print("warm", flush=True)
    total = 0
    for each in options.formats:
        began, own = time.monotonic(), 0
        for number, command, wrong in faults(each, options.count, options.seed):
            print(f"{each} {number}: {' '.join(command)}: {wrong}\n", flush=True)
            own += 1
        print(f"{each}: {options.count} files, {own} faults, {time.monotonic() - began:.0f} s", flush=True)
        total += own
    sys.exit(1 if total else 0)
