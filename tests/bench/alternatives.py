# SPDX-License-Identifier: Apache-2.0
"""DLCP against its alternatives: PyTorch's communication hooks and its model averaging, over Gloo.

Training to the end in every setting would take hours for each figure. So two things are measured, and multiplied:

- *steps*: every method trains every task with four processes, once for each seed. The network does not matter, so they
  run over loopback. What counts is the number of steps to the test loss that plain averaging has after a third of its
  steps, as in ``convergence``.
- *time of a step*: in every setting, every method trains the task's model for some steps, again and again, in turns.
  The processes compute what they do in training. Some steps come before a method begins to save bytes, and these are
  counted at their own time.

The product neglects that DLCP sends some gradients one step later where the network drops packets. All figures are kept
in a file of cells, which several runs can fill.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dlcp.bench import BenchError, BenchResult, median, result, say, significant
from dlcp.demo.background import schedule
from dlcp.demo.run import NamespaceNetwork, await_ready, start_background
from dlcp.demo.variants import DemoSetup
from dlcp.examples.learning_tasks import (
    OPTIMIZER_MAKERS,
    SMALL_TASKS,
    TEST_EVERY,
    LabelledData,
    batches_of,
    evaluate,
    loss_of,
    schedule_of,
)
from dlcp.host import processor
from dlcp.host.netlab import become_root
from dlcp.inputs.error_text import nearest
from dlcp.values.planes import FULL_BITS
from tests.bench.convergence import SMOOTH, TARGET_BY, LossCurve
from tests.bench.emulated_training import EMULATED_RANKS
from tests.bench.harness import Benchmark, FailedError, Turns, int_option, scratch
from tests.bench.methods import METHODS, PLAIN, TRAINED, Method
from tests.bench.paths import BenchPath, DelayedPath, RoutedPath, loopback
from tests.bench.ranks import RankError, Ranks, join_gloo

RANKS: Final = EMULATED_RANKS
_OPTIMIZER: Final = "adamw"
_BLOCK_S: Final = 1.5
"""About how long a method trains at a time: several times as long as the slowest step on most paths."""
_BLOCK_STEPS: Final = (3, 24)
"""The fewest and the most steps at a time; with model averaging, in whole periods."""
_FIRST_SEED: Final = 1
_UNLIMITED: Final = 1 << 40
_CONGESTED_BPS: Final = 64_000_000
_BACKGROUND_S: Final = 3600.0

# Settings -------------------------------------------------------------------------------------------------------------


class CongestedPath(BenchPath):
    """The demo's network: two flows of TCP send bursts into one rank's port at a time.

    As in the demo, the switch holds DLCP to its fair share of each port.

    Parameters
    ----------
    burst_s
        Mean length of a burst in seconds.
    """

    interface = NamespaceNetwork.interface

    def __init__(self, burst_s: float) -> None:
        super().__init__(RANKS)
        self.burst_s = burst_s
        setup = DemoSetup(workers=RANKS, rate_bps=_CONGESTED_BPS, burst_s=burst_s)
        try:
            self._network = self._stack.enter_context(NamespaceNetwork(setup, held=True))
            bursts = schedule(setup.seed, len(setup.targets), _BACKGROUND_S, on_s=burst_s)
            _, sources = start_background(setup, self._network, bursts, self._stack)
            await_ready(sources)
        except BaseException:
            self._stack.close()
            raise
        for source in sources:
            source.start_at(time.monotonic())
        self.namespaces = [self._network.namespace(rank) for rank in range(RANKS)]

    @property
    def words(self) -> str:
        """The path's description."""
        return f"the demo's switch, {_CONGESTED_BPS / 1e6:g} Mbit/s, bursts of {self.burst_s:g} s beside"

    def address(self, rank: int) -> str:
        """Return where a rank is."""
        return self._network.bind_of(rank, 0).rpartition(":")[0]


def _rate(mbps: float) -> int:
    return round(mbps * 1e6)


SETTINGS: Final[dict[str, Callable[[], BenchPath]]] = {
    "clean": lambda: BenchPath(RANKS),
    "1gbit": lambda: RoutedPath(RANKS, rate_bps=_rate(1000), offloads=True),
    "100mbit": lambda: RoutedPath(RANKS, rate_bps=_rate(100), offloads=True),
    "congested": lambda: CongestedPath(8.0),
    "bursts0.3": lambda: CongestedPath(0.3),
    "bursts1": lambda: CongestedPath(1.0),
    "loss1": lambda: RoutedPath(RANKS, 0.01),
    "slow-port": lambda: RoutedPath(RANKS, rate_bps=_rate(100), slowest_bps=_rate(100 / 3)),
    "20ms": lambda: DelayedPath(_rate(100), 0.02, 2.0, RANKS),
    "100ms": lambda: DelayedPath(_rate(100), 0.1, 2.0, RANKS),
}
_WITHOUT_ROOT: Final = {"clean"}

