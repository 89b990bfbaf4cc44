# SPDX-License-Identifier: Apache-2.0
"""Training that outlives ranks: how soon the others notice, go on, and let a rank in that comes back.

In each try one rank of :mod:`tests.bench.elastic_job`, drawn at random, is hit at a random moment of the training:

- ``kill``: the process is killed.
- ``stop``: it stands still, and is woken up once the others have gone on.
- ``link``: its host's cable is pulled, and plugged in again once the others have gone on.
- ``namespace``: its host loses its interface, with addresses and routes, for good.
- ``back``: it is killed, and starts again at once.
- ``none``: nothing happens. The figure is steps a second, with ``elastic`` and without.
- ``cut``: half of the hosts lose their links at once. The store is on the other side, which must go on alone.

A try fails if ranks hang, if those that are left do not end with equal parameters, or if one that was left out does not
end with an error that says so.

With ``--accuracy``, tasks of :mod:`dlcp.examples.learning_tasks` are learnt, with and without kills. The figure is how
many points of accuracy the kills cost, with the standard error of the mean.

With ``--torchft``, the processes train with torchft and its Gloo process group instead.

With ``--schedule``, kills, stops and pulled cables come for so long, and each rank that has ended starts again after a
second. The figure is what share of an undisturbed training's throughput the ranks have that take part, in the mean.
"""

import argparse
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from dlcp.bench import BenchError, BenchResult, median, result, say, significant
from dlcp.commands.common import DURATIONS
from dlcp.inputs.configuration import Range
from tests.bench.elastic_job import (
    GO_ON_S,
    LEAST,
    LEFT_OUT_S,
    POLL_S,
    SETTLING_STEPS,
    START_S,
    Hosts,
    Job,
    RankProcess,
    TryError,
)
from tests.bench.harness import (
    MEGABYTES,
    SEED,
    Benchmark,
    FailedError,
    float_option,
    int_option,
    scratch,
)

FAULTS: Final = ("kill", "stop", "link", "namespace")
"""The faults that are measured if none is named."""
MOMENT_S: Final = (1.0, 3.0)
"""When a rank is hit, after all have settled."""
START_AGAIN: Final = "start it again"
"""In the error of a new rank that has no part yet in a step with others when one of these has a fault."""
GONE_ON: Final = "go on without"
"""What the error of a rank says that was left out, and can reach the store."""
DISCARDED: Final = "discarded"
"""The name of the number of steps that were thrown away."""
LOOPBACK_FAULTS: Final = {"kill", "stop", "back", "none"}
LIMITS_S: Final = (1.0, 5.0)
"""For each time, the results say in how many tries it was within these limits."""
SCHEDULED: Final = ("kill", "stop", "link")
"""The faults of a schedule."""
OUTAGE_S: Final = (0.5, 5.0)
"""How long a rank of a schedule stands still, or has no link."""
RESTART_S: Final = 1.0
HANG_S: Final = 30.0
"""A training without a step for so long hangs."""
CALM_S: Final = 3.0
"""So long after the end of a fault, a rank that is left out has noticed."""
UNDISTURBED_S: Final = 15.0
LEARNERS: Final = 4
KILLS: Final = 3
"""How many ranks are killed while a task is learnt."""
KILLS_UNTIL: Final = 0.9
"""Share of a task's steps until which they are."""
SECONDS: Final = Range(0.0, 1e6)


# One fault ------------------------------------------------------------------------------------------------------------


def hit(job: Job, fault: str, victims: Sequence[RankProcess]) -> float:
    """Let processes have a fault; return when."""
    places, fault_s = [each.place for each in victims], time.monotonic()
    if fault in ("link", "cut"):
        job.hosts.set_links(places, "down")
    elif fault == "namespace":
        job.hosts.take(places[0])
    else:
        victims[0].process.send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    return fault_s


