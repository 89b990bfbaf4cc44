# SPDX-License-Identifier: Apache-2.0
"""How groups of layers are averaged, each for itself: with DLCP, or by the framework if ranks cannot all use DLCP."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dlcp.collectives import Bucket, DirectAllReduce
from dlcp.dtypes import ValueType
from dlcp.session.joining import Joined, NotJoinedError, join, speaks
from dlcp.session.options import Options
from dlcp.torch.agreement import agreement_of
from dlcp.torch.hook import State
from dlcp.torch.layergroup import LayerGroup
from dlcp.torch.staging import Staged, Stager, stager_for
from dlcp.transport import Endpoint, ExportedMemory

log = logging.getLogger("dlcp")


class Reducer(Protocol):
    """Averages buckets over all ranks."""

    def begin_step(self, step: int) -> None:
        """Begin a step; all averages of the last one are in."""

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket in place; all ranks start those of the same numbers, in any order."""


class FrameworkReducer:
    """The framework's own all-reduce. It wants one order on all ranks: that of a backward pass, the last layer first.

    Parameters
    ----------
    group
        The process group.
    count
        How many buckets a step has.
    """

    def __init__(self, group: dist.ProcessGroup | None, count: int) -> None:
        self._group, self._count = group, count
        self._waiting: dict[int, tuple[Bucket, Future[NDArray[np.generic]]]] = {}
        self._next = count - 1

    def begin_step(self, step: int) -> None:
        """Begin with the last bucket again."""
        self._next = self._count - 1

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket in place, once those of higher numbers have been started."""
        answer: Future[NDArray[np.generic]] = Future()
        self._waiting[sequence] = bucket, answer
        while self._next in self._waiting:
            self._all_reduce(*self._waiting.pop(self._next))
            self._next -= 1
        return answer

    def _all_reduce(self, bucket: Bucket, answer: "Future[NDArray[np.generic]]") -> None:
        tensor = _as_tensor(bucket)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None

        def average(done: "torch.futures.Future[Any]") -> None:
            try:
                done.value()
                tensor.div_(dist.get_world_size(self._group))
                answer.set_result(bucket.values)
            except Exception as error:
                answer.set_exception(error)

        work.get_future().add_done_callback(average)


class LayerExchange:
    """Averages groups of layers over the ranks; all ranks must make one.

    Parameters
    ----------
    traffic
        Options and accounts; what is owed from before.
    group
        The ranks.
    groups
        All groups of layers there are.
    tell
        Called whenever a group's ``sent`` has been resolved, from any thread; must not block.

    Raises
    ------
    NotJoinedError
        The ranks cannot all use DLCP, and ``options.fallback`` is off.
    """

    def __init__(
        self, traffic: State, group: dist.ProcessGroup | None, groups: Sequence[LayerGroup], tell: Callable[[], None]
    ) -> None:
        self.endpoint: Endpoint | None = None
        self.reason = ""
        """Why DLCP does not average, if it does not."""
        self._tell = tell
        self._stagers: dict[torch.device, Stager] = {}
        self._packet_bytes = 1440
        self._reducer: Reducer | None = None
        if dist.get_world_size(group) == 1:
            self.reason = "a group of one has nothing to exchange"
            return
        agreement = agreement_of(group, traffic.options.meet_s)
        try:
            export_bytes = ExportedMemory.needed(layers.host_bytes for layers in groups)
            joined = join(traffic.options, agreement, call="dlcp.torch.cross_step", export_bytes=export_bytes)
        except NotJoinedError as problem:
            if not traffic.options.fallback:
                raise
            self.reason = str(problem)
            self._reducer = FrameworkReducer(group, len(groups))
            if speaks(agreement):
                log.warning("DLCP is off: %s. Training goes on over the framework's own all-reduce.", problem)
            return
        if joined.remark and dist.get_rank(group) == 0:
            log.warning("DLCP: %s", joined.remark)
        self.endpoint, self._packet_bytes = joined.endpoint, joined.options.payload_bytes
        for layers in groups:
            memory = joined.endpoint.exported.take(layers.host_bytes)
            if memory is not None:
                layers.lend(memory)
        self._reducer = _direct(traffic, joined, range(dist.get_world_size(group)), groups)

    def begin_step(self, step: int) -> None:
        """Begin a step; all averages of the last one must be in."""
        if self._reducer:
            self._reducer.begin_step(step)

    def start(self, step: int, layers: LayerGroup) -> None:
        """Average a group; its ``sent`` tells when that is done."""
        layers.sent = Future()
        stager = self._stagers.get(layers.flat.device)
        if stager is None:
            stager = self._stagers[layers.flat.device] = stager_for(layers.flat.device)
        stager.stage(
            layers.flat, self._packet_bytes // layers.flat.element_size(), partial(self._on_host, step, layers)
        )

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        if self.endpoint:
            self.endpoint.close(reason)
        for stager in self._stagers.values():
            stager.close()

    def _on_host(self, step: int, layers: LayerGroup, staged: Staged) -> None:
        try:
            layers.write_flags(staged.array, staged.value_type)
            bucket = Bucket(staged.array, staged.value_type, layers.segments, lent=layers.lent)
            if staged.magnitudes is not None:
                bucket.magnitudes = staged.magnitudes
            if self._reducer:
                averaged = self._reducer.start(step, layers.index, bucket)
            else:
                averaged = Future()
                averaged.set_result(staged.array)
        except Exception as error:
            layers.sent.set_exception(error)
            self._tell()
            return
        averaged.add_done_callback(partial(self._on_averaged, layers, staged))

    def _on_averaged(self, layers: LayerGroup, staged: Staged, done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            layers.read_flags(staged.array, staged.value_type)
            staged.give_back()
            layers.sent.set_result(staged.answer)
        else:
            layers.sent.set_exception(error)
        self._tell()


def refuse_whole_steps(options: Options) -> None:
    """Raise ValueError for what only whole steps can do: groups of layers have no step that all begin."""
    for name in options.whole_step_options():
        raise ValueError(f"cross-step scheduling knows no {name}=...: leave it out, or use dlcp.torch.enable")


def _direct(traffic: State, joined: Joined, ranks: range, groups: Sequence[LayerGroup]) -> DirectAllReduce:
    options = joined.options
    # What tells which parameters were used is protected as small layers are.
    flags = max(len(layers.members) for layers in groups) + 1
    small = max(options.tag_policy.small_layer_values, flags + 1)
    traffic.tagger.policy = replace(options.tag_policy, small_layer_values=small)
    traffic.ledger.job = options.job
    return DirectAllReduce(
        joined.endpoint,
        ranks,
        weights={len(ranks): 1.0} if options.collective == "server" else None,
        options=options.reduction(),
        tagger=traffic.tagger,
        ledger=traffic.ledger,
        feedback=traffic.feedback,
    )


def _as_tensor(bucket: Bucket) -> torch.Tensor:
    """Return a bucket's memory as a tensor; what ``as_array`` undoes."""
    if bucket.value_type is ValueType.BFLOAT16:
        return torch.from_numpy(bucket.values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bucket.values)