# Ranks ----------------------------------------------------------------------------------------------------------------


class Learner:
    """A model of a task, which one rank trains with one method.

    Parameters
    ----------
    rank
        This rank's number.
    task
        Name of the task.
    method
        How gradients are averaged.
    data, seed
        The task's data for this seed, which determines initialisation and batches, too.
    bind
        Address of DLCP's socket.
    """

    def __init__(self, rank: int, task: str, method: Method, data: LabelledData, seed: int, bind: str) -> None:
        learned = SMALL_TASKS[task]
        self.network = learned.network(seed)
        self._data, self._method = data, method
        self._model = DistributedDataParallel(
            self.network,
            bucket_cap_mb=method.bucket_mb,
            init_sync=False,  # the seed makes all ranks' parameters equal
        )
        optimizer = OPTIMIZER_MAKERS[_OPTIMIZER](list(self.network.parameters()), learned.rates[_OPTIMIZER])
        self._end = method.attach(self._model, optimizer, bind)
        self._schedule = schedule_of(optimizer, learned.steps)
        self._optimizer = method.wrap(optimizer)
        drawn = batches_of(_UNLIMITED, learned.batch, len(data.train_labels), seed, EMULATED_RANKS)
        self._batches = (of_ranks[rank] for of_ranks in drawn)

    def step(self) -> float:
        """Do one step and return its time in seconds."""
        began_s = time.perf_counter()
        batch = next(self._batches)
        self._optimizer.zero_grad()
        loss = loss_of(self._model(self._data.train_inputs[batch]), self._data.train_labels[batch])
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._schedule.step()
        return time.perf_counter() - began_s

    def average_into(self, network: nn.Module) -> None:
        """Make another network the mean of the ranks' ones; all ranks must call it."""
        network.load_state_dict(self.network.state_dict())
        if self._method.period > 1:  # else they are equal
            values = parameters_to_vector(network.parameters()).detach()
            dist.all_reduce(values)
            vector_to_parameters(values / dist.get_world_size(), network.parameters())

    def end(self) -> int:
        """End DLCP's session, if any; return the lowest precision of values in the last steps, in bits."""
        return self._end() if self._end else FULL_BITS


class Trainee:
    """A rank; see :class:`tests.bench.ranks.Ranks`.

    Parameters
    ----------
    rank
        This rank's number.
    hosts, interface
        Each rank's address, and the interface that it is on.
    store
        Path of the file by which ranks find each other.
    """

    def __init__(self, rank: int, hosts: Sequence[str], interface: str, store: str) -> None:
        join_gloo(rank, len(hosts), store, interface)
        self._rank, self._bind = rank, f"{hosts[rank]}:0"
        self._data: dict[tuple[str, int], LabelledData] = {}
        self._learner: Learner | None = None

    def train(self, task: str, method: str, seed: int, target: float | None) -> list[float]:
        """Train a task until the test loss is as low as a target; without one, for a third of the steps.

        Returns
        -------
        The test loss of the mean of the ranks' models after every fourth step.
        """
        learned = SMALL_TASKS[task]
        data = self._data_of(task, seed)
        learner = self._make(task, method, seed)
        tested = learned.network(seed)
        losses: list[float] = []
        for step in range(1, learned.steps + 1):
            learner.step()
            if step % TEST_EVERY:
                continue
            learner.average_into(tested)
            loss = torch.empty(1)
            if self._rank == 0:
                loss[0] = evaluate(tested, data)[1]
            dist.broadcast(loss, 0)
            losses.append(loss.item())
            if target is None:
                reached = step + TEST_EVERY > TARGET_BY * learned.steps
            else:
                reached = len(losses) >= SMOOTH and LossCurve(losses).steps_to(target) is not None
            if reached:
                break
        learner.end()
        return losses

    def begin(self, task: str, method: str, steps: int) -> list[float]:
        """Begin to train, and return the times of the first steps in seconds."""
        self._learner = self._make(task, method, _FIRST_SEED)
        return [self._learner.step() for _ in range(steps)]

    def block(self, steps: int) -> float:
        """Do some steps, and return the mean time of one in seconds."""
        assert self._learner
        return statistics.fmean(self._learner.step() for _ in range(steps))

    def end(self) -> int:
        """Stop training; return the lowest precision of values in the last steps, in bits."""
        assert self._learner
        bits = self._learner.end()
        self._learner = None
        return bits

    def _data_of(self, task: str, seed: int) -> LabelledData:
        if (task, seed) not in self._data:
            self._data[task, seed] = SMALL_TASKS[task].data(seed)
        return self._data[task, seed]

    def _make(self, task: str, method: str, seed: int) -> Learner:
        data = self._data_of(task, seed)
        return Learner(self._rank, task, (METHODS | TRAINED)[method], data, seed, self._bind)


