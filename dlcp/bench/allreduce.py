# SPDX-License-Identifier: Apache-2.0
"""Time all-reduces of several sizes by DLCP, as its hook averages gradients, and by the framework, in turns.

Every rank of a job calls :func:`measure`. Times are those of the slowest rank. Bandwidths are those of nccl-tests: the
algorithm bandwidth is the size over the time, and the bus bandwidth is ``2 (n - 1) / n`` times that, which is what each
of ``n`` ranks has to send and to receive at least.
"""

import os
import random
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from dlcp.bench import BenchError, BenchResult, median, result, significant, spread
from dlcp.inputs.configuration import Trait
from dlcp.session.options import DLCP_ROUTE, Options
from dlcp.torch.state import State
from dlcp.transport.ledger import COUNTS, coded

_DLCP: Final = "dlcp"
_VALUE_BYTES: Final = 4
_PATTERN_VALUES: Final = 1 << 20
_LARGEST_VALUE: Final = 1000
"""Largest magnitude of the input: small whole numbers, whose sums over ranks are exact in float32."""
_BATCH_BYTES: Final = 1_000_000
_BATCH_MAX: Final = 20
"""Small all-reduces are timed in batches of up to this many bytes and this many operations. A single one would be
shorter than the differences between the ranks' starts."""
_COUNTED: Final = (*COUNTS, "encoded")
"""Of the packets of all ranks; ``encoded`` ones have fewer bits per value, rounded."""


@dataclass(frozen=True, slots=True)
class AllReduceSeries:
    """The measurements of a job, the same on all ranks.

    Parameters
    ----------
    sizes
        Sizes in bytes: multiples of 4, because values are float32.
    iterations, warm_up
        Numbers of timed batches of each size, and of batches before them.
    device
        ``cpu``, compared with Gloo, or ``cuda``, compared with NCCL.
    seed
        Seed of the values, and of the order in which the two sides take turns.
    """

    sizes: Sequence[int]
    iterations: int = 20
    warm_up: int = 5
    device: str = "cpu"
    seed: int = 1


@dataclass(frozen=True, slots=True)
class WholeBucket:
    """A tensor in the form of a DDP bucket: the only one of its step, with the gradient of one parameter."""

    tensor: torch.Tensor

    def buffer(self) -> torch.Tensor:
        """Return the bucket's values."""
        return self.tensor

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters with a gradient in the bucket."""
        return [self.tensor]

    def gradients(self) -> list[torch.Tensor]:
        """Return their gradients."""
        return [self.tensor]

    def is_last(self) -> bool:
        """Return whether it is the last bucket of its step."""
        return True


class _Outcome(NamedTuple):
    """One rank's measurements for one size."""

    seconds: dict[str, list[float]]
    packets: dict[str, int]
    inexact: int
    checksum: int


def measure(
    series: AllReduceSeries, options: Options, report: Callable[[BenchResult], None] = lambda _: None
) -> list[BenchResult]:
    """Measure as the rank that ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` say.

    Parameters
    ----------
    options
        DLCP's. Its ``deadline_s`` is also how long the framework's collectives may take.
    report
        Called with the result of each size, on every rank.

    Returns
    -------
    ``allreduce.nN.BYTES``: ms of DLCP and of the framework, with bandwidths in the details.

    Raises
    ------
    BenchError
        There is no other rank, one of them failed, or a result was wrong; the message says at what size.
    """
    rank = _JobRank(series, options)
    try:
        results = []
        for size in series.sizes:
            results.append(rank.measure(size))
            report(results[-1])
    except BenchError as error:
        rank.give_up(str(error))
        raise
    dist.destroy_process_group()
    return results


