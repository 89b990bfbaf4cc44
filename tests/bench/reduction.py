# SPDX-License-Identifier: Apache-2.0
"""All-reduce of one large buffer: DLCP's against Gloo's, by the same processes, in turns, over the same path.

The input is whole numbers, so that every sum is exact and every result can be checked to the bit. Gloo may run as one
operation or in buckets of the size that DDP makes, and over each TCP congestion control; its best is what counts.
"""

import resource
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import FileStore, PrefixStore  # torch.distributed has them too, untyped

from dlcp.bench import BenchResult, significant
from dlcp.collectives import Bucket, DirectAllReduce, RankContext, ReduceOptions
from dlcp.transport import (
    Address,
    DeadlineError,
    Endpoint,
    LossBound,
    Membership,
    TransportError,
    TransportOptions,
    bind_socket,
    shared_memory,
)
from dlcp.transport.path_mtu import payload_for_mtu
from dlcp.transport.shared_memory import SharedMemory, SharedMemoryRendezvous
from dlcp.values.dtypes import ValueType
from dlcp.values.planes import FULL_BITS
from dlcp.values.tags import Layer, Segment
from tests.bench.harness import VALUE_BYTES, Samples, Turns, against_best, scratch
from tests.bench.paths import BenchPath
from tests.bench.ranks import Ranks

_LAYERS: Final = 48
LARGEST_VALUE: Final = 1000
"""Of the magnitudes; small enough that sums over ranks are exact in float32."""
ERROR_MAX: Final = 0.25
"""The largest ``error`` of results that were rounded: it is 0.2 at 4 bits."""
_SPREAD: Final = 200
"""Standard deviation of the last layer's values; the first has a hundredth of it, as gradients differ by layer."""
_BUCKETS: Final = 4
"""Into how many buckets the buffer is divided where it is: of 100 MB, each has DDP's 25."""
_BOUND: Final = 0.1
_RUN_DEADLINE_S: Final = 100.0
_MEET_S: Final = 10.0
LOSSY: Final = "dlcp"
LOSSLESS: Final = "dlcp, bound 0"
DIVIDED: Final = f"dlcp, {_BUCKETS} buckets"
MEMORY: Final = "dlcp through memory"
MEMORY_DIVIDED: Final = f"dlcp through memory, {_BUCKETS} buckets"


@dataclass(frozen=True, slots=True)
class AllReduceContender:
    """A way to do the all-reduce: by DLCP with a loss ``bound``, or by Gloo over TCP with a congestion ``control``.

    DLCP's packets go through sockets, or through ``memory``. Its values have ``bits`` bits.
    """

    name: str
    buckets: int
    bound: float | None = None
    control: str | None = None
    memory: bool = False
    bits: int = FULL_BITS


def contenders(controls: Sequence[str], *, memory: bool = False) -> tuple[AllReduceContender, ...]:
    """Return DLCP with and without a loss bound, and Gloo's settings over each congestion control.

    With ``memory`` also DLCP as it is between ranks that share some.
    """
    gloo = [
        AllReduceContender(f"gloo, {control}, {words}", buckets, control=control)
        for control in controls
        for buckets, words in ((1, "one tensor"), (_BUCKETS, f"{_BUCKETS} buckets"))
    ]
    ours = [
        AllReduceContender(LOSSY, 1, bound=_BOUND),
        AllReduceContender(DIVIDED, _BUCKETS, bound=_BOUND),
        AllReduceContender(LOSSLESS, 1, bound=0),
    ]
    if memory:
        ours += [
            AllReduceContender(MEMORY, 1, bound=_BOUND, memory=True),
            AllReduceContender(MEMORY_DIVIDED, _BUCKETS, bound=_BOUND, memory=True),
        ]
    return *ours, *gloo


@dataclass(frozen=True, slots=True)
class AllReducePlan:
    """The settings that all ranks of a measurement share.

    Parameters
    ----------
    ranks, values
        How many ranks there are, and how many float32 values they average.
    payload_bytes
        Of a DLCP packet.
    controls
        The TCP congestion controls that Gloo is measured with, and each rank's address for them.
    addresses
        Each rank's address for DLCP.
    store
        Path of the file by which Gloo's ranks find each other.
    contenders The contenders to compare.
    """

    ranks: int
    values: int
    payload_bytes: int
    controls: dict[str, list[str]]
    addresses: list[str]
    store: str
    contenders: tuple[AllReduceContender, ...]