def mend(job: Job, fault: str, victims: Sequence[RankProcess], *, finally_: bool = False) -> None:
    """End a fault: one that a rank can outlive, or ``finally_`` any, so that the hosts are as before."""
    places = [each.place for each in victims]
    if fault == "stop" and victims[0].runs:
        victims[0].process.send_signal(signal.SIGCONT)
    elif fault == "link" or (fault == "cut" and finally_):
        job.hosts.set_links(places, "up")
    elif fault == "namespace" and finally_:
        job.hosts.give(places[0])


def noticed_s(left: Sequence[RankProcess], fault_s: float) -> float:
    """Return how long it took until the lowest rank that is left gave the others up."""
    for log in (log for each in left for log in each.notes("log")):
        if log["at_s"] > fault_s and "Training goes on after" in log["text"]:
            return float(log["at_s"] - float(log["text"].split("goes on after ")[1].split()[0]) - fault_s)
    raise TryError("no rank has said that training goes on")


def torchft_noticed(left: Sequence[RankProcess], fault_s: float, gone_on_s: float) -> dict[str, float]:
    """Return when a replica has thrown its step away, or at the latest gone on, and how many steps each threw away."""
    thrown = [[note["at_s"] for note in each.notes("discarded") if note["at_s"] > fault_s] for each in left]
    noticed_s = min([gone_on_s, *(at_s for times in thrown for at_s in times)])
    return {"notice": noticed_s - fault_s, DISCARDED: median([float(len(times)) for times in thrown])}


def once(job: Job, fault: str, victims: Sequence[RankProcess]) -> dict[str, float]:
    """Let ranks have a fault; return the times after it, in seconds, once all have ended well."""
    left = [each for each in job.all if each not in victims]
    fault_s = hit(job, fault, victims)
    try:
        back = job.start(victims[0].place) if fault == "back" else None
        steps = job.go_on(left, [each.rank() for each in victims], fault_s)
        found = {
            "step": max(times[0] for times in steps) - fault_s,
            "next_step": max(times[1] for times in steps) - fault_s,
        }
        if job.torchft:  # it would let a process come back that was lost for some time
            victims[0].close()
            job.finish(left)
            return torchft_noticed(left, fault_s, min(times[0] for times in steps)) | found
        found = {"notice": noticed_s(left, fault_s)} | found
        if back:
            return found | come_back(job, left, back, fault_s + found["next_step"])
        mend(job, fault, victims)
        why = GONE_ON if fault in ("stop", "link") else ""
        if fault != "kill":
            found["left_out"] = max(job.is_left_out(each, fault_s, why) for each in victims)
        job.finish(left)
    finally:
        mend(job, fault, victims, finally_=True)
    return found


def come_back(job: Job, left: Sequence[RankProcess], back: RankProcess, since_s: float) -> dict[str, float]:
    """Wait until a process takes part that was started again, and until all have ended well; return its times.

    The longest step of the others is one after ``since_s``, when they had gone on.
    """
    everyone = [*left, back]
    job.wait(lambda: len(back.notes("step")) >= SETTLING_STEPS, GO_ON_S, "let it in", everyone)
    job.finish(everyone)
    admitted_s = back.at_s("step")
    longest, usual = [], []
    for each in left:
        times = [note["at_s"] for note in each.notes("step")]
        lengths = [(later, later - earlier) for earlier, later in pairwise(times)]
        longest.append(max(length for at_s, length in lengths if since_s < at_s < admitted_s + 1))
        usual.append(median([length for _, length in lengths]))
    return {
        "back": admitted_s - back.began_s,
        "python": back.at_s("python") - back.began_s,
        "imported": back.at_s("imported") - back.began_s,
        "longest_step": max(longest),
        "usual_step": median(usual),
    }