@contextmanager
def trainees_on(path: BenchPath) -> Iterator[Ranks]:
    """Start the ranks on a path."""
    with scratch() as folder:
        hosts = [path.address(rank) for rank in range(RANKS)]
        with Ranks(Trainee, [hosts, path.interface, str(folder / "store")], path.namespaces) as trainees:
            yield trainees


# Cells ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Training:
    """A training, which ended at the test loss that plain averaging has after a third of its steps.

    Parameters
    ----------
    losses
        The test loss after every fourth step.
    """

    task: str
    method: str
    seed: int
    losses: list[float]

    @property
    def curve(self) -> LossCurve:
        """The smoothed loss."""
        return LossCurve(self.losses)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times of a method in a setting; one entry for each round.

    Parameters
    ----------
    machine
        Processor and number of cores: times of different machines do not compare.
    path
        The network in words.
    first_s
        Times of the first steps, in seconds.
    step_s
        Mean time of a later step, in seconds.
    bits
        Lowest precision of values in the last steps.
    """

    machine: str
    setting: str
    task: str
    method: str
    path: str
    first_s: list[list[float]]
    step_s: list[float]
    bits: list[int]

    @property
    def usual_bits(self) -> int:
        """The precision in most rounds."""
        return Counter(self.bits).most_common(1)[0][0]

    def seconds_for(self, steps: float, first: int) -> float:
        """Return the time of ``steps`` steps: the ``first`` ones at their own times, the others at the median."""
        first_s = [median(times) for times in zip(*self.first_s, strict=True)][:first]
        whole = min(int(steps), len(first_s))
        return sum(first_s[:whole]) + (steps - whole) * median(self.step_s)


class CellFile:
    """A file of cells, each a line of JSON, which is written as soon as it is measured.

    Times of other machines than ``machine`` are ignored; None accepts all machines.
    """

    def __init__(self, path: Path, machine: str | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._path = path
        self.trainings: dict[tuple[str, str, int], Training] = {}
        self.times: dict[tuple[str, str, str], StepTimes] = {}
        self._machine = machine
        for line in path.read_text(encoding="utf-8").splitlines():
            cell = json.loads(line)
            self._keep(Training(**cell) if "losses" in cell else StepTimes(**cell))

    def add(self, cell: Training | StepTimes) -> None:
        """Add a cell that was measured now."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(cell)) + "\n")
        self._keep(cell)

    def _keep(self, cell: Training | StepTimes) -> None:
        if isinstance(cell, Training):
            self.trainings[cell.task, cell.method, cell.seed] = cell
        elif self._machine in (None, cell.machine):
            self.times[cell.setting, cell.task, cell.method] = cell


def machine() -> str:
    """Return processor and number of cores."""
    return f"{processor()}, {os.cpu_count()} cores"


# Measuring ------------------------------------------------------------------------------------------------------------


def trained_by(names: Iterable[str]) -> list[str]:
    """Return the names of the methods that have to be trained to the end, for methods that are compared."""
    methods = [METHODS[name] for name in (PLAIN, *names)]
    return list(dict.fromkeys(each.trained(bits).name for each in methods for bits in each.bits))