class _JobRank:
    """A rank of the job: its buffer, DLCP's state, and the framework's process groups."""

    def __init__(self, series: AllReduceSeries, options: Options) -> None:
        torch.set_num_threads(1)
        self.number, self.ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        if self.ranks < 2:
            raise BenchError("a job of one rank has nothing to exchange; start two ranks or more")
        self._series = series
        self._draw = random.Random(series.seed)
        self._doing = "the start"
        # Otherwise the framework's figures could appear as DLCP's.
        self._options = options.with_(fallback=False, route=DLCP_ROUTE)
        self._state: State
        """DLCP's, for the size that is being measured."""
        try:
            self._join()
        except (RuntimeError, ValueError, OSError) as error:
            raise self._failure(error) from error

    def _join(self) -> None:
        series, limit = self._series, timedelta(seconds=self._options.deadline_s)
        self._device = torch.device("cpu")
        self.framework = "gloo"
        if series.device == "cuda":
            if not torch.cuda.is_available():
                raise BenchError(f"rank {self.number} has no CUDA device; leave --device out")
            local = int(os.environ.get("LOCAL_RANK", "0"))
            self._device, self.framework = torch.device("cuda", local % torch.cuda.device_count()), "nccl"
            torch.cuda.set_device(self._device)
        dist.init_process_group("gloo" if self.framework == "gloo" else "cpu:gloo,cuda:nccl", timeout=limit)
        self._control = dist.new_group(backend="gloo", timeout=limit)
        draw = torch.Generator().manual_seed(series.seed)
        largest = max(series.sizes) // _VALUE_BYTES
        pattern = torch.randn(min(_PATTERN_VALUES, largest), generator=draw).mul_(_LARGEST_VALUE / 4).round_()
        self._pattern = pattern.clamp_(-_LARGEST_VALUE, _LARGEST_VALUE).to(self._device)
        values = torch.empty(largest, device=self._device)
        self._tensors = {size: values[: size // _VALUE_BYTES] for size in series.sizes}

    def give_up(self, reason: str) -> None:
        """Leave the session, and tell the other ranks why."""
        self._state.close(reason)

    def measure(self, size: int) -> BenchResult:
        """Measure a size on all ranks, and check the results."""
        self._doing = f"{size_words(size)}: joining"
        try:
            # A new state for each size, because what DLCP has learned with one, such as the precision, may not suit
            # another.
            self._state = State(self._options)
            self._state.attach_tensors({f"{size} bytes": self._tensors[size]}, None)
            mine = self._outcome(size)
            self._doing = f"{size_words(size)}: collecting the times"
            outcomes: list[Any] = [None] * self.ranks
            dist.all_gather_object(outcomes, mine, group=self._control)
        except (RuntimeError, ValueError, OSError) as error:
            raise self._failure(error) from error
        found = self._result(size, outcomes)
        self._state.close()
        return found

    def _outcome(self, size: int) -> _Outcome:
        seconds: dict[str, list[float]] = {_DLCP: [], self.framework: []}
        before = self._packets()
        inexact = checksum = 0
        for number in range(-self._series.warm_up, self._series.iterations):
            for side in self._draw.sample(sorted(seconds), len(seconds)):
                self._doing = f"{size_words(size)} by {side}"
                took_s = self._time(side, size)
                if number >= 0:
                    seconds[side].append(took_s)
                if side == _DLCP and number + 1 == self._series.iterations:
                    inexact, checksum = self._check(size)
        packets = {name: count - before[name] for name, count in self._packets().items()}
        return _Outcome(seconds, packets, inexact, checksum)

    def _time(self, side: str, size: int) -> float:
        """Return the duration of one all-reduce on this rank, in seconds, in a batch that all ranks begin together."""
        tensor, count = self._tensors[size], operations(size)
        bucket: Any = WholeBucket(tensor)  # annotated with PyTorch's type, which only DDP can create
        for part in self._parts(tensor):
            torch.mul(self._pattern[: len(part)], self.number + 1, out=part)
        # Otherwise, losses of an earlier batch would be added to this one's input.
        self._state.feedback.reset()
        self._synchronize()
        dist.barrier(group=self._control)
        began_s = time.perf_counter()
        for _ in range(count):
            if side == _DLCP:
                self._state.average_bucket(bucket).wait()
            else:
                dist.all_reduce(tensor)
        self._synchronize()
        return (time.perf_counter() - began_s) / count

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor in parts no longer than the pattern, which repeats in each."""
        return [tensor[start : start + len(self._pattern)] for start in range(0, len(tensor), len(self._pattern))]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check(self, size: int) -> tuple[int, int]:
        """Return the number of values that are not the exact average, and a checksum of all values."""
        exact, inexact, checksum = (self.ranks + 1) / 2, 0, 0
        for part in self._parts(self._tensors[size]):
            inexact += int(torch.count_nonzero(part != self._pattern[: len(part)] * exact))
            checksum = zlib.crc32(part.cpu().numpy().data.cast("B"), checksum)
        return inexact, checksum

    def _packets(self) -> dict[str, int]:
        """Return this rank's packet counts, once the other ranks have confirmed all packets."""
        endpoint = self._state.endpoint
        if endpoint and not endpoint.flush(self._options.deadline_s):
            raise RuntimeError(f"packets are unconfirmed after {self._options.deadline_s:g} s")
        summary = self._state.ledger.summary()
        summary["encoded"] = sum(packets for packets, _ in coded(summary["by_bits"]).values())
        return {name: summary[name] for name in _COUNTED}

    def _result(self, size: int, outcomes: Sequence[_Outcome]) -> BenchResult:
        packets = {name: sum(each.packets[name] for each in outcomes) for name in _COUNTED}
        inexact = max(each.inexact for each in outcomes)
        if len({each.checksum for each in outcomes}) > 1:
            raise BenchError(f"{size_words(size)} by DLCP: the ranks have different results")
        rounds = bool(self._options.given(Trait.WHOLE_STEP))  # compression, or a reduction other than the average
        if inexact and not rounds and not packets["lost"] + packets["encoded"]:
            raise BenchError(
                f"{size_words(size)} by DLCP: {inexact} values are wrong, though no packet was lost or rounded"
            )
        ours, theirs = (
            [1e3 * max(times) for times in zip(*(each.seconds[side] for each in outcomes), strict=True)]
            for side in (_DLCP, self.framework)
        )
        local = session.local_peers if (session := self._state.session) else 0
        details = {
            "peer": self.framework,
            "bytes": size,
            "ranks": self.ranks,
            "hosts": session.hosts if session else 0,
            "device": self._device.type,
            "through": "memory" if local == self.ranks - 1 else "memory and sockets" if local else "sockets",
            "operations_timed_together": operations(size),
            **self._bandwidths("", size, ours),
            **self._bandwidths("peer_", size, theirs),
            "peer_spread": significant(spread(theirs)),
            "packets": packets,
            "gradients_changed": inexact,
        }
        return result(f"allreduce.n{self.ranks}.{size}B", "ms", ours, theirs, details=details)

    def _bandwidths(self, prefix: str, size: int, times_ms: Sequence[float]) -> dict[str, float]:
        algorithm = size / (1e6 * median(times_ms))
        bus = algorithm * 2 * (self.ranks - 1) / self.ranks
        return {f"{prefix}algbw_gb_per_s": significant(algorithm), f"{prefix}busbw_gb_per_s": significant(bus)}

    def _failure(self, error: BaseException) -> BenchError:
        if isinstance(error, BenchError):
            return error
        first = str(error).strip().partition("\n")[0]
        return BenchError(f"rank {self.number}: {self._doing} failed: {first}; check that every rank is still running")


def operations(size: int) -> int:
    """Return the number of all-reduces of a size that are timed together."""
    return max(1, min(_BATCH_MAX, _BATCH_BYTES // size))


# Text -----------------------------------------------------------------------------------------------------------------


def size_words(size: int) -> str:
    """Return a size as ``8 B``, ``60 kB`` or ``1.07 GB``."""
    for unit, words in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {words}"
    return f"{size} B"


def table_head(peer: str) -> str:
    """Return the two lines above the rows of :func:`table_row`."""
    side = f"{'time':>10} {'spread':>6} {'algbw':>6} {'busbw':>6}"
    return f"{'':>8}  {'DLCP':>10} {'GB/s':>20}  {peer.upper():>10} {'GB/s':>20}\n{'size':>8}  {side}  {side} speed-up"


def table_row(found: BenchResult) -> str:
    """Return a result as a line: size, then time, spread and bandwidths (GB/s) of both sides, and the speed-up.

    If some of DLCP's packets had fewer bits per value, it ends with their share.
    """
    details = found.details
    assert found.peer is not None
    sides = [
        f"{_time_words(value):>10} {width:>6.0%} {details[f'{prefix}algbw_gb_per_s']:>6.2f} "
        f"{details[f'{prefix}busbw_gb_per_s']:>6.2f}"
        for prefix, value, width in (("", found.value, found.spread), ("peer_", found.peer, details["peer_spread"]))
    ]
    packets = details["packets"]
    share = packets["encoded"] / (packets["delivered"] + packets["lost"])
    rounded = f", {share:.0%} of DLCP's packets rounded" if share else ""
    return f"{size_words(details['bytes']):>8}  {'  '.join(sides)}  {found.ratio:>6.2f}x{rounded}"


def _time_words(milliseconds: float) -> str:
    return f"{1e3 * milliseconds:.4g} us" if milliseconds < 1 else f"{milliseconds:.4g} ms"
