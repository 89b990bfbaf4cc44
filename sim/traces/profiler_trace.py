# SPDX-License-Identifier: Apache-2.0
"""Read a job's own trace: PyTorch's profiler (Chrome events, one file per rank), or ``dlcp train --trace``.

A rank's main thread is replayed with the durations that it had, except the time in which it waited for a collective:
that is simulated. A collective begins where it began in the trace, and the thread continues after a wait when the
collectives that ended during it have ended. So a slower or faster network moves what depended on it, and nothing else.

- **PyTorch.** On a GPU, the main thread is what its kernels do besides communication; on a CPU, the thread that has the
  steps. Waiting is a gap in which a collective ends. Steps are those of ``torch.profiler``'s schedule.
- **DLCP.** A bucket is an all-reduce from when it is ready; tagging before it, and summing and applying, here after it,
  take the time that they took. Waiting is taken from the trace. A step lasts from its first gradient to that of the
  next step.
"""

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from dlcp.inputs.document import refusal
from dlcp.sim.arithmetic import PS_PER_US
from dlcp.sim.limits import SECONDS_MAX, SIZE_BYTES_MAX, HostNumber, Hosts
from dlcp.sim.traces.operations import (
    ALWAYS_EAGER,
    NO_PROCESSOR,
    OperationKind,
    RankOperation,
    TraceAlgorithm,
    TracedCollective,
    TraceFormatError,
    Workload,
)
from dlcp.values.planes import FULL_BITS