def measure(fault: str, ranks: int, hosts: Hosts, arguments: argparse.Namespace, folder: Path) -> list[BenchResult]:
    """Return the times of a fault over the tries.

    Raises
    ------
    FailedError
        Some tries failed; it has the times of the others.
    """
    draw, name = random.Random(f"{arguments.seed} {fault} {ranks}"), f"elastic.{fault}.n{ranks}"
    found, failed = dict[str, list[float]](), dict[str, str]()
    for number in range(1, arguments.tries + 1):
        count = ranks // 2 if fault == "cut" else 1
        chosen, moment_s = draw.sample(range(ranks), count), draw.uniform(*MOMENT_S)
        about = f"{name} try {number} of {arguments.tries}, rank {', '.join(map(str, sorted(chosen)))}"
        try:
            with Job(hosts, ranks, arguments, folder / f"{fault}-{ranks}-{number}") as job:
                time.sleep(moment_s)
                times = once(job, fault, [job.all[rank] for rank in chosen])
        except TryError as error:
            failed[about] = str(error)
            say(f"{about} FAILED: {error}")
            continue
        say(f"{about}: {', '.join(f'{what} {seconds:.3f} s' for what, seconds in times.items())}")
        for what, seconds in times.items():
            found.setdefault(what, []).append(seconds)
    results = [
        result(
            f"{name}.{what}",
            "steps" if what == DISCARDED else "s",
            times,
            details=extremes(times) | {"failed": len(failed)},
        )
        for what, times in found.items()
    ]
    if failed:
        raise FailedError(results, failed)
    return results


def extremes(times: Sequence[float]) -> dict[str, Any]:
    """Return the lowest and highest time, how many kept each limit, and all."""
    kept = {f"within_{limit_s:g}_s": sum(each <= limit_s for each in times) for limit_s in LIMITS_S}
    return {
        "lowest": significant(min(times)),
        "highest": significant(max(times)),
        **kept,
        "seconds": [significant(each) for each in times],
    }


def undisturbed_rate(job: Job, seconds: float) -> float:
    """Return the steps a second of a training to which nothing happens for so long."""
    began_s = time.monotonic()
    time.sleep(seconds)
    return rates(job, began_s, time.monotonic())[0]


def beside_rigid(ranks: int, hosts: Hosts, arguments: argparse.Namespace, folder: Path) -> list[BenchResult]:
    """Return the steps a second while nothing happens, with and without ``elastic``, in turn."""
    found: dict[int, list[float]] = {LEAST: [], 0: []}
    for number in range(1, arguments.tries + 1):
        for least, kept in found.items():
            with Job(hosts, ranks, arguments, folder / f"none-{ranks}-{least}-{number}", least=least) as job:
                kept.append(undisturbed_rate(job, UNDISTURBED_S))
        say(f"elastic.none.n{ranks} try {number}: {found[LEAST][-1]:.1f} steps/s, without {found[0][-1]:.1f}")
    return [result(f"elastic.none.n{ranks}", "steps/s", found[LEAST], found[0], smaller_is_better=False)]


# A schedule of faults -------------------------------------------------------------------------------------------------