def train_all(cells: CellFile, tasks: Sequence[str], names: Sequence[str], seeds: Sequence[int]) -> dict[str, str]:
    """Train cells that are not in the file yet; return the errors of failed ones, by name."""
    failed: dict[str, str] = {}
    # The first method is the plain one, whose losses the others have to reach.
    every = [(task, method, seed) for task, seed, method in product(tasks, seeds, names)]
    missing = [each for each in every if each not in cells.trainings]
    while missing:
        with loopback(RANKS) as path, trainees_on(path) as trainees:
            while missing:
                task, method, seed = missing.pop(0)
                plain = cells.trainings.get((task, PLAIN, seed))
                if plain is None and method != PLAIN:
                    continue  # it failed, so there is nothing to compare with
                try:
                    losses = trainees.call("train", task, method, seed, plain and plain.curve.lowest)[0]
                except RankError as error:
                    failed[f"{task}.{method}"] = str(error)
                    missing = [each for each in missing if each[:2] != (task, method)]
                    break  # its peers wait for the rank that failed
                cells.add(Training(task, method, seed, losses))
                say(f"{task}, {method}, seed {seed}: loss {losses[-1]:.3f} after {TEST_EVERY * len(losses)} steps")
    return failed


def time_steps(cells: CellFile, setting: str, task: str, names: Sequence[str], turns: Turns) -> dict[str, str]:
    """Time cells that are not in the file yet, in turns; return the errors of failed ones, by name."""
    failed: dict[str, str] = {}
    missing = [name for name in names if (setting, task, name) not in cells.times]
    while missing:
        with SETTINGS[setting]() as path, trainees_on(path) as trainees:
            timers = {name: _Timer(trainees, task, name) for name in missing}
            try:
                samples = turns.take({name: timer.block for name, timer in timers.items()})
            except RankError as error:
                bad = next(name for name, timer in timers.items() if timer.running)
                failed[f"{setting}.{task}.{bad}"] = str(error)
                missing.remove(bad)
                continue
            for name, timer in timers.items():
                counted = slice(turns.warm_up, None)
                times = timer.first_s[counted], samples[name], timer.bits[counted]
                cells.add(StepTimes(machine(), setting, task, name, path.words, *times))
        break
    return failed


class _Timer:
    """Times blocks of steps of one method."""

    def __init__(self, trainees: Ranks, task: str, name: str) -> None:
        self._trainees, self._task, self._name = trainees, task, name
        self.first_s: list[list[float]] = []
        self.bits: list[int] = []
        self.running = False

    def block(self) -> float:
        """Train from the start, and return the time of a step after the first ones, in seconds."""
        self.running = True
        method = METHODS[self._name]
        by_rank = self._trainees.call("begin", self._task, self._name, max(1, method.first))
        first_s = [max(times) for times in zip(*by_rank, strict=True)]
        steps = whole_periods(_BLOCK_STEPS[0], method.period)
        step_s: float = max(self._trainees.call("block", steps))
        more = whole_periods(min(_BLOCK_S / step_s, _BLOCK_STEPS[1]) - steps, method.period)
        if more > 0:
            step_s = (steps * step_s + more * max(self._trainees.call("block", more))) / (steps + more)
        self.first_s.append(first_s)
        self.bits.append(min(self._trainees.call("end")))
        self.running = False
        return step_s


def whole_periods(steps: float, period: int) -> int:
    """Return a number of steps, rounded up to whole periods."""
    return math.ceil(steps / period) * period


def compare(cells: CellFile, setting: str, task: str, name: str, seeds: Sequence[int]) -> BenchResult | None:
    """Return a method's time to the loss, and Gloo's; None if a cell is missing.

    A training that does not reach the loss counts with all its steps.
    """
    ours, theirs = (_Way.of(cells, setting, task, each, seeds) for each in (name, PLAIN))
    if ours is None or theirs is None:
        return None
    times = ours.times
    details = {
        "setting": setting,
        "task": task,
        "method": name,
        "peer": PLAIN,
        "path": times.path,
        "steps": [None if taken is None else round(taken, 1) for taken in ours.steps],
        "step_ms": [significant(1e3 * value) for value in times.step_s],
        "first_ms": [significant(1e3 * median(values)) for values in zip(*times.first_s, strict=True)],
        "bits": times.bits,
    }
    return result(f"alternatives.{setting}.{task}.{name}", "s", ours.seconds, theirs.seconds, details=details)