Event = Mapping[str, Any]
_COLLECTIVES: Final[dict[str, TracedCollective]] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
"""By the name in the trace without underscores. The first that it contains counts."""
_BYTES: Final = {
    **dict.fromkeys(("bool", "byte", "char", "uint8", "int8", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16", "short", "c10::half", "c10::bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("double", "long", "long int", "float64", "int64"), 8),
}
"""Bytes of a value by the profiler's names for its type, in small letters."""
_KERNELS: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_READ: Final = (*_KERNELS, "user_annotation", "cpu_op")
"""Categories of the profiler's events that are read."""
_ROUNDING_US: Final = 1.0
"""Overlap of steps that rounding explains: as floats, microseconds since 1970 are multiples of 0.25."""
_MAIN_THREAD: Final = 0
_BUCKET: Final = re.compile(r"bucket (\d{1,9})$")
_T = TypeVar("_T")


# ------------------------------------------------------------------------------------------ the fields that are read

_Moment = Annotated[float, Meta(ge=-(2.0**53), le=2.0**53)]
"""Microseconds since any moment; up to here, a float has all of them."""
_Duration = Annotated[float, Meta(ge=0, le=SECONDS_MAX * 1e6)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Dimension = Annotated[int, Meta(ge=0, le=SIZE_BYTES_MAX)]


class _BucketArguments(msgspec.Struct, frozen=True):
    step: _Number
    bytes: Any = None
    bits: Annotated[int, Meta(ge=1, le=FULL_BITS)] = FULL_BITS
    unfinished: bool = False


class _BucketEvent(msgspec.Struct, frozen=True):
    """A bucket of ``dlcp train --trace``, or a phase of it."""

    pid: Hosts
    tid: _Number
    name: str
    ts: _Moment
    dur: _Duration
    args: _BucketArguments


class _WaitId(msgspec.Struct, frozen=True):
    local: str | int


class _WaitEvent(msgspec.Struct, frozen=True):
    """The beginning or the end of a wait of ``dlcp train --trace``."""

    pid: Hosts
    ph: Literal["b", "e"]
    ts: _Moment
    id2: _WaitId


class _ProfileEvent(msgspec.Struct, frozen=True):
    """A slice of PyTorch's profiler."""

    name: str
    ts: _Moment
    dur: _Duration
    cat: Any
    tid: int | str | None = None
    args: dict[str, Any] | None = None

    @property
    def end(self) -> float:
        """When it ends, in microseconds."""
        return self.ts + self.dur

    @property
    def is_exchange(self) -> bool:
        """Whether it is a collective of NCCL or Gloo."""
        if self.cat in _KERNELS:
            return self.name.startswith("nccl")
        return self.cat == "user_annotation" and self.name.startswith("gloo:")


class _ProfileGroup(msgspec.Struct, frozen=True):
    pg_name: str | int
    ranks: Any = None


class _ProfileAbout(msgspec.Struct, frozen=True):
    rank: HostNumber
    world_size: Hosts = 1
    pg_config: tuple[_ProfileGroup, ...] | None = None


def _as(where: str, value: Any, kind: type[_T] | Any) -> Any:
    """Return a value as a type, or raise TraceFormatError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        place = str(error).partition(" - at `$.")[2].rstrip("`")
        reason = f": {f'{place}: ' if place else ''}{refusal(error, {})}"
        if missing := re.match(r"Object missing required field `(\w+)`", str(error)):
            reason = f" lacks {missing[1]!r}"
        raise TraceFormatError(f"{where}{reason}: {str(value)[:80]}") from None


@dataclass(slots=True)
class _Exchange:
    """A collective of a rank in a trace; times are in microseconds.

    Parameters
    ----------
    before_us, after_us
        Time that the rank spent on it before and after the exchange, outside the main thread.
    """

    name: str
    begin_us: float
    end_us: float
    collective: TracedCollective
    size_bytes: int
    group: tuple[int, ...]
    tag: int = 0
    before_us: float = 0.0
    after_us: float = 0.0


@dataclass(slots=True)
class _RankTrace:
    """A rank's main thread and collectives; times are in microseconds.

    Parameters
    ----------
    place
        For error messages.
    waits
        When the main thread waited, in order.
    steps
        Beginnings of steps, and the end of the last one.
    """

    place: str
    exchanges: list[_Exchange] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def _workload(path: Path, ranks: Sequence[_RankTrace], algorithm: TraceAlgorithm) -> Workload:
    """Return the job of some ranks.

    Raises
    ------
    TraceFormatError
        A step does not begin after the one before, or ranks have different numbers of steps.
    """
    for rank in ranks:
        for number, (begin, end) in enumerate(pairwise(rank.steps)):
            if end <= begin:
                raise TraceFormatError(
                    f"{rank.place}: step {number} ends at {end} us, but begins at {begin} us; the trace is damaged"
                )
    counts = {len(rank.steps) for rank in ranks}
    if len(counts) > 1:
        few = min(range(len(ranks)), key=lambda rank: len(ranks[rank].steps))
        raise TraceFormatError(
            f"{ranks[few].place}: rank {few} has {len(ranks[few].steps) - 1} steps, another rank {max(counts) - 1}; "
            "the trace is incomplete"
        )
    replayed = [_Replay(rank) for rank in ranks]
    steps = [
        [(rank, replay.ends[step]) for rank, replay in enumerate(replayed)] for step in range(len(replayed[0].ends))
    ]
    durations = [[after - before for before, after in pairwise(rank.steps)] for rank in ranks]
    return Workload(
        str(path),
        [replay.operations for replay in replayed],
        steps,
        [fmean(each) / 1e6 for each in zip(*durations, strict=True)],
        eager_bytes=ALWAYS_EAGER,
        algorithm=algorithm,
    )


class _Replay:
    """The operations of a rank, and the one that ends each step."""

    def __init__(self, trace: _RankTrace) -> None:
        self.operations: list[RankOperation] = []
        self.ends: list[int] = []
        self._trace = trace
        self._main: list[int] = []
        """The main thread's last operation, in a list that is empty at first."""
        self._clock_us = trace.steps[0]
        self._done: dict[int, int] = {}
        """The operation that ends an exchange, by the exchange's index."""
        self._awaited: set[int] = set()
        end_us = trace.steps[-1]
        moments = [(each, 1, "step", 0) for each in trace.steps[1:]]
        moments += [(end, 0, "wait", index) for index, (_, end) in enumerate(trace.waits)]
        moments += [(each.begin_us, 2, "exchange", index) for index, each in enumerate(trace.exchanges)]
        # The waits that end at a step's end belong to it.
        for time_us, _, kind, index in sorted(each for each in moments if trace.steps[0] <= each[0] <= end_us):
            if kind == "exchange" and time_us == end_us:
                continue
            self._advance(time_us)
            if kind == "wait":
                self._wait(time_us)
            elif kind == "exchange":
                self._exchange(index)
            else:
                self._main = self._main or [self._compute("begin", 0, [])]
                self.ends.append(self._main[0])

    def _advance(self, until_us: float) -> None:
        """Compute until some time, without the waits before it."""
        waited = sum(max(0.0, min(end, until_us) - max(begin, self._clock_us)) for begin, end in self._trace.waits)
        busy_us = until_us - self._clock_us - waited
        self._clock_us = until_us
        if busy_us > 0:
            self._main = [self._compute("compute", busy_us, self._main, _MAIN_THREAD)]

    def _compute(self, name: str, took_us: float, after: Iterable[int], processor: int = NO_PROCESSOR) -> int:
        number = len(self.operations)
        self.operations.append(
            RankOperation(
                OperationKind.COMPUTE,
                f"{number} ({name})",
                self._trace.place,
                list(after),
                duration_ps=round(took_us * PS_PER_US),
                processor=processor,
            )
        )
        return number

    def _exchange(self, index: int) -> None:
        exchange = self._trace.exchanges[index]
        after = self._main
        if exchange.before_us > 0:
            after = [self._compute(f"before {exchange.name}", exchange.before_us, after)]
        number = len(self.operations)
        self.operations.append(
            RankOperation(
                OperationKind.COLLECTIVE,
                f"{number} ({exchange.name})",
                self._trace.place,
                list(after),
                collective=exchange.collective,
                size_bytes=exchange.size_bytes,
                group=exchange.group,
                peer=exchange.group[0],
                tag=exchange.tag,
            )
        )
        if exchange.after_us > 0:
            number = self._compute(f"after {exchange.name}", exchange.after_us, [number])
        self._done[index] = number

    def _wait(self, until_us: float) -> None:
        """Continue when all exchanges have ended that had ended in the trace."""
        ended = [
            index
            for index in self._done
            if index not in self._awaited and self._trace.exchanges[index].end_us <= until_us
        ]
        if ended:
            self._awaited.update(ended)
            self._main = [self._compute("wait", 0, [*self._main, *(self._done[index] for index in ended)])]


# ---------------------------------------------------------------------------------------------------- DLCP's own traces


def is_dlcp_trace(events: Sequence[Any]) -> bool:
    """Return whether Chrome events are those of ``dlcp train --trace``."""
    return any(isinstance(event, dict) and event.get("cat") == "bucket" for event in events)


def read_dlcp_trace(path: Path, events: Sequence[Any]) -> Workload:
    """Return the job in a trace of ``dlcp train --trace`` or ``dlcp trace``.

    Raises
    ------
    TraceFormatError
        It is incomplete, or of a version of DLCP without the sizes of buckets.
    """
    reader = _DlcpTrace(path)
    for event in events:
        reader.take(event)
    return _workload(path, reader.ranks(), "direct")


class _DlcpTrace:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._buckets: dict[int, dict[tuple[int, int], _BucketEvent]] = defaultdict(dict)
        """Of each rank, its buckets by step and number."""
        self._phases: dict[int, list[_BucketEvent]] = defaultdict(list)
        self._open: dict[tuple[int, Any], float] = {}
        self._waits: dict[int, list[tuple[float, float]]] = defaultdict(list)

    def take(self, event: Any) -> None:
        where = f"{self._path}: an event of DLCP"
        if not isinstance(event, dict):
            raise TraceFormatError(f"{where} has no fields: {str(event)[:80]}")
        if event.get("cat") == "bucket":
            bucket: _BucketEvent = _as(where, event, _BucketEvent)
            if found := _BUCKET.match(bucket.name):
                self._buckets[bucket.pid - 1][bucket.args.step, int(found[1])] = bucket
            else:
                self._phases[bucket.pid - 1].append(bucket)
        elif event.get("cat") == "step" and event.get("name") == "wait":
            wait: _WaitEvent = _as(where, event, _WaitEvent)
            key = wait.pid, wait.id2.local
            if wait.ph == "b":
                self._open[key] = wait.ts
                return
            begin = self._open.pop(key, math.inf)
            if begin > wait.ts:
                raise TraceFormatError(f"{where}: a wait ends that has not begun: {str(event)[:80]}")
            self._waits[wait.pid - 1].append((begin, wait.ts))

    def ranks(self) -> list[_RankTrace]:
        if not self._buckets:
            raise TraceFormatError(f"{self._path}: no rank has buckets; the trace is incomplete")
        count = max(self._buckets) + 1
        missing = [rank for rank in range(count) if rank not in self._buckets]
        if missing:
            raise TraceFormatError(
                f"{self._path}: rank {missing[0]} has no buckets; the trace needs all ranks from 0 to {count - 1}"
            )
        # The first and the last step may be incomplete on a rank that was killed or began late.
        by_rank = [{step for step, _ in self._buckets[rank]} for rank in range(count)]
        steps = sorted(set.intersection(*by_rank))
        if len(steps) < 3:
            raise TraceFormatError(f"{self._path}: its ranks have {len(steps)} steps in common; at least 3 are needed")
        return [self._rank(rank, steps, tuple(range(count))) for rank in range(count)]

    def _rank(self, rank: int, steps: list[int], group: tuple[int, ...]) -> _RankTrace:
        trace = _RankTrace(f"{self._path}: rank {rank}", waits=_joined(self._waits[rank]))
        phases: dict[tuple[int, int], dict[str, _BucketEvent]] = defaultdict(dict)
        for event in self._phases[rank]:
            phases[event.args.step, event.tid][event.name] = event
        first_ready: dict[int, float] = {}
        for (step, number), event in sorted(self._buckets[rank].items()):
            first_ready[step] = min(first_ready.get(step, math.inf), event.ts)
            if step not in steps[:-1]:
                continue
            size = event.args.bytes
            if not isinstance(size, int) or not 1 <= size <= SIZE_BYTES_MAX:
                raise TraceFormatError(
                    f"{trace.place}: bucket {number} of step {step} has no size; record the trace again with this "
                    "version of DLCP"
                )
            if event.args.unfinished:
                raise TraceFormatError(f"{trace.place}: bucket {number} of step {step} never ended")
            own = phases[step, event.tid]
            took_us = {name: phase.dur for name, phase in own.items()}
            bits = own["tag"].args.bits if "tag" in own else FULL_BITS
            # FSDP2's buckets are only scattered, and have no phase to gather them.
            whole = "all-gather" in own or "reduce-scatter" not in own
            trace.exchanges.append(
                _Exchange(
                    f"bucket {number} of step {step}",
                    event.ts,
                    event.ts + event.dur,
                    "all_reduce" if whole else "reduce_scatter",
                    max(1, size * bits // FULL_BITS),
                    group,
                    tag=step << 30 | number,
                    before_us=took_us.get("tag", 0.0),
                    after_us=took_us.get("sum", 0.0) + took_us.get("apply", 0.0),
                )
            )
        trace.exchanges.sort(key=lambda each: each.begin_us)
        trace.steps = [first_ready[step] for step in steps]
        return trace


# ------------------------------------------------------------------------------------------------------------- PyTorch


def read_pytorch_profiles(files: Sequence[tuple[Path, Any]], ranks: int | None = None) -> Workload:
    """Return the job in the profiles of its ranks.

    Parameters
    ----------
    files
        Each file with its content. A single one stands for all ranks.
    ranks
        Number of ranks; by default, the world size in the profiles.

    Raises
    ------
    TraceFormatError
        A profile is missing or incomplete; the message names the file, the event and the reason.
    """
    by_rank: dict[int, _Profile] = {}
    for path, content in files:
        profile = _Profile(path, content)
        if profile.rank in by_rank:
            raise TraceFormatError(f"{path}: it is of rank {profile.rank}, and so is {by_rank[profile.rank].path}")
        by_rank[profile.rank] = profile
    first = next(iter(by_rank.values()))
    count = ranks or first.world
    if len(by_rank) > 1:
        missing = [rank for rank in range(count) if rank not in by_rank]
        if missing:
            raise TraceFormatError(
                f"{first.path.parent}: rank {missing[0]} of {count} has no profile; give all ranks', or a single one "
                "for all ranks alike"
            )
        beyond = [profile for rank, profile in by_rank.items() if rank >= count]
        if beyond:
            raise TraceFormatError(f"{beyond[0].path}: it is of rank {beyond[0].rank}, but there are {count} ranks")
        return _workload(first.path, [by_rank[rank].trace(count, rank) for rank in range(count)], "ring")
    if first.rank >= first.world:
        raise TraceFormatError(f"{first.path}: it is of rank {first.rank}, but there are {first.world} ranks")
    return _workload(first.path, [first.trace(count, rank) for rank in range(count)], "ring")


class _Profile:
    """A rank's profile."""

    def __init__(self, path: Path, content: Any) -> None:
        self.path = path
        about = content.get("distributedInfo")
        if not isinstance(about, dict) or not isinstance(about.get("rank"), int):
            raise TraceFormatError(
                f"{path}: it has no distributedInfo: profile a process that has called init_process_group"
            )
        known: _ProfileAbout = _as(f"{path}: distributedInfo", about, _ProfileAbout)
        self.rank, self.world = known.rank, known.world_size
        self._groups: dict[str, tuple[int, ...]] = {
            str(each.pg_name): _as(f"{path}: process group {each.pg_name}", each.ranks, tuple[HostNumber, ...])
            for each in known.pg_config or ()
            if isinstance(each.ranks, list) and each.ranks
        }
        self._events: list[_ProfileEvent] = [
            _as(f"{path}: an event", each, _ProfileEvent)
            for each in content["traceEvents"]
            if isinstance(each, dict) and each.get("ph") == "X" and "dur" in each and each.get("cat") in _READ
        ]

    def trace(self, count: int, rank: int) -> _RankTrace:
        """Return it as the trace of a rank, which may be another one that does the same."""
        communication = [each for each in self._events if each.is_exchange]
        if not communication:
            raise TraceFormatError(f"{self.path}: it has no collectives of NCCL or Gloo")
        on_gpu = communication[0].cat in _KERNELS
        steps = sorted(
            (each for each in self._events if each.name.startswith("ProfilerStep#") and each.cat == "user_annotation"),
            key=lambda step: (step.ts, step.end),
        )
        for before, after in pairwise(steps):
            if before.end - after.ts > _ROUNDING_US:
                raise TraceFormatError(
                    f"{self.path}: {after.name} begins at {after.ts} us, before {before.name} ends at {before.end} us; "
                    "give the profile of a single profiler, as it was written"
                )
        if on_gpu:
            busy = [each for each in self._events if each.cat in _KERNELS and not each.is_exchange]
        else:
            main = steps[0].tid if steps else self._busiest_thread()
            busy = [each for each in self._events if each.cat == "cpu_op" and each.tid == main]
        if not busy:
            raise TraceFormatError(f"{self.path}: it has no computation: profile the CPU, or the GPU with its kernels")
        trace = _RankTrace(str(self.path))
        spans = _joined((each.ts, each.end) for each in busy)
        if steps:
            trace.steps = [steps[0].ts, *(step.end for step in steps)]
        else:
            every = [*spans, *((each.ts, each.end) for each in communication)]
            trace.steps = [min(begin for begin, _ in every), max(end for _, end in every)]
        trace.exchanges = [self._exchange(each, count) for each in self._in_issue_order(communication)]
        if not any(trace.steps[0] <= each.begin_us < trace.steps[-1] for each in trace.exchanges):
            raise TraceFormatError(
                f"{self.path}: none of its {len(trace.exchanges)} collectives begins between {trace.steps[0]} us and "
                f"{trace.steps[-1]} us, in its steps; profile whole steps"
            )
        trace.waits = _waits(spans, trace.exchanges)
        return trace

    def _busiest_thread(self) -> Any:
        times: dict[Any, float] = defaultdict(float)
        for each in self._events:
            if each.cat == "cpu_op":
                times[each.tid] += each.dur
        return max(times, key=lambda thread: times[thread], default=None)

    def _in_issue_order(self, communication: Sequence[_ProfileEvent]) -> Sequence[_ProfileEvent]:
        """Return collectives in the order in which they were issued.

        Gloo runs them in several threads, which begin late; the calls of ``c10d`` say when each was issued.
        """
        ordered = sorted(communication, key=lambda each: each.ts)
        if ordered[0].cat in _KERNELS:
            return ordered
        calls = sorted(each.ts for each in self._events if each.name.startswith("c10d::"))
        if len(calls) != len(ordered):
            return ordered
        return [
            msgspec.structs.replace(each, ts=min(call, each.ts), dur=each.end - min(call, each.ts))
            for call, each in zip(calls, ordered, strict=True)
        ]

    def _exchange(self, event: _ProfileEvent, count: int) -> _Exchange:
        name, arguments = event.name, event.args or {}
        described = str(arguments.get("Collective name") or name)
        plain = described.lower().replace("_", "").replace("gloo:", "")
        known = next((each for word, each in _COLLECTIVES.items() if word in plain), None)
        where = f"{self.path}: {name[:60]} at {event.ts} us"
        if known is None:
            raise TraceFormatError(f"{where}: {described} is not a collective that can be simulated")
        group = self._group(where, arguments, count)
        size = 1 if known == "barrier" else self._size(where, arguments)
        return _Exchange(name, event.ts, event.end, known, size, group)

    def _group(self, where: str, arguments: Event, count: int) -> tuple[int, ...]:
        size = _as(f"{where}: Group size", arguments.get("Group size", count), Hosts)
        everyone = tuple(range(count))
        if size in (count, self.world):
            return everyone
        try:
            listed = ast.literal_eval(arguments["Process Group Ranks"])
        except (LookupError, ValueError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError):
            listed = None  # PyTorch shortens long lists
        group: tuple[int, ...] | None = self._groups.get(str(arguments.get("Process Group Name")))
        if isinstance(listed, list) and ... not in listed:
            group = _as(f"{where}: Process Group Ranks", listed, tuple[HostNumber, ...])
        if group is None or len(group) != size:
            raise TraceFormatError(f"{where}: the profile does not say which {size} ranks take part")
        return group

    def _size(self, where: str, arguments: Event) -> int:
        """Return the bytes that the rank puts in."""
        if "In msg nelems" in arguments:
            values = _as(f"{where}: In msg nelems", arguments["In msg nelems"], _Dimension)
            kind = str(arguments.get("dtype", ""))
        elif arguments.get("Input Dims"):
            dims = _as(f"{where}: Input Dims", arguments["Input Dims"], list[Any])
            kinds = _as(f"{where}: Input type", arguments.get("Input type") or [""], list[Any])
            values = math.prod(_as(f"{where}: Input Dims", dims[0], list[_Dimension]))
            kind = str(kinds[0])
        else:
            raise TraceFormatError(f"{where}: it has no size: profile with record_shapes=True")
        width = _BYTES.get(kind.lower())
        if width is None:
            raise TraceFormatError(f"{where}: the size of a value of type {kind!r} is unknown")
        if not values:
            raise TraceFormatError(f"{where}: it has 0 values, so the profile does not say how much is sent")
        return int(values) * width


def _joined(lasted: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans in order, where overlapping ones are one."""
    spans: list[tuple[float, float]] = []
    for begin, end in sorted(lasted):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((begin, end))
    return spans


def _waits(busy: Sequence[tuple[float, float]], exchanges: Sequence[_Exchange]) -> list[tuple[float, float]]:
    """Return the gaps up to the last collective that ended in them."""
    found = []
    ends = sorted(each.end_us for each in exchanges)
    for (_, begin), (end, _) in pairwise([*busy, (math.inf, math.inf)]):
        inside = [each for each in ends if begin < each <= end]
        if inside:
            found.append((begin, inside[-1]))
    return found