class RankAddresses(NamedTuple):
    """Where a rank is: its addresses, by whether there is memory beside, and the name of its rendezvous, or ``""``."""

    addresses: dict[bool, Address]
    rendezvous: str


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """A rank's check of the result of a run.

    ``inexact`` values are not the exact result, ``error`` is the norm of the difference relative to that of the result,
    and ``checksum`` is that of all values.
    """

    inexact: int
    checksum: int
    ledger: dict[str, int]
    error: float = 0.0


class RunCost(NamedTuple):
    """The cost of a run on one rank: its time, and processor time in user space and in the kernel, all in seconds."""

    seconds: float
    user_s: float
    system_s: float


class AllReduceRank:
    """A rank of the measurement, in a process of its own."""

    def __init__(self, rank: int, plan: AllReducePlan) -> None:
        torch.set_num_threads(1)
        self.rank, self.plan = rank, plan
        self._input = whole_numbers(plan.values)
        self._values = np.empty_like(self._input)
        self._tensor = torch.from_numpy(self._values)
        self._gloo = {control: self._group(control, hosts[rank]) for control, hosts in plan.controls.items()}
        # Of the two endpoints only one has something to do at a time; the other one's thread sleeps.
        ways = {contender.memory for contender in plan.contenders if contender.bound is not None}
        self._sockets = {memory: bind_socket(plan.addresses[rank], [0]) for memory in sorted(ways)}
        self._rendezvous = SharedMemoryRendezvous() if True in ways else None
        self._endpoints: dict[bool, Endpoint] = {}
        """By whether packets go through memory."""
        self._reducers: dict[str, DirectAllReduce] = {}
        self._step = 0

    def where(self) -> RankAddresses:
        """Return where the others find this rank."""
        addresses = {memory: sock.getsockname() for memory, sock in self._sockets.items()}
        return RankAddresses(addresses, self._rendezvous.name if self._rendezvous else "")

    def join(self, places: Sequence[RankAddresses], token: int) -> None:
        """Meet the other ranks.

        Raises
        ------
        TransportError
            They were to share memory, and do not.
        """
        peers = {rank: place for rank, place in enumerate(places) if rank != self.rank}
        shared: SharedMemory | None = None
        if self._rendezvous:
            names = {rank: place.rendezvous for rank, place in peers.items()}
            with self._rendezvous:
                shared = self._rendezvous.connect(self.rank, names, job=0, token=token, timeout_s=_MEET_S)
            if shared.ranks != names.keys():
                raise TransportError(f"rank {self.rank} shares memory only with ranks {sorted(shared.ranks)}")
        options = TransportOptions(payload_bytes=self.plan.payload_bytes)
        for memory, sock in self._sockets.items():
            addresses = {rank: place.addresses[memory] for rank, place in peers.items()}
            rings = shared if memory else None
            members = Membership(self.rank, addresses, token=token)
            endpoint = Endpoint(members, sock, options=options, shared=rings)
            self._endpoints[memory] = endpoint
            endpoint.greet()
        for contender in self.plan.contenders:
            if contender.bound is not None:
                self._reducers[contender.name] = DirectAllReduce(
                    RankContext(
                        self._endpoints[contender.memory].connection,
                        range(self.plan.ranks),
                        ReduceOptions(LossBound(contender.bound)),
                    )
                )

    def prepare(self, contender: AllReduceContender) -> None:
        """Write this rank's input: the common numbers times its number from 1."""
        np.multiply(self._input, np.float32(self.rank + 1), out=self._values)
        if contender.bound is not None and contender.bits == FULL_BITS:
            # What an earlier run lost would be added to this one's input: reset, so that sums stay known. What was
            # rounded is kept, as in training, since adding it is part of the cost.
            self._reducers[contender.name].context.residual.reset()

    def run(self, contender: AllReduceContender) -> RunCost:
        """Do the all-reduce and return its cost."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds = self._run(contender)
        after = resource.getrusage(resource.RUSAGE_SELF)
        return RunCost(seconds, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)

    def _run(self, contender: AllReduceContender) -> float:
        ends = bucket_bounds(self.plan.values, contender.buckets)
        layers = [segments(self.plan.values, start, stop) for start, stop in ends]
        began_s = time.perf_counter()
        if contender.control is not None:
            group = self._gloo[contender.control]
            works = [group.allreduce([self._tensor[start:stop]], dist.AllreduceOptions()) for start, stop in ends]
            for work in works:
                work.wait()
            return time.perf_counter() - began_s
        reducer = self._reducers[contender.name]
        self._step += 1
        reducer.begin_step(self._step, contender.bits)
        running = []
        for sequence, (start, stop) in enumerate(ends):
            bucket = Bucket(self._values[start:stop], ValueType.FLOAT32, layers[sequence])
            running.append(reducer.start(self._step, sequence, bucket))
        for future in running:
            future.result(_RUN_DEADLINE_S)
        return time.perf_counter() - began_s

    def outcome(self, contender: AllReduceContender) -> RankOutcome:
        """Compare the result with the exact one, once the peers have confirmed this rank's, so that it is counted."""
        ranks = self.plan.ranks
        for endpoint in self._endpoints.values():
            if not endpoint.flush(_RUN_DEADLINE_S):
                raise DeadlineError(
                    f"rank {self.rank}: {contender.name}: a result unconfirmed for {_RUN_DEADLINE_S:.0f} s"
                )
        exact = np.float32(ranks * (ranks + 1) / 2 / (1 if contender.bound is None else ranks))
        expected = self._input * exact
        inexact = int(np.count_nonzero(self._values != expected))
        error = float(np.linalg.norm(self._values - expected) / np.linalg.norm(expected))
        reducer = self._reducers.get(contender.name)
        ledger = reducer.context.ledger.summary() if reducer else {}
        counts = {name: ledger.get(name, 0) for name in ("sent", "delivered", "lost", "retransmitted")}
        by_bits = ledger.get("by_bits", {})
        counts["encoded"] = sum(packets for bits, (packets, _) in by_bits.items() if int(bits) < FULL_BITS)
        return RankOutcome(inexact, zlib.crc32(self._values.view(np.uint8).data), counts, error)

    def close(self) -> None:
        """Leave the other ranks."""
        for endpoint in self._endpoints.values():
            endpoint.close()

    def _group(self, control: str, host: str) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # its types leave out most of what it has
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=_RUN_DEADLINE_S)
        store = PrefixStore(control, FileStore(self.plan.store, self.plan.ranks))
        return gloo(store, self.rank, self.plan.ranks, options)


