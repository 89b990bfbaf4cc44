# SPDX-License-Identifier: Apache-2.0
"""Between the memory of gradients and the memory that packets are sent from.

On the CPU they are the same. From a GPU a bucket is copied into pinned host memory on a separate stream, while the
backward pass continues, and the average is copied back on it; the magnitudes for tags are computed on the device, so
that the host touches each value as little as possible.
"""

import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dlcp.dtypes import ValueType

VALUE_TYPES = {
    torch.float32: ValueType.FLOAT32,
    torch.float64: ValueType.FLOAT64,
    torch.float16: ValueType.FLOAT16,
    torch.bfloat16: ValueType.BFLOAT16,
}
"""The formats of gradients that can be exchanged."""


def as_array(tensor: torch.Tensor) -> tuple[NDArray[np.generic], ValueType]:
    """Return a flat host tensor's memory as an array, and its format."""
    value_type = VALUE_TYPES[tensor.dtype]
    plain = tensor.detach()
    if value_type is ValueType.BFLOAT16:
        return plain.view(torch.int16).numpy().view(np.uint16), value_type
    return plain.numpy(), value_type


def packet_magnitudes(tensor: torch.Tensor, values_per_packet: int) -> torch.Tensor:
    """Return the root mean square of each packet's values, computed on the tensor's device.

    The same as :func:`dlcp.tags.packet_magnitudes` on the host, up to rounding: float32, shape
    (ceil(values / values_per_packet),), infinity for a packet with NaN or infinity.
    """
    flat = tensor.detach()
    kind = torch.float64 if flat.dtype is torch.float64 else torch.float32
    whole = flat.numel() // values_per_packet
    body = flat[: whole * values_per_packet].view(whole, values_per_packet)
    norms = torch.linalg.vector_norm(body, dim=1, dtype=kind) / math.sqrt(values_per_packet)
    rest = flat[whole * values_per_packet :]
    if rest.numel():
        last = torch.linalg.vector_norm(rest, dtype=kind) / math.sqrt(rest.numel())
        norms = torch.cat([norms, last.reshape(1)])
    magnitudes: torch.Tensor = norms.nan_to_num(nan=math.inf, posinf=math.inf).float()
    return magnitudes


@dataclass(slots=True, eq=False)
class Staged:
    """A bucket on the host.

    Attributes
    ----------
    array, value_type
        Its values, flat; :meth:`give_back` returns them with any changes.
    magnitudes
        Per packet, if they were computed on the device.
    answer
        The future that the framework waits for.
    """

    tensor: torch.Tensor
    array: NDArray[np.generic]
    value_type: ValueType
    magnitudes: NDArray[np.float32] | None
    answer: "torch.futures.Future[torch.Tensor]"
    _stager: "Stager"
    _buffers: tuple[torch.Tensor, ...] = ()

    def give_back(self) -> None:
        """Copy the values back to their origin, and resolve ``answer``."""
        self._stager.give_back(self, self._buffers)

    def pass_on(self, exchange: "Callable[[torch.Tensor], torch.futures.Future[torch.Tensor]]") -> None:
        """Let ``exchange`` average the tensor itself, in place, and resolve ``answer`` with the result."""
        self._stager.pass_on(self, self._buffers, exchange)

    def fail(self, error: BaseException) -> None:
        """Resolve ``answer`` with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)  # type: ignore[arg-type]  # annotated as a result

    def settle(self, done: "torch.futures.Future[torch.Tensor]") -> None:
        """Resolve ``answer`` from another future."""
        try:
            self.answer.set_result(done.value())
        except Exception as error:
            self.fail(error)


class Stager(Protocol):
    """Moves tensors to the host and back."""

    def stage(self, tensor: torch.Tensor, values_per_packet: int, ready: Callable[[Staged], None]) -> Staged:
        """Copy a flat tensor to the host and then call ``ready``; at once, or from another thread."""

    def give_back(self, staged: Staged, buffers: tuple[torch.Tensor, ...]) -> None:
        """See :meth:`Staged.give_back`; callable from any thread."""

    def pass_on(
        self,
        staged: Staged,
        buffers: tuple[torch.Tensor, ...],
        exchange: "Callable[[torch.Tensor], torch.futures.Future[torch.Tensor]]",
    ) -> None:
        """See :meth:`Staged.pass_on`; callable from any thread."""

    def close(self) -> None:
        """Stop."""


class HostStager:
    """For tensors that are already on the host."""

    def stage(self, tensor: torch.Tensor, values_per_packet: int, ready: Callable[[Staged], None]) -> Staged:
        """Call ``ready`` at once, with the tensor's own memory."""
        array, value_type = as_array(tensor)
        staged = Staged(tensor, array, value_type, None, torch.futures.Future(), self)
        ready(staged)
        return staged

    def give_back(self, staged: Staged, buffers: tuple[torch.Tensor, ...]) -> None:
        """Resolve the answer; the values are already in place."""
        if not staged.answer.done():
            staged.answer.set_result(staged.tensor)

    def pass_on(
        self,
        staged: Staged,
        buffers: tuple[torch.Tensor, ...],
        exchange: "Callable[[torch.Tensor], torch.futures.Future[torch.Tensor]]",
    ) -> None:
        """Let ``exchange`` average the tensor."""
        exchange(staged.tensor).add_done_callback(staged.settle)

    def close(self) -> None:
        """Nothing to stop."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the work up to it is done."""

    def query(self) -> bool:
        """Return whether it is done."""


