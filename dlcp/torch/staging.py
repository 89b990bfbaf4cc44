# SPDX-License-Identifier: Apache-2.0
"""Staging: buckets of gradients on a GPU go through pinned host memory, on a stream of their own.

The copy to the host runs while the backward pass continues. The magnitudes for tags are computed on the device, so that
the host touches each value as little as possible.
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


def packet_magnitudes(tensor: torch.Tensor, values_per_packet: int) -> torch.Tensor:
    """Return the root mean square of each packet's values, computed on the tensor's device.

    The same as :func:`dlcp.values.tags.packet_magnitudes` on the host, up to rounding: float32, shape
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
    """A copy of a bucket on the host.

    Attributes
    ----------
    values
        Its values, flat; :meth:`give_back` returns them with any changes.
    magnitudes
        The magnitude of each packet, shape (packets,).
    """

    tensor: torch.Tensor
    values: torch.Tensor
    magnitudes: NDArray[np.float32]
    _stager: "Stager"
    _sizes: torch.Tensor

    def give_back(self, answer: "torch.futures.Future[torch.Tensor]") -> None:
        """Queue the copy back and resolve ``answer``, whose waiters wait on their streams; from any thread."""
        self._stager.give_back(self.tensor, (self.values, self._sizes), answer)


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the work up to it is done."""

    def query(self) -> bool:
        """Return whether it is done."""


class Device(Protocol):
    """An accelerator as staging needs it: with a second stream, for copies, and memory that it can reach."""

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


class Stager:
    """Copies buckets of one accelerator to reused host buffers, and back. One thread waits for the copies to the host.

    Parameters
    ----------
    device
        The accelerator.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[tuple[Event | None, torch.Tensor]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._coming: queue.SimpleQueue[
            tuple[Event, Staged, Callable[[Staged], None], Callable[[Exception], None]] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dlcp-staging", daemon=True)
        self._thread.start()

    def future(self) -> "torch.futures.Future[torch.Tensor]":
        """Return a future whose waiters also wait for the stream that it was resolved on."""
        return self._device.future()

    def stage(
        self,
        tensor: torch.Tensor,
        values_per_packet: int,
        ready: Callable[[Staged], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Queue the copy of a flat tensor to the host after the tensor's computation.

        The waiting thread then calls ``ready``; if that or the copy fails, it calls ``failed``.
        """
        device = self._device
        values = self._take(tensor.numel(), tensor.dtype)
        sizes = self._take(-(-tensor.numel() // values_per_packet), torch.float32)
        device.after_compute()
        with device.on_side():
            sizes.copy_(packet_magnitudes(tensor, values_per_packet), non_blocking=True)
            values.copy_(tensor.detach(), non_blocking=True)
            copied = device.mark()
        self._coming.put((copied, Staged(tensor, values, sizes.numpy(), self, sizes), ready, failed))

    def give_back(
        self,
        tensor: torch.Tensor,
        buffers: tuple[torch.Tensor, torch.Tensor],
        answer: "torch.futures.Future[torch.Tensor]",
    ) -> None:
        """See :meth:`Staged.give_back`."""
        with torch.no_grad(), self._device.on_side():
            tensor.detach().copy_(buffers[0], non_blocking=True)
            used = self._device.mark()
            with self._lock:
                for buffer in buffers:
                    self._free[buffer.numel(), buffer.dtype].append((used, buffer))
            answer.set_result(tensor)

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

    def _run(self) -> None:
        while (coming := self._coming.get()) is not None:
            copied, staged, ready, failed = coming
            try:
                copied.synchronize()
                ready(staged)
            except Exception as error:
                failed(error)


def stager_for(device: torch.device) -> Stager | None:
    """Return a stager for a device; None for the CPU, which needs none.

    Raises
    ------
    ValueError
        It is neither the CPU nor CUDA.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return Stager(CudaDevice(device))
    raise ValueError(f"gradients on {device} cannot be exchanged; DLCP supports the CPU and CUDA")