def whole_numbers(count: int, seed: int = 1) -> NDArray[np.float32]:
    """Return ``count`` whole numbers, normally distributed within each layer, float32."""
    numbers = np.random.default_rng(seed).standard_normal(count, np.float32)
    bounds = layer_bounds(count)
    for (start, stop), scale in zip(bounds, np.geomspace(_SPREAD / 100, _SPREAD, len(bounds)), strict=True):
        numbers[start:stop] *= np.float32(scale)
    np.rint(numbers, out=numbers)
    return np.clip(numbers, -LARGEST_VALUE, LARGEST_VALUE, out=numbers)


def layer_bounds(values: int) -> list[tuple[int, int]]:
    """Return where the layers begin and end: all of one size, and the last one with the remainder.

    Raises
    ------
    ValueError
        There are fewer values than layers.
    """
    size = values // _LAYERS
    if not size:
        raise ValueError(f"{values} values cannot be divided into {_LAYERS} layers")
    return [(i * size, (i + 1) * size if i < _LAYERS - 1 else values) for i in range(_LAYERS)]


def bucket_bounds(values: int, buckets: int) -> list[tuple[int, int]]:
    """Return where the buckets begin and end: each has as many layers, so ``buckets`` has to divide their number."""
    layers = layer_bounds(values)
    each = _LAYERS // buckets
    return [(layers[i * each][0], layers[(i + 1) * each - 1][1]) for i in range(buckets)]


def segments(values: int, start: int, stop: int) -> list[Segment]:
    """Return the layers of the bucket from ``start`` to ``stop`` in a buffer of ``values``, in places of the bucket."""
    return [
        Segment(Layer(f"layer{number}.weight", round(number * 255 / (_LAYERS - 1))), first - start, last - start)
        for number, (first, last) in enumerate(layer_bounds(values))
        if start <= first and last <= stop
    ]


class WrongResultError(RuntimeError):
    """An all-reduce gave a wrong result; the message says which and by how much."""