@dataclass(frozen=True, slots=True)
class _Way:
    """The two halves of a figure: times of steps, and by seed steps to the loss, None if it was not reached."""

    times: StepTimes
    steps: list[float | None]
    seconds: list[float]

    @classmethod
    def of(cls, cells: CellFile, setting: str, task: str, name: str, seeds: Sequence[int]) -> "_Way | None":
        times = cells.times.get((setting, task, name))
        if times is None:
            return None
        trained = METHODS[name].trained(times.usual_bits).name
        pairs = [[cells.trainings.get((task, each, seed)) for each in (trained, PLAIN)] for seed in seeds]
        curves = [[training.curve for training in pair if training] for pair in pairs]
        if not curves or any(len(pair) < 2 for pair in curves):
            return None
        steps = [ours.steps_to(plain.lowest) for ours, plain in curves]
        counted = [taken or ours.steps for taken, (ours, _) in zip(steps, curves, strict=True)]
        return cls(times, steps, [times.seconds_for(each, METHODS[name].first) for each in counted])


def table(results: Sequence[BenchResult], task: str) -> list[str]:
    """Return a table in Markdown: seconds to the loss by method and setting, each family with its best number."""
    best: dict[tuple[str, str], BenchResult] = {}
    for entry in results:
        if entry.details["task"] == task:
            key = METHODS[entry.details["method"]].row, entry.details["setting"]
            best[key] = min(best.get(key, entry), entry, key=_rank)
    rows = [
        row for row in dict.fromkeys(method.row for method in METHODS.values()) if any(row == key[0] for key in best)
    ]
    columns = [setting for setting in SETTINGS if any(setting == key[1] for key in best)]
    lines = [f"| {task} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    return lines + [f"| {row} | {' | '.join(_figure(best.get((row, column))) for column in columns)} |" for row in rows]


def _rank(entry: BenchResult) -> tuple[int, float]:
    """Return the sort key of a row's methods: seeds that never reach the loss, then seconds."""
    return entry.details["steps"].count(None), entry.value


def _figure(entry: BenchResult | None) -> str:
    """Return a figure of the table, with the parameters of its method, and the precision."""
    if entry is None:
        return ""
    method = METHODS[entry.details["method"]]
    notes = [method.name.removeprefix(method.row).strip(":")]
    if len(method.bits) > 1:
        notes.append("/".join(map(str, sorted(set(entry.details["bits"])))) + " bits")
    if None in entry.details["steps"]:
        notes.append(f"{entry.details['steps'].count(None)} never")
    words = ", ".join(filter(None, notes))
    return f"{entry.value:.3g}" + (f" ({words})" if words else "")


def _alternatives(arguments: argparse.Namespace) -> list[BenchResult]:
    for kind, names, known in (
        ("setting", arguments.settings, SETTINGS),
        ("task", arguments.tasks, SMALL_TASKS),
        ("method", arguments.methods, METHODS),
    ):
        for name in names:
            if name not in known:
                raise BenchError(f"there is no {kind} {name!r}{nearest(name, known)}")
    if not set(arguments.settings) <= _WITHOUT_ROOT:
        become_root()
    cells = CellFile(arguments.cells, machine())
    names = list(dict.fromkeys((PLAIN, *arguments.methods)))
    seeds = range(_FIRST_SEED, _FIRST_SEED + arguments.seeds)
    failed = train_all(cells, arguments.tasks, trained_by(names), seeds)
    pairs = list(product(arguments.tasks, arguments.settings))
    for task, setting in pairs:
        failed |= time_steps(cells, setting, task, names, arguments.turns)
    found = [compare(cells, setting, task, name, seeds) for task, setting in pairs for name in names]
    results = [entry for entry in found if entry]
    for task in arguments.tasks:
        say("\n".join(table(results, task)))
    if failed:
        raise FailedError(results, failed)
    return results


BENCHMARK: Final = Benchmark(
    _alternatives,
    {
        "--settings": {
            "nargs": "*",
            "metavar": "SETTING",
            "default": list(SETTINGS),
            "help": f"networks; none: only train (default: {' '.join(SETTINGS)})",
        },
        "--tasks": {
            "nargs": "+",
            "metavar": "TASK",
            "default": ["digits", "text", "patches"],
            "help": f"of {' '.join(SMALL_TASKS)} (default: digits text patches)",
        },
        "--methods": {
            "nargs": "+",
            "metavar": "METHOD",
            "default": list(METHODS),
            "help": f"beside {PLAIN} (default: {' '.join(METHODS)})",
        },
        "--seeds": int_option(3, "trainings of each; 0: only time steps", least=0, most=10_000),
        "--cells": {
            "type": Path,
            "default": Path("out/alternatives.jsonl"),
            "metavar": "FILE",
            "help": "of measured cells, which are kept (default: %(default)s)",
        },
    },
    rounds=3,
    warm_up=0,
)
