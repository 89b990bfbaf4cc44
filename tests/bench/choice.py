# SPDX-License-Identifier: Apache-2.0
"""DLCP's choice of how each step is averaged, against an oracle, while the network changes or the machine is busy.

Four ranks train the demo's network around a router whose ports are fast, congested, slow and fast again. One training
has DLCP's default options, so it chooses. Each of the others has one way to average, and a few steps of every phase are
timed. The oracle knows which of these is fastest in each phase, and uses it from the phase's first step on.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

from dlcp.bench import BenchResult, median, result, significant
from dlcp.host.netlab import become_root
from dlcp.host.processes import Fork
from tests.bench.alternatives import RANKS, trainees_on
from tests.bench.disturbances import BackgroundBursts
from tests.bench.harness import Benchmark, Turns, int_option
from tests.bench.paths import LINK_BURST_BYTES, QUEUE_S, RoutedPath
from tests.bench.ranks import Ranks

_FAST_BPS: Final = 1_000_000_000
_SLOW_BPS: Final = 100_000_000
_BURST_S: Final = 0.1
"""Mean length of a burst into a port; at five bursts a second, other traffic has a third of its time."""
_TASK: Final = "digits"
_FIXED: Final = ("gloo", "dlcp:32", "dlcp:8")
_CHOSEN: Final = "dlcp"
_SETTLING_STEPS: Final = 4
"""Untimed steps of a fixed way after each change of the network, while its senders find the new rate."""
_TIMED_STEPS: Final = 36
_CALL_STEPS: Final = 20
"""Steps in one call of the ranks, which has a deadline."""
_BUSY_LOOPS: Final = 2


class NetworkPhase(NamedTuple):
    """A state of the network, which lasts for some steps of training."""

    name: str
    rate_bps: int
    burst_s: float = 0.0


_FAST, _SLOW = NetworkPhase("fast", _FAST_BPS), NetworkPhase("slow", _SLOW_BPS)
_CONGESTED: Final = NetworkPhase("congested", _SLOW_BPS, _BURST_S)
_CHANGES: Final = (_FAST, _CONGESTED, _SLOW, _FAST)


class ChangingPath(RoutedPath):
    """Hosts around a router whose ports change their rate, and which may send bursts of other traffic into them."""

    def __init__(self) -> None:
        super().__init__(RANKS, rate_bps=_FAST_BPS, offloads=True)
        self._bursts: BackgroundBursts | None = None
        self._stack.callback(self._end_bursts)

    def change(self, phase: NetworkPhase, seed: int) -> None:
        """Enter a phase."""
        self._end_bursts()
        self.rate_bps = phase.rate_bps
        limit = round(phase.rate_bps * QUEUE_S / 8) + LINK_BURST_BYTES
        for rank in range(RANKS):
            self.router.limit_rate(f"port{rank}", phase.rate_bps, burst_bytes=LINK_BURST_BYTES, limit_bytes=limit)
        if phase.burst_s:
            self._bursts = BackgroundBursts(self, self.router, phase.burst_s, seed).__enter__()

    def _end_bursts(self) -> None:
        if self._bursts is not None:
            self._bursts.close()
            self._bursts = None


class _Trainings:
    """Trainings through the same phases, one at a time."""

    def __init__(self, path: ChangingPath, trainees: Ranks, phases: Sequence[NetworkPhase], seed: int) -> None:
        self._path, self._trainees, self._phases, self._seed = path, trainees, phases, seed

    def chosen(self, steps: int) -> list[float]:
        """Train with the default options, ``steps`` in each phase; return the duration of each phase in seconds."""
        with self._training(_CHOSEN):
            return [steps * self._steps(steps) for _ in self._each_phase()]

    def fixed(self, method: str) -> list[float]:
        """Train with one method throughout; return the time of a step in each phase in seconds."""
        found = []
        with self._training(method):
            for _ in self._each_phase():
                self._steps(_SETTLING_STEPS)
                found.append(self._steps(_TIMED_STEPS))
        return found

    @contextmanager
    def _training(self, method: str) -> Iterator[None]:
        self._path.change(self._phases[0], self._seed)
        self._trainees.call("begin", _TASK, method, 1)
        try:
            yield
        finally:
            self._trainees.call("end")

    def _each_phase(self) -> Iterator[NetworkPhase]:
        for number, phase in enumerate(self._phases):
            self._path.change(phase, self._seed + number)
            yield phase

    def _steps(self, steps: int) -> float:
        """Return the mean time of some steps in seconds."""
        parts = [min(_CALL_STEPS, steps - done) for done in range(0, steps, _CALL_STEPS)]
        return sum(part * max(self._trainees.call("block", part)) for part in parts) / steps


def compare(name: str, phases: Sequence[NetworkPhase], steps: int, turns: Turns, *, busy_loops: int = 0) -> BenchResult:
    """Return the time of a training that chooses, and the oracle's."""
    times: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        path = stack.enter_context(ChangingPath())
        trainees = stack.enter_context(trainees_on(path))
        for _ in range(busy_loops):
            stack.callback(Fork("busy", _loop, ()).close)

        def timed(method: str, train: Callable[[_Trainings], list[float]]) -> float:
            rounds = times.setdefault(method, [])
            rounds.append(train(_Trainings(path, trainees, phases, len(rounds))))
            return sum(rounds[-1])

        ways: dict[str, Callable[[_Trainings], list[float]]] = {_CHOSEN: lambda trainings: trainings.chosen(steps)}
        ways |= {method: partial(_Trainings.fixed, method=method) for method in _FIXED}
        turns.take({method: partial(timed, method, train) for method, train in ways.items()})
    rounds = {method: found[turns.warm_up :] for method, found in times.items()}
    chosen = rounds.pop(_CHOSEN)
    step_s = {method: [median(values) for values in zip(*found, strict=True)] for method, found in rounds.items()}
    best = [min(rounds, key=lambda method: step_s[method][number]) for number in range(len(phases))]
    oracle = [
        steps * sum(rounds[method][turn][number] for number, method in enumerate(best)) for turn in range(len(chosen))
    ]
    details = {
        "peer": "oracle",
        "phases": [phase.name for phase in phases],
        "steps_per_phase": steps,
        "busy_loops": busy_loops,
        "best": best,
        "step_ms": {method: [significant(1e3 * value) for value in values] for method, values in step_s.items()}
        | {_CHOSEN: [significant(1e3 * median(values) / steps) for values in zip(*chosen, strict=True)]},
    }
    return result(f"choice.{name}", "s", [sum(each) for each in chosen], oracle, details=details)


def _loop(channel: Connection) -> None:
    """Compute until killed."""
    while not channel.poll(0):
        sum(range(100_000))


def _choice(arguments: argparse.Namespace) -> list[BenchResult]:
    become_root()
    steps, turns = arguments.phase_steps, arguments.turns
    return [
        compare(f"changes.{steps}", _CHANGES, steps, turns),
        *(compare(f"busy.{phase.name}", [phase], steps, turns, busy_loops=_BUSY_LOOPS) for phase in (_FAST, _SLOW)),
    ]


BENCHMARK = Benchmark(
    _choice, {"--phase-steps": int_option(150, "steps in each phase of the network")}, rounds=3, warm_up=0
)
