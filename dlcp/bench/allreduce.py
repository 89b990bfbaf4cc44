# SPDX-License-Identifier: Apache-2.0
"""All-reduce of one large buffer: DLCP's against Gloo's, by the same processes, in turns, over the same path.

The input is whole numbers, so that every sum is exact and every result can be checked to the bit. Gloo may run as one
operation or in buckets of the size that DDP makes, and over each TCP congestion control; its best is what counts.
"""

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as File
from typing import Any, Final

from dlcp.bench.member import (
    DIVIDED,
    LOSSLESS,
    LOSSY,
    MEMORY,
    MEMORY_DIVIDED,
    AllReduceContender,
    AllReducePlan,
    AllReduceRank,
    RankOutcome,
    contenders,
)
from dlcp.bench.path import BenchPath
from dlcp.bench.ranks import Ranks
from dlcp.bench.results import BenchResult, Samples, against_best, interleave, significant
from dlcp.transport import shared_memory
from dlcp.transport.path_mtu import payload_for_mtu

_VALUE_BYTES: Final = 4


class WrongResultError(RuntimeError):
    """An all-reduce came to a result that it should not have; the message says which and by how much."""


@dataclass(slots=True)
class AllReduceTimes:
    """The times of all contenders, in ms, and what DLCP's packets came to over all runs.

    ``inexact`` are values that differed from the exact average, on any rank, by contender; ``path_loss`` is the share
    of packets that the path lost on purpose.
    """

    contenders: Sequence[AllReduceContender]
    path: str
    samples: Samples = field(default_factory=dict)
    inexact: dict[str, int] = field(default_factory=dict)
    ledgers: dict[str, dict[str, int]] = field(default_factory=dict)
    path_loss: float = 0.0

    def results(self, name: str, controls: Sequence[str] | None = None) -> list[BenchResult]:
        """Return ``name`` and ``name.buckets``, which are as DLCP is by default there, against the best of Gloo.

        That is through memory where ranks share some; then ``name.sockets``, ``name.sockets.reliable`` and
        ``name.sockets.buckets`` are as between hosts. Elsewhere there is ``name.reliable`` beside. Only Gloo over the
        given congestion controls counts.
        """
        ours_by_name, through_sockets = {}, name
        if MEMORY in self.samples:
            ours_by_name = {name: MEMORY, f"{name}.buckets": MEMORY_DIVIDED}
            through_sockets = f"{name}.sockets"
        ours_by_name |= {
            through_sockets: LOSSY,
            f"{through_sockets}.reliable": LOSSLESS,
            f"{through_sockets}.buckets": DIVIDED,
        }
        peers = [c.name for c in self.contenders if c.control and (controls is None or c.control in controls)]
        return [
            against_best(result_name, "ms", self.samples, ours, peers, self._details(ours))
            for result_name, ours in ours_by_name.items()
            if ours in self.samples
        ]

    def _details(self, contender: str) -> dict[str, Any]:
        return {
            "path": self.path,
            "through": "memory" if contender in (MEMORY, MEMORY_DIVIDED) else "sockets",
            "path_loss": significant(self.path_loss),
            "packets": self.ledgers[contender],
            "gradients_changed": self.inexact[contender],
        }


def measure(
    path: BenchPath,
    *,
    values: int,
    ways: Sequence[AllReduceContender] | None = None,
    mtu_bytes: int = 1500,
    rounds: int = 9,
    warm_up: int = 2,
    seed: int = 1,
    progress: Callable[[str], None] | None = None,
) -> AllReduceTimes:
    """Time every contender in turns over a path.

    Parameters
    ----------
    path
        Joins as many ranks as take part.
    values
        How many float32 values are averaged.
    ways
        What is compared; by default everything, see :func:`dlcp.bench.member.contenders`.
    mtu_bytes
        DLCP's packets are as large as fits it.
    rounds, warm_up, seed, progress
        See :func:`dlcp.bench.results.interleave`.

    Raises
    ------
    WrongResultError
        A result was not what it has to be.
    RankError
        A rank failed.
    """
    count = len(path.namespaces)
    memory = len(set(path.namespaces)) == 1 and shared_memory.available()
    with tempfile.TemporaryDirectory(prefix="dlcp-bench-") as folder:
        plan = AllReducePlan(
            count,
            values,
            payload_for_mtu(mtu_bytes),
            {control: [path.tcp_address(rank, control) for rank in range(count)] for control in path.controls},
            [path.address(rank) for rank in range(count)],
            str(File(folder) / "store"),
            tuple(contenders(path.controls, memory=memory) if ways is None else ways),
        )
        found = AllReduceTimes(plan.contenders, path.words)
        with Ranks(AllReduceRank, [plan], path.namespaces) as ranks:
            ranks.call("join", ranks.call("where"), secrets.randbits(63) | 1)
            runs = {contender.name: partial(_run_once, ranks, plan, contender, found) for contender in plan.contenders}
            before = path.dropped()
            found.samples = interleave(runs, rounds=rounds, warm_up=warm_up, seed=seed, progress=progress)
            passed, lost = (now - then for now, then in zip(path.dropped(), before, strict=True))
            found.path_loss = lost / passed if passed else 0.0
    return found


def _run_once(ranks: Ranks, plan: AllReducePlan, contender: AllReduceContender, found: AllReduceTimes) -> float:
    """Return the time of the slowest rank in ms, once the result has been checked."""
    ranks.call("prepare", contender)
    slowest_s: float = max(ranks.call("run", contender))
    outcomes: list[RankOutcome] = ranks.call("outcome", contender)
    total = {name: sum(outcome.ledger[name] for outcome in outcomes) for name in outcomes[0].ledger}
    lost = total["lost"] - found.ledgers.get(contender.name, total | {"lost": 0})["lost"]
    found.ledgers[contender.name] = total
    inexact = check(contender.name, outcomes, lost * plan.payload_bytes // _VALUE_BYTES)
    found.inexact[contender.name] = found.inexact.get(contender.name, 0) + inexact
    return 1e3 * slowest_s


def check(name: str, outcomes: Sequence[RankOutcome], excused: int) -> int:
    """Return how many values are not the exact result, on the rank that has most of them.

    Parameters
    ----------
    name
        Of the contender, for messages.
    outcomes
        What the ranks found.
    excused
        How many values may differ: those in packets that the ledger counts as lost.

    Raises
    ------
    WrongResultError
        More differ, or the ranks have not got the same.
    """
    inexact = max(outcome.inexact for outcome in outcomes)
    checksums = [outcome.checksum for outcome in outcomes]
    if inexact > excused:
        raise WrongResultError(f"{name}: {inexact} values are not the exact result, and lost packets excuse {excused}")
    if len(set(checksums)) > 1:
        raise WrongResultError(f"{name}: the ranks have different results, their checksums are {checksums}")
    return inexact