class Schedule:
    """Faults of a training, one after another, drawn from a seed; ranks that have ended start again.

    No fault comes while just enough ranks take part to go on.

    Parameters
    ----------
    job
        The training, with all ranks there.
    draw
        The faults' source.
    every_s
        The mean time between two faults.

    Attributes
    ----------
    faults
        How many there were, by kind.
    ends
        The last lines of what processes have said that have ended by themselves.
    """

    def __init__(self, job: Job, draw: random.Random, every_s: float) -> None:
        self._job, self._draw, self._every_s = job, draw, every_s
        self.faults, self.ends = Counter[str](), list[str]()
        self.there = list(job.all)
        """The newest process of each rank's host."""
        self._starts: dict[int, float] = {}
        self._outages: list[tuple[float, str, RankProcess]] = []
        self._victims: list[RankProcess] = []
        self._mended_s = 0.0

    def run(self, seconds: float) -> None:
        """Let the faults happen for so long, and wait until all ranks take part again.

        Raises
        ------
        TryError
            The training hangs, or a rank ends by itself.
        """
        self._mended_s = now_s = time.monotonic()
        end_s, give_up_s, fault_s = now_s + seconds, now_s + seconds + START_S, now_s + self._pause_s()
        while now_s < end_s or now_s - self._mended_s < CALM_S or not self._is_complete():
            self._mend(now_s)
            self._start_again(now_s)
            if fault_s < now_s < end_s and self._healthy() > LEAST:
                self._hit(now_s)
                fault_s = now_s + self._pause_s()
            if now_s - self._job.last_step()["at_s"] > HANG_S or now_s > give_up_s:
                why = "hangs" if now_s < give_up_s else f"is not complete {START_S:g} s after the last fault"
                raise self._job.error(f"the training {why}", self.there)
            time.sleep(POLL_S)
            now_s = time.monotonic()

    def _pause_s(self) -> float:
        return self._draw.uniform(0.5, 1.5) * self._every_s

    def _healthy(self) -> int:
        """Return how many ranks take part and have no fault."""
        ranks, faulty = self._job.last_step()["ranks"], [each for _, _, each in self._outages]
        begun = [each for each in self.there if each.runs and each.notes("begun")]
        return sum(each not in faulty and each.rank() in ranks for each in begun)

    def _is_complete(self) -> bool:
        return not self._outages and self._healthy() == len(self.there) == len(self._job.last_step()["ranks"])

    def _hit(self, now_s: float) -> None:
        fault, length_s = self._draw.choice(SCHEDULED), self._draw.uniform(*OUTAGE_S)
        victim = self.there[self._draw.randrange(len(self.there))]
        if not victim.runs or any(each is victim for _, _, each in self._outages):
            return
        self.faults[fault] += 1
        self._victims.append(victim)
        say(f"{fault} process {self._job.all.index(victim)}, rank {victim.rank()}")
        hit(self._job, fault, [victim])
        if fault != "kill":
            self._outages.append((now_s + length_s, fault, victim))

    def _mend(self, now_s: float) -> None:
        for outage in [each for each in self._outages if each[0] < now_s]:
            self._outages.remove(outage)
            self._mended_s, fault, victim = outage
            mend(self._job, fault, [victim])

    def _start_again(self, now_s: float) -> None:
        for place, each in enumerate(self.there):
            if each.runs or any(victim is each for _, _, victim in self._outages):
                continue
            if place not in self._starts:
                self._starts[place] = now_s + RESTART_S
                if each not in self._victims and START_AGAIN not in each.errors():
                    raise self._job.error(f"rank {each.rank()} ends, though nothing was done to it", [each])
                if each.process.returncode > 0:
                    self.ends.append(f"rank {each.rank()}: {each.errors().rpartition(chr(10))[2]}")
                    say(self.ends[-1])
            elif self._starts[place] < now_s:
                del self._starts[place]
                self.there[place] = self._job.start(place)


def rates(job: Job, began_s: float, ended_s: float) -> tuple[float, float]:
    """Return the steps a second of the ranks that took part, in the mean, and their number."""
    steps: dict[int, tuple[float, int]] = {}
    for note in (note for each in job.all for note in each.notes("step") if began_s < note["at_s"] < ended_s):
        # The first that ends a step: one that stood still ends it when it wakes up.
        steps[note["step"]] = min(steps.get(note["step"], (ended_s, 0)), (note["at_s"], len(note["ranks"])))
    times = [began_s, *(at_s for at_s, _ in sorted(steps.values()))]
    counts = [count for _, count in sorted(steps.values())]
    there = sum((later - earlier) * count for (earlier, later), count in zip(pairwise(times), counts, strict=True))
    return sum(counts) / there, there / (times[-1] - began_s)


def memory(processes: Iterable[RankProcess]) -> dict[str, float]:
    """Return how much memory the process occupies that has lived longest, at first and at last."""
    kept = [each.notes("step")[SETTLING_STEPS:] for each in processes]
    notes = max(kept, key=lambda notes: float(notes[-1]["at_s"] - notes[0]["at_s"]) if notes else 0.0)
    megabytes = [significant(notes[place]["resident"] / 1e6) for place in (0, -1)]
    return {"over_s": significant(notes[-1]["at_s"] - notes[0]["at_s"]), "first": megabytes[0], "last": megabytes[1]}


