# SPDX-License-Identifier: Apache-2.0
"""Tensors as bytes that packets are made of, and back.

A contiguous tensor on the CPU is used where it is. Any other is copied: one on a GPU into pinned memory, on a stream
beside the one that computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dlcp.torch.staging import CudaDevice, Device, Event


@dataclass(slots=True, eq=False)
class HostTensor:
    """A tensor's bytes on the host.

    Attributes
    ----------
    data
        The bytes; once ``copied`` has happened, those of the tensor.
    copied
        What has to be waited for before ``data`` may be read; None if nothing.
    """

    tensor: torch.Tensor
    host: torch.Tensor
    data: memoryview
    copied: Event | None = None

    def give_back(self) -> None:
        """Write ``data`` into the tensor, if it is not the tensor's own memory; on a device, on the current stream."""
        if self.host is not self.tensor:
            with torch.no_grad():
                self.tensor.copy_(self.host, non_blocking=True)


class HostMemory:
    """The way of a group's tensors to the host and back.

    Parameters
    ----------
    device_of
        Makes the side stream of a device, once for each.
    """

    def __init__(self, device_of: Callable[[torch.device], Device] = CudaDevice) -> None:
        self._device_of = device_of
        self._devices: dict[torch.device, Device] = {}

    def device(self, tensor: torch.Tensor) -> Device | None:
        """Return the device that a tensor is on; None for the CPU.

        Raises
        ------
        ValueError
            Neither the CPU nor CUDA.
        """
        if tensor.device.type == "cpu":
            return None
        if tensor.device not in self._devices:
            if self._device_of is CudaDevice and tensor.device.type != "cuda":
                raise ValueError(f"the dlcp backend knows tensors on the CPU and on CUDA, not on {tensor.device}")
            self._devices[tensor.device] = self._device_of(tensor.device)
        return self._devices[tensor.device]

    def read(self, tensor: torch.Tensor) -> HostTensor:
        """Return a tensor's bytes, to be sent, or to be written and given back."""
        return self._host(tensor, with_values=True)

    def room(self, tensor: torch.Tensor) -> HostTensor:
        """Return room for a tensor's bytes, to be written whole and given back."""
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
        device.after_compute()  # what is given back comes after what was queued before, too
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
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
