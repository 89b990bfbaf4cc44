# SPDX-License-Identifier: Apache-2.0
"""Tensors as bytes for packets, and back.

A contiguous tensor on the CPU is used in place. Any other is copied: one on a GPU into pinned memory, on a stream other
than the compute stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlcp.torch.staging import CudaDevice, Device, Event

_PLAIN = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)
"""Formats that memoryviews support, so that their bytes are available in one step."""


@dataclass(slots=True, eq=False)
class HostTensor:
    """A tensor's bytes on the host.

    Attributes
    ----------
    data
        The bytes; those of the tensor once ``copied`` has happened.
    copied
        The event to wait for before reading ``data``; None if there is none.
    """

    tensor: torch.Tensor
    host: torch.Tensor
    data: memoryview
    copied: Event | None = None

    def back_into(self, tensor: torch.Tensor) -> "HostTensor":
        """Return the same bytes, to be given back to another tensor: they may be a scaled copy of it."""
        return (
            self if tensor.data_ptr() == self.tensor.data_ptr() else HostTensor(tensor.detach(), self.host, self.data)
        )

    @property
    def is_copy(self) -> bool:
        """Whether ``data`` is not the tensor's own memory."""
        return self.host is not self.tensor

    def give_back(self) -> None:
        """Write ``data`` into the tensor, if it is not the tensor's own memory; on a device, on the current stream."""
        if self.is_copy:
            with torch.no_grad():
                self.tensor.copy_(self.host, non_blocking=True)


class HostMemory:
    """Moves a group's tensors to the host and back.

    Parameters
    ----------
    make_device
        Makes the side stream of a device, once per device.
    """

    def __init__(self, make_device: Callable[[torch.device], Device] = CudaDevice) -> None:
        self._make_device = make_device
        self._devices: dict[torch.device, Device] = {}

    def device(self, tensor: torch.Tensor) -> Device | None:
        """Return a tensor's device; None for the CPU.

        Raises
        ------
        ValueError
            It is neither the CPU nor CUDA.
        """
        if tensor.device.type == "cpu":
            return None
        if tensor.device not in self._devices:
            if self._make_device is CudaDevice and tensor.device.type != "cuda":
                raise ValueError(f"the dlcp backend supports tensors on the CPU and on CUDA, not on {tensor.device}")
            self._devices[tensor.device] = self._make_device(tensor.device)
        return self._devices[tensor.device]

    def device_of(self, hosts: Sequence[HostTensor]) -> Device | None:
        """Return the first accelerator among these tensors' devices."""
        for host in hosts:
            device = self.device(host.tensor)
            if device:
                return device
        return None

    def read(self, tensor: torch.Tensor) -> HostTensor:
        """Return a tensor's bytes, to be sent, or to be written and given back."""
        return self._host(tensor, with_values=True)

    def room(self, tensor: torch.Tensor) -> HostTensor:
        """Return room for a tensor's bytes, to be filled completely and given back."""
        return self._host(tensor, with_values=False)

    def _host(self, tensor: torch.Tensor, *, with_values: bool) -> HostTensor:
        if tensor.is_sparse or tensor.is_quantized:
            raise ValueError(f"the dlcp backend exchanges dense tensors, not {tensor.layout} ones of {tensor.dtype}")
        plain = tensor.detach()
        device = self.device(plain)
        if device is None:
            if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
                return HostTensor(plain, plain, _bytes(plain))
            host = plain.contiguous().resolve_conj().resolve_neg() if with_values else _empty_like(plain)
            return HostTensor(plain, host, _bytes(host))
        host = device.buffer(plain.numel(), plain.dtype).view(plain.shape)
        device.after_compute()  # the copy back must also come after earlier work
        if not with_values:
            return HostTensor(plain, host, _bytes(host))
        with device.on_side():
            host.copy_(plain, non_blocking=True)
            return HostTensor(plain, host, _bytes(host), device.mark())


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(bytearray())
    if tensor.dtype in _PLAIN:
        values: Any = tensor.numpy()
        return memoryview(values).cast("B")
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