def scheduled(ranks: int, hosts: Hosts, arguments: argparse.Namespace, folder: Path) -> list[BenchResult]:
    """Return the throughput of ranks that take part in a training with a schedule of faults.

    Raises
    ------
    TryError
        The training hung, or its ranks have not ended equal.
    """
    seconds = min(UNDISTURBED_S, arguments.schedule)
    with Job(hosts, ranks, arguments, folder / f"undisturbed-{ranks}") as job:
        undisturbed = undisturbed_rate(job, seconds)
    with Job(hosts, ranks, arguments, folder / f"schedule-{ranks}") as job:
        schedule = Schedule(job, random.Random(f"{arguments.seed} schedule {ranks}"), arguments.every)
        began_s = time.monotonic()
        try:
            schedule.run(arguments.schedule)
            disturbed, there = rates(job, began_s, began_s + arguments.schedule)
            time.sleep(MOMENT_S[0])
            occupied = memory(schedule.there)
            job.finish(schedule.there)
        finally:
            hosts.set_links(range(ranks), "up")
    details = {
        "faults": dict(schedule.faults),
        "seconds": arguments.schedule,
        "processes": len(job.all),
        "mean_ranks": significant(there),
        "steps_per_s": significant(disturbed),
        "undisturbed_steps_per_s": significant(undisturbed),
        "percent_of_all_ranks": significant(100 * disturbed * there / undisturbed / ranks),
        "resident_megabytes": occupied,
        "ends": schedule.ends,
    }
    name, share = f"elastic.schedule.n{ranks}", 100 * disturbed / undisturbed
    return [BenchResult(name, share, "% of the throughput without faults", None, None, 1, 0.0, details)]


# Accuracy -------------------------------------------------------------------------------------------------------------


def accuracy_of(task: str, seed: int, kills: int, hosts: Hosts, arguments: argparse.Namespace, folder: Path) -> float:
    """Train a task while ranks are killed, one after another, and start again; return its accuracy in percent.

    Raises
    ------
    TryError
        The ranks that are left do not end well, and with equal parameters.
    """
    draw = random.Random(f"{arguments.seed} {task} {seed}")
    program = ["tests.bench.elastic_learner", task, str(seed), str(arguments.pause_ms / 1e3)]
    with Job(hosts, LEARNERS, arguments, folder, program) as job:
        there, steps = list(job.all), job.all[0].notes("begun")[0]["steps"]
        for moment in sorted(draw.sample(range(SETTLING_STEPS, round(KILLS_UNTIL * steps)), kills)):
            job.wait(partial(_is_whole_at, job, moment), LEFT_OUT_S, f"reach step {moment} with all ranks", there)
            victim = draw.choice([each for each in there if each.notes("step")])
            hit(job, "kill", [victim])
            there[there.index(victim)] = job.start(victim.place)
        job.wait(lambda: any(each.notes("end") for each in there), LEFT_OUT_S, "end", [])
        ended = [each for each in there if each.notes("begun")]
        job.check_ends(ended)
        (accuracy,) = [note["accuracy"] for each in ended for note in each.notes("end") if note["accuracy"] is not None]
    return 100 * float(accuracy)


def _is_whole_at(job: Job, moment: int) -> bool:
    """Return whether a training with all ranks has come to a step."""
    latest = job.last_step()
    return bool(latest["step"] >= moment and len(latest["ranks"]) == LEARNERS)


