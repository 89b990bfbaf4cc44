# SPDX-License-Identifier: Apache-2.0
"""The process group of ``torch.distributed``'s backend ``dlcp``."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlcp.collectives.raw.channel import AllowedLoss
from dlcp.collectives.raw.elementwise_ops import ElementwiseOp, ReduceOp
from dlcp.collectives.raw.group import Collectives
from dlcp.host.closing import ExitCallback
from dlcp.session.training_session import reason_of_exit
from dlcp.torch import BACKEND
from dlcp.torch.backend.tensor_bytes import HostMemory, HostTensor
from dlcp.torch.backend.work import Issuer, Work, call_aside, joined
from dlcp.torch.framework import profiled, scale_of
from dlcp.torch.staging import Device

Tensors = Sequence[torch.Tensor]
_at_exit: ExitCallback | None = None
_OPEN: "weakref.WeakSet[Collectives]" = weakref.WeakSet()
"""Collectives of all groups that have not been destroyed."""

_Base: Any = dist.ProcessGroup
"""PyTorch's annotations give each method two forms; ``torch.distributed`` only calls the first, which is here."""


class ProcessGroup(_Base):  # type: ignore[misc]  # Any, for the reason above
    """A group of ranks with its own endpoint.

    The collectives are those of ``torch.distributed``, which calls these methods; each returns at once. They must be
    issued in the same order on all ranks, and any number may be in progress.

    Parameters
    ----------
    collectives
        The group's collectives on bytes.
    memory
        Moves tensors to the host and back.
    """

    def __init__(self, collectives: Collectives, memory: HostMemory | None = None) -> None:
        super().__init__(collectives.rank, collectives.ranks)
        self.collectives = collectives
        self.loss: AllowedLoss | None = None
        self._memory = memory or HostMemory()
        self._issuer: Issuer | None = None
        self._coalesced: list[Work] | None = None
        _watch_exit()
        _OPEN.add(collectives)

    # Group properties for torch.distributed ---------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return ``dlcp``."""
        return BACKEND

    def name(self) -> str:
        """Return ``dlcp``."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The group's name in ``torch.distributed``."""
        return self.collectives.name

    def rank(self) -> int:
        """Return this rank in the group."""
        return self.collectives.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.collectives.ranks

    supports_coalescing = supports_splitting = False
    """Properties that PyTorch asks a device's backend for."""

    def _get_backend(self, device: torch.device) -> "ProcessGroup":
        """Return the backend of a device: the group itself, which serves all of them."""
        return self

    def shutdown(self) -> None:
        """Leave the group once the peers have what they wait for; ``dist.destroy_process_group`` calls it."""
        self._close(None)

    def abort(self) -> None:
        """Leave the group at once, and tell the peers."""
        self._close(f"rank {self.rank()} has aborted the group")

    def _close(self, reason: str | None) -> None:
        if self._issuer:
            self._issuer.close()
        _OPEN.discard(self.collectives)
        self.collectives.close(reason)

    # Collectives ------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = dist.ReduceOp.SUM) -> Work:
        """Reduce each tensor over all ranks, in place."""
        works = [self._reduce("all_reduce", tensor, op_of(opts), None) for tensor in tensors]
        return joined("all_reduce", works, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = dist.ReduceOp.SUM) -> Work:
        """Reduce several tensors over all ranks, in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor over all ranks, into the root's."""
        works = [self._reduce("reduce", tensor, op_of(opts), opts.rootRank) for tensor in tensors]
        return joined("reduce", works, tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Send the root's tensors to all ranks."""
        works = []
        for tensor in tensors:
            is_root = self.rank() == opts.rootRank
            host = self._memory.read(tensor) if is_root else self._memory.room(tensor)
            start = partial(self.collectives.broadcast, host.data, opts.rootRank)
            works.append(self._issue("broadcast", start, [host], [] if is_root else [host], [tensor]))
        return joined("broadcast", works, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Fill each list of tensors with the input of every rank."""
        works = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            _check_count("all_gather", "output", len(parts), self.size())
            works.append(self._all_gather(tensor, list(parts)))
        return joined("all_gather", works, outputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather several tensors from every rank: ``outputs[rank][i]`` is the rank's ``inputs[i]``."""
        works = [self._all_gather(tensor, [part[i] for part in outputs]) for i, tensor in enumerate(inputs)]
        return joined("all_gather", works, outputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Fill a tensor with the inputs of all ranks, one after the other."""
        whole = self._memory.room(output)
        mine = self._memory.read(tensor)
        sizes = [len(mine.data)] * self.size()
        start = partial(self.collectives.all_gather, mine.data, _split("all_gather", whole.data, sizes))
        return self._issue("all_gather", start, [mine], [whole], output)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Gather several tensors, each into one."""
        works = [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)]
        return joined("all_gather", works, outputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Fill the root's list of tensors with the input of every rank."""
        mine = self._memory.read(inputs[0])
        parts = self._parts_of_root("gather", "output", outputs, opts.rootRank, self._memory.room)
        start = partial(self.collectives.gather, mine.data, [part.data for part in parts], opts.rootRank)
        return self._issue("gather", start, [mine], parts, outputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Send each rank its tensor of the root's list."""
        mine = self._memory.room(outputs[0])
        parts = self._parts_of_root("scatter", "input", inputs, opts.rootRank, self._memory.read)
        start = partial(self.collectives.scatter, mine.data, [part.data for part in parts], opts.rootRank)
        return self._issue("scatter", start, parts, [mine], outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = dist.ReduceOp.SUM) -> Work:
        """Reduce each rank's tensor of the lists over all ranks, into its output."""
        works = []
        for output, parts in zip(outputs, inputs, strict=True):
            _check_count("reduce_scatter", "input", len(parts), self.size())
            works.append(self._reduce_scatter(output, list(parts), op_of(opts)))
        return joined("reduce_scatter", works, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = dist.ReduceOp.SUM) -> Work:
        """Reduce the parts of a tensor over all ranks, each into its rank's output."""
        return self._reduce_scatter(output, [tensor], op_of(opts))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = dist.ReduceOp.SUM) -> Work:
        """Reduce the parts of several tensors over all ranks, each into its rank's output."""
        works = [self._reduce_scatter(o, [i], op_of(opts)) for o, i in zip(outputs, inputs, strict=True)]
        return joined("reduce_scatter", works, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send every rank its tensor of a list, and fill another list with the tensors received."""
        _check_count("all_to_all", "output", len(outputs), self.size())
        _check_count("all_to_all", "input", len(inputs), self.size())
        gifts = [self._memory.read(tensor) for tensor in inputs]
        parts = [self._memory.room(tensor) for tensor in outputs]
        start = partial(self.collectives.all_to_all, [gift.data for gift in gifts], [part.data for part in parts])
        return self._issue("all_to_all", start, gifts, parts, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send every rank its rows of a tensor; without split sizes each gets the same number."""
        gifts, parts = self._memory.read(tensor), self._memory.room(output)
        start = partial(
            self.collectives.all_to_all,
            self._split_rows(tensor, gifts.data, input_split_sizes),
            self._split_rows(output, parts.data, output_split_sizes),
        )
        return self._issue("all_to_all", start, [gifts], [parts], output)

    def barrier(self, opts: Any = None) -> Work:
        """Complete when all ranks have reached this point."""
        return self._issue("barrier", self.collectives.barrier, [], [], [])

    # Names that torch.distributed used before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Point to point ---------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        """Send a tensor to a rank; done when that rank has received it."""
        mine = self._memory.read(tensors[0])
        return self._issue("send", partial(self.collectives.send, mine.data, peer, tag), [mine], [], tensors)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        """Receive the oldest message of a tag from a rank."""
        return self._receive(tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive the oldest message of a tag from any rank; the work names the rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, peer: int | None, tag: int) -> Work:
        room = self._memory.room(tensors[0])
        return self._issue("recv", partial(self.collectives.receive, room.data, peer, tag), [], [room], tensors)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return joined("coalesced operations", works, [])

    # Implementation ---------------------------------------------------------------------------------------------------

    def _parts_of_root(
        self, what: str, side: str, lists: Sequence[Tensors], root: int, host: Callable[[torch.Tensor], HostTensor]
    ) -> list[HostTensor]:
        """Return the root's list of tensors, one per rank, on the host; empty at the other ranks."""
        if self.rank() != root:
            return []
        _check_count(what, side, len(lists[0]), self.size())
        return [host(tensor) for tensor in lists[0]]

    def _reduce(self, what: str, tensor: torch.Tensor, op: Any, root: int | None) -> Work:
        operation = elementwise_op(op, tensor)
        host = self._memory.read(scaled(op, tensor, in_place=root is None))
        if root is None:
            start = partial(self.collectives.all_reduce, host.data, operation, self.loss)
            return self._issue(what, start, [host], [host], [tensor])
        start = partial(self.collectives.reduce, host.data, operation, root, self.loss)
        written = [host.back_into(tensor)] if root == self.rank() else []
        return self._issue(what, start, [host], written, [tensor])

    def _reduce_scatter(self, output: torch.Tensor, tensors: list[torch.Tensor], op: Any) -> Work:
        """Reduce one tensor per rank, or one that holds all parts."""
        operation = elementwise_op(op, tensors[0])
        hosts = [self._memory.read(scaled(op, tensor)) for tensor in tensors]
        result = self._memory.room(output)
        parts = [host.data for host in hosts]
        if len(parts) != self.size():
            parts = _split("reduce_scatter", parts[0], [len(result.data)] * self.size())
        _check_sizes("reduce_scatter", [len(parts[self.rank()])], [len(result.data)])
        start = partial(self.collectives.reduce_scatter, parts, result.data, operation, self.loss)
        return self._issue("reduce_scatter", start, hosts, [result], output)

    def _all_gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor]) -> Work:
        mine = self._memory.read(tensor)
        parts = [self._memory.room(output) for output in outputs]
        _check_sizes("all_gather", [len(mine.data)], [len(parts[self.rank()].data)])
        start = partial(self.collectives.all_gather, mine.data, [part.data for part in parts])
        return self._issue("all_gather", start, [mine], parts, outputs)

    def _split_rows(self, tensor: torch.Tensor, data: memoryview, rows: Sequence[int]) -> list[memoryview]:
        if not rows:
            if tensor.dim() and tensor.size(0) % self.size():
                raise ValueError(
                    f"all_to_all: {tensor.size(0)} rows cannot be divided among {self.size()} ranks evenly"
                )
            return _split("all_to_all", data, [len(data) // self.size()] * self.size())
        _check_count("all_to_all", "split size", len(rows), self.size())
        row_bytes = len(data) // tensor.size(0) if tensor.size(0) else 0
        return _split("all_to_all", data, [row * row_bytes for row in rows])

    def _issue(
        self,
        what: str,
        start: Callable[[], "Future[Any]"],
        read: Sequence[HostTensor],
        written: Sequence[HostTensor],
        value: Any,
    ) -> Work:
        """Start a collective once its input is on the host; copy its output back when it is done."""
        what = f"{what} of group {self.collectives.name}"
        device = self._memory.device_of([*read, *written])
        if device and not self._issuer:
            self._issuer = Issuer(self.collectives.name)
        if self._issuer or any(host.is_copy for host in written):
            work = self._issue_with_copies(what, start, read, written, value, device)
        else:
            try:
                with profiled("issue", what):
                    work = Work(what, done=start(), value=value)
            except Exception as problem:
                work = Work(what)
                work.fail(problem)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _issue_with_copies(
        self,
        what: str,
        start: Callable[[], "Future[Any]"],
        read: Sequence[HostTensor],
        written: Sequence[HostTensor],
        value: Any,
        device: Device | None,
    ) -> Work:
        work = Work(what, device.future() if device else None)

        def on_done(done: "Future[Any]") -> None:
            error = done.exception()
            if error:
                work.fail(error)
            elif device:
                call_aside(partial(give_back, done.result()))
            else:
                give_back(done.result())

        def give_back(source: int | None) -> None:
            try:
                with device.on_side() if device else nullcontext():
                    for host in written:
                        host.give_back()
                    work.succeed(value, source)
            except BaseException as problem:  # the waiters must be told
                work.fail(problem)

        def begin() -> None:
            try:
                for host in read:
                    if host.copied:
                        host.copied.synchronize()
                start().add_done_callback(on_done)
            except Exception as problem:
                work.fail(problem)

        if self._issuer:
            self._issuer.submit(begin)  # keeps the order of issue the same on all ranks
        else:
            begin()
        return work


def _watch_exit() -> None:
    """Make this process leave its own groups at exit, but not its parent's."""
    global _at_exit
    if _at_exit is None or _at_exit.is_fork:
        _OPEN.clear()
        _at_exit = ExitCallback(_leave_groups)


def _leave_groups() -> None:
    """Leave the groups that a script has not destroyed: peers may still wait for their confirmation."""
    for collectives in list(_OPEN):
        reason = reason_of_exit(collectives.rank) or f"rank {collectives.rank} has ended in the middle of a collective"
        collectives.close(reason if collectives.busy else None)


# Mapping of PyTorch's reduce operations -------------------------------------------------------------------------------

_OPERATIONS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.MEAN,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BITWISE_AND,
    dist.ReduceOp.BOR: ReduceOp.BITWISE_OR,
    dist.ReduceOp.BXOR: ReduceOp.BITWISE_XOR,
    dist.ReduceOp.PREMUL_SUM: ReduceOp.SUM,
}


def op_of(opts: Any) -> Any:
    """Return the operation from a collective's options, or the operation given instead."""
    return getattr(opts, "reduceOp", opts)


def elementwise_op(op: Any, tensor: torch.Tensor) -> ElementwiseOp:
    """Return the reduction of tensors like this one.

    Raises
    ------
    TypeError
        The operation is unknown, or not supported for the tensor's format.
    """
    kind = getattr(op, "op", op)
    if kind not in _OPERATIONS:
        raise TypeError(f"the dlcp backend does not support {op}")
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return ElementwiseOp(_OPERATIONS[kind], name)
    except TypeError as error:
        raise TypeError(f"{kind} of {tensor.dtype} tensors: {error}; cast them, or choose another operation") from None


def scaled(op: Any, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """Return a rank's contribution: for PREMUL_SUM the tensor times its factor, computed ``in_place`` if set."""
    if getattr(op, "op", op) != dist.ReduceOp.PREMUL_SUM:
        return tensor
    plain = tensor.detach()
    contribution: torch.Tensor = plain.mul_(scale_of(op)) if in_place else plain * scale_of(op)
    return contribution


def _split(what: str, data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    _check_sizes(what, [len(data)], [sum(sizes)])
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts


def _check_sizes(what: str, found: Iterable[int], wanted: Iterable[int]) -> None:
    for one, other in zip(found, wanted, strict=True):
        if one != other:
            raise ValueError(f"{what}: a tensor holds {one} bytes where {other} are needed")


def _check_count(what: str, kind: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"{what} needs one {kind} for each of {wanted} ranks, got {found}")