@dataclass(slots=True)
class AllReduceTimes:
    """The times of all contenders, in ms, and what DLCP's packets came to over all runs.

    ``costs`` are those of each rank, run by run, warm-ups included. ``inexact`` are values that differed from the exact
    average, on any rank, by contender; ``path_loss`` is the share of packets that the path lost on purpose.
    """

    contenders: Sequence[AllReduceContender]
    path: str
    samples: Samples = field(default_factory=dict)
    costs: dict[str, list[list[RunCost]]] = field(default_factory=dict)
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
            "ours": contender,
            "through": "memory" if contender in (MEMORY, MEMORY_DIVIDED) else "sockets",
            "path_loss": significant(self.path_loss),
            "packets": self.ledgers[contender],
            "gradients_changed": self.inexact[contender],
        }


def measure(
    path: BenchPath,
    values: int,
    turns: Turns,
    *,
    ways: Sequence[AllReduceContender] | None = None,
    mtu_bytes: int = 1500,
    beside: Mapping[str, Callable[[], float]] | None = None,
    all_stay: bool = False,
) -> AllReduceTimes:
    """Time every contender in turns over a path.

    Parameters
    ----------
    path
        Joins as many ranks as take part.
    values
        How many float32 values are averaged.
    turns
        With a budget, settings of Gloo that are far behind leave, unless ``all_stay``.
    ways
        The contenders to compare; by default all, see :func:`contenders`.
    mtu_bytes
        DLCP's packets are as large as fits it.
    beside
        Further participants in the turns, by name; their samples are what they return.

    Raises
    ------
    WrongResultError
        A result was not what it has to be.
    RankError
        A rank failed.
    """
    count = len(path.namespaces)
    memory = len(set(path.namespaces)) == 1 and shared_memory.supported()
    with scratch() as folder:
        plan = AllReducePlan(
            count,
            values,
            payload_for_mtu(mtu_bytes),
            {control: [path.tcp_address(rank, control) for rank in range(count)] for control in path.controls},
            [path.address(rank) for rank in range(count)],
            str(folder / "store"),
            tuple(contenders(path.controls, memory=memory) if ways is None else ways),
        )
        found = AllReduceTimes(plan.contenders, path.words)
        with Ranks(AllReduceRank, [plan], path.namespaces) as ranks:
            ranks.call("join", ranks.call("where"), secrets.randbits(63) | 1)
            runs: dict[str, Callable[[], float]] = {
                contender.name: partial(_run_once, ranks, plan, contender, found) for contender in plan.contenders
            }
            runs |= beside or {}
            before = path.dropped()
            may_leave = [] if all_stay else [way.name for way in plan.contenders if way.control]
            found.samples = turns.take(runs, may_leave)
            passed, lost = (now - then for now, then in zip(path.dropped(), before, strict=True))
            found.path_loss = lost / passed if passed else 0.0
    return found


def _run_once(ranks: Ranks, plan: AllReducePlan, contender: AllReduceContender, found: AllReduceTimes) -> float:
    """Return the time of the slowest rank in ms, once the result has been checked."""
    ranks.call("prepare", contender)
    costs: list[RunCost] = ranks.call("run", contender)
    found.costs.setdefault(contender.name, []).append(costs)
    outcomes: list[RankOutcome] = ranks.call("outcome", contender)
    total = {name: sum(outcome.ledger[name] for outcome in outcomes) for name in outcomes[0].ledger}
    before = found.ledgers.get(contender.name, dict.fromkeys(total, 0))
    missing = total["lost"] - before["lost"]
    found.ledgers[contender.name] = total
    rounded = total["encoded"] > before["encoded"]
    excused = plan.values if rounded else missing * plan.payload_bytes // VALUE_BYTES
    error = max(outcome.error for outcome in outcomes)
    if rounded and error > ERROR_MAX:
        raise WrongResultError(f"{contender.name}: the result is off by {error:.0%}, more than rounding explains")
    inexact = check(contender.name, outcomes, excused)
    found.inexact[contender.name] = found.inexact.get(contender.name, 0) + inexact
    return 1e3 * max(cost.seconds for cost in costs)


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
        raise WrongResultError(f"{name}: {inexact} values are inexact, and missing packets excuse {excused}")
    if len(set(checksums)) > 1:
        raise WrongResultError(f"{name}: the ranks have different results, their checksums are {checksums}")
    return inexact