def accuracies(task: str, hosts: Hosts, arguments: argparse.Namespace, folder: Path) -> list[BenchResult]:
    """Return by how many points the accuracy of disturbed trainings differs from that of undisturbed ones."""
    name, found = f"elastic.accuracy.{task}", dict[int, list[float]]()
    for seed in range(1, arguments.tries + 1):
        for kills in (0, KILLS):
            percent = accuracy_of(task, seed, kills, hosts, arguments, folder / f"{task}-{seed}-{kills}")
            say(f"{name} seed {seed}, {kills} kills: {percent:.2f} %")
            found.setdefault(kills, []).append(percent)
    differences = [after - before for before, after in zip(found[0], found[KILLS], strict=True)]
    details = {"kills": KILLS, "undisturbed_percent": found[0], "disturbed_percent": found[KILLS]}
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    points = statistics.mean(differences)
    return [BenchResult(name, points, "points", None, None, len(differences), error, details)]


def _faults(arguments: argparse.Namespace) -> Sequence[str]:
    """Return the faults to measure one by one.

    Raises
    ------
    BenchError
        Options do not go together.
    """
    faults = arguments.fault or ([] if arguments.schedule or arguments.accuracy else FAULTS)
    if arguments.loopback and (arguments.schedule or set(faults) - LOOPBACK_FAULTS):
        raise BenchError("the loopback has no links: with --loopback, give --fault kill, stop, back or none")
    if arguments.torchft and (arguments.accuracy or set(faults) - set(FAULTS)):
        raise BenchError(f"--torchft goes with --schedule, and with --fault {', '.join(FAULTS)}")
    return faults


def _measure(arguments: argparse.Namespace) -> list[BenchResult]:
    faults = _faults(arguments)
    # Its handlers of forks would let some children abort before they become the command.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    results, failed = list[BenchResult](), dict[str, str]()
    with scratch() as temporary, Hosts(max(LEARNERS, *arguments.ranks), loopback=arguments.loopback) as hosts:
        folder = arguments.keep or temporary
        work: dict[str, Callable[[Hosts, argparse.Namespace, Path], list[BenchResult]]] = {}
        for ranks in arguments.ranks:
            for fault in faults:
                what = partial(beside_rigid, ranks) if fault == "none" else partial(measure, fault, ranks)
                work[f"{fault} of {ranks} ranks"] = what
        if arguments.schedule:
            work |= {f"schedule of {ranks} ranks": partial(scheduled, ranks) for ranks in arguments.ranks}
        work |= {f"accuracy of {task}": partial(accuracies, task) for task in arguments.accuracy}
        for name, each in work.items():
            try:
                results += each(hosts, arguments, folder)
            except FailedError as error:
                results += error.results
                failed |= error.failed
            except TryError as error:
                failed[name] = str(error)
    if failed:
        raise FailedError(results, failed)
    return results


BENCHMARK: Final = Benchmark(
    _measure,
    {
        "--fault": {
            "nargs": "+",
            "choices": [*FAULTS, "back", "cut", "none"],
            "help": f"what happens to a rank (default: {' '.join(FAULTS)})",
        },
        "--ranks": {"type": int, "nargs": "+", "default": [4, 8], "metavar": "N", "help": "that train (default: 4 8)"},
        "--tries": int_option(20, "of each fault"),
        "--megabytes": float_option(1.0, "of gradients", MEGABYTES, "MB"),
        "--schedule": float_option(0.0, "seconds of many faults, instead of or after these", SECONDS, "SECONDS"),
        "--every": float_option(8.0, "mean seconds between two of its faults", DURATIONS, "SECONDS"),
        "--pause-ms": float_option(10.0, "that a step computes", DURATIONS, "MS"),
        "--seed": int_option(SEED, "of ranks and moments", least=0),
        "--loopback": {
            "action": "store_true",
            "help": "all ranks on this host, through memory: kill, stop, back and none",
        },
        "--accuracy": {
            "nargs": "+",
            "default": [],
            "choices": ["digits", "text"],
            "help": f"learn these tasks instead, or after these, with and without {KILLS} kills; --tries are seeds",
        },
        "--torchft": float_option(0.0, "seconds that torchft may take to notice; trains with it instead", SECONDS, "S"),
        "--keep": {"type": Path, "metavar": "FOLDER", "help": "where to keep what ranks write"},
    },
    root=True,
)