class Device(Protocol):
    """What staging needs from an accelerator: a stream beside the compute stream, and memory that it can reach."""

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for asynchronous copies."""

    def after_compute(self) -> None:
        """Make the side stream wait for the work queued on the calling thread's current stream."""

    def on_side(self) -> AbstractContextManager[Any]:
        """Queue work within the context on the side stream."""

    def mark(self) -> Event:
        """Return an event after all work queued on the side stream so far."""

    def future(self) -> "torch.futures.Future[torch.Tensor]":
        """Return a future whose waiters also wait for the stream that it was resolved on."""


class CudaDevice:
    """A CUDA device with a side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # PyTorch does not annotate it

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def after_compute(self) -> None:
        """Make the side stream wait for the current one."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))

    def on_side(self) -> AbstractContextManager[Any]:
        """Make the side stream the current one."""
        return torch.cuda.stream(self.side)

    def mark(self) -> Event:
        """Record an event on the side stream; waiting for it sleeps."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        event.record(self.side)
        return event

    def future(self) -> "torch.futures.Future[torch.Tensor]":
        """Return a future of this device."""
        return torch.futures.Future(devices=[self.device])


class DeviceStager:
    """Buckets on an accelerator, staged through reused host buffers. One thread waits for the copies to the host.

    Parameters
    ----------
    device
        The accelerator.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[tuple[Event | None, torch.Tensor]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._coming: queue.SimpleQueue[tuple[Event, Staged, Callable[[Staged], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dlcp-staging", daemon=True)
        self._thread.start()

    def stage(self, tensor: torch.Tensor, values_per_packet: int, ready: Callable[[Staged], None]) -> Staged:
        """Queue the copy to the host after the tensor's computation; the waiting thread calls ``ready``."""
        device = self._device
        values = self._take(tensor.numel(), tensor.dtype)
        sizes = self._take(-(-tensor.numel() // values_per_packet), torch.float32)
        device.after_compute()
        with device.on_side():
            sizes.copy_(packet_magnitudes(tensor, values_per_packet), non_blocking=True)
            values.copy_(tensor.detach(), non_blocking=True)
            copied = device.mark()
        array, value_type = as_array(values)
        magnitudes: NDArray[np.float32] = sizes.numpy()
        staged = Staged(tensor, array, value_type, magnitudes, device.future(), self, (values, sizes))
        self._coming.put((copied, staged, ready))
        return staged

    def give_back(self, staged: Staged, buffers: tuple[torch.Tensor, ...]) -> None:
        """Queue the copy back; waiters of the answer wait on their streams, not on the host."""
        if staged.answer.done():
            return
        with torch.no_grad(), self._device.on_side():
            staged.tensor.detach().copy_(buffers[0], non_blocking=True)
            self._release(buffers)
            staged.answer.set_result(staged.tensor)

    def pass_on(
        self,
        staged: Staged,
        buffers: tuple[torch.Tensor, ...],
        exchange: "Callable[[torch.Tensor], torch.futures.Future[torch.Tensor]]",
    ) -> None:
        """Queue ``exchange`` after the tensor's computation."""
        with self._device.on_side():
            self._release(buffers)
            exchange(staged.tensor).add_done_callback(staged.settle)

    def close(self) -> None:
        """Stop the waiting thread once nothing is pending."""
        self._coming.put(None)
        self._thread.join(10)

    def _take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer that no copy uses; a new one if there is none."""
        with self._lock:
            free = self._free[count, dtype]
            for index, (used, buffer) in enumerate(free):
                if used is None or used.query():
                    del free[index]
                    return buffer
        return self._device.buffer(count, dtype)

    def _release(self, buffers: tuple[torch.Tensor, ...]) -> None:
        used = self._device.mark()
        with self._lock:
            for buffer in buffers:
                self._free[buffer.numel(), buffer.dtype].append((used, buffer))

    def _run(self) -> None:
        while (coming := self._coming.get()) is not None:
            copied, staged, ready = coming
            try:
                copied.synchronize()
                ready(staged)
            except Exception as error:
                staged.fail(error)


def stager_for(device: torch.device) -> Stager:
    """Return the stager of a device.

    Raises
    ------
    ValueError
        It is neither the CPU nor CUDA.
    """
    if device.type == "cpu":
        return HostStager()
    if device.type == "cuda":
        return DeviceStager(CudaDevice(device))
    raise ValueError(f"gradients on {device} cannot be exchanged; DLCP supports the CPU and CUDA")
