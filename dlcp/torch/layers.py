# SPDX-License-Identifier: Apache-2.0
"""Layers whose gradients travel together: one message per group, so that tiny tensors do not cost one each."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer

from dlcp.torch.state import VALUE_TYPES
from dlcp.values.tags import Layer, Segment, layers_in_order
from dlcp.wire.payloads import PLANE_BLOCK_VALUES

GROWTH: Final = 4
"""How many times larger than the first group the others may become. Chosen by processor time: messages cause most of
the cost of cross-step scheduling."""


@dataclass(slots=True, eq=False)
class GroupMember:
    """A parameter in its group.

    ``average`` is its part of the group's buffer, with the parameter's shape and strides. A gradient that is taken is
    moved there, which frees backward's memory for the next one: ``.grad`` is that part from then on, until the next
    step. ``version`` shows whether it was changed since it was ``taken``.
    """

    name: str
    parameter: Parameter
    layer: Layer
    average: torch.Tensor
    taken: bool = False
    version: int = 0

    def take(self) -> None:
        """Move the parameter's gradient into the buffer.

        Raises
        ------
        ValueError
            The gradient is sparse.
        """
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {self.name} is {gradient.layout}; cross_step exchanges dense gradients only: "
                "build its module with sparse=False"
            )
        if not self.in_buffer:  # otherwise it was added to the last average
            self.average.copy_(gradient.detach())
            self.parameter.grad = self.average
        self.taken, self.version = True, self.average._version

    @property
    def in_buffer(self) -> bool:
        """Whether the parameter's gradient is in the buffer."""
        gradient = self.parameter.grad
        return gradient is not None and gradient.data_ptr() == self.average.data_ptr()

    @property
    def unchanged(self) -> bool:
        """Whether only the exchange has written to its part of the buffer since the gradient was taken."""
        return self.average._version == self.version

    def detach(self) -> None:
        """Give the parameter its own zero gradient if its current one is in the buffer."""
        if self.in_buffer:
            self.parameter.grad = torch.zeros_like(self.average)


class LayerGroup:
    """Neighbouring parameters, and the flat buffer in which their gradients are averaged.

    After the gradients the buffer holds one flag per parameter, 1 if this rank has a gradient for it: so all ranks know
    which parameters none of them has used, and leave those alone as serial training does. A last flag holds whether
    this rank has updated its parameters an even or an odd number of times: it reveals a rank that dropped a step that
    others have taken.

    Parameters
    ----------
    index
        Position among the groups, 0 nearest the input; the same on all ranks.
    parameters
        Name, parameter and layer of each; all of the same type and device.

    Attributes
    ----------
    flat
        The buffer, on the parameters' device.
    exported
        Whether ranks of this host read the buffer's memory.
    sent
        Resolved with ``flat`` once it holds the average.
    arrived, error
        Whether the average has arrived or failed, and the error if it has failed.
    due_s
        Deadline of the average, on the monotonic clock.
    """

    def __init__(self, index: int, parameters: Sequence[tuple[str, Parameter, Layer]]) -> None:
        self.index = index
        self.sent: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.arrived = False
        self.error: Exception | None = None
        self.due_s = math.inf
        self.exported = False
        _, first, _ = parameters[0]
        self._values = sum(parameter.numel() for _, parameter, _ in parameters)
        # Each flag is alone in its block, so that it keeps its value at lower precision, whatever the gradients are.
        flag_values = (len(parameters) + 1) * PLANE_BLOCK_VALUES
        self.flat = torch.zeros(self._values + flag_values, dtype=first.dtype, device=first.device)
        self.members: list[GroupMember] = []
        self.segments: list[Segment] = []
        start = 0
        for name, parameter, layer in parameters:
            stop = start + parameter.numel()
            self.members.append(GroupMember(name, parameter, layer, _view(self.flat, start, parameter)))
            self.segments.append(Segment(layer, start, stop))
            start = stop
        # Few values, so the tagger protects them: which parameters were used is never lost. They belong to no layer.
        _, _, last = parameters[-1]
        for block in range(start, len(self.flat), PLANE_BLOCK_VALUES):
            self.segments.append(Segment(replace(last, shape=(0,)), block, block + PLANE_BLOCK_VALUES))
        self._odd = 0.0
        self._averaged_flags: list[float] = []

    @property
    def host_bytes(self) -> int:
        """The buffer's size; 0 if it is not in host memory."""
        return self.flat.numel() * self.flat.element_size() if self.flat.device.type == "cpu" else 0

    def move_to(self, memory: NDArray[np.uint8]) -> None:
        """Move the buffer to memory of :attr:`host_bytes` bytes that ranks of this host read."""
        self.flat, self.exported = torch.from_numpy(memory).view(self.flat.dtype), True
        for member, segment in zip(self.members, self.segments, strict=False):
            member.average = _view(self.flat, segment.start, member.parameter)

    def leave_exported(self) -> None:
        """Remove gradients from memory that others read: parameters get their own copies."""
        for member in self.members:
            if self.exported and member.in_buffer:
                member.parameter.grad = member.average.clone()

    @property
    def label(self) -> str:
        """Its layers, for error messages."""
        names = [member.name for member in self.members]
        return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"

    @property
    def complete(self) -> bool:
        """Whether every gradient has been taken."""
        return all(member.taken for member in self.members)

    def fill(self, updates: int) -> None:
        """Complete the buffer: existing gradients of parameters that backward has not reached, or zeros; and flags.

        ``updates`` is how often this rank has updated its parameters.
        """
        for member in self.members:
            if not member.taken:
                if member.parameter.grad is None:
                    member.average.zero_()
                    member.version = member.average._version
                else:
                    member.take()
        self._odd = float(updates % 2)
        flags = torch.tensor([*(float(member.taken) for member in self.members), self._odd])
        self._flags(self.flat).copy_(flags, non_blocking=True)

    def read_flags(self, averages: torch.Tensor) -> None:
        """Read all ranks' flags from the averages."""
        self._averaged_flags = self._flags(averages).tolist()

    def _flags(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self._values + PLANE_BLOCK_VALUES - 1 :: PLANE_BLOCK_VALUES]

    @property
    def agreed(self) -> bool:
        """Whether all ranks have made the same number of updates, once the averages have arrived."""
        return self._averaged_flags[-1] == self._odd

    def used(self) -> list[GroupMember]:
        """Return the members with a gradient on any rank, once the averages have arrived."""
        return [member for member, flag in zip(self.members, self._averaged_flags, strict=False) if flag > 0]

    def forget(self) -> None:
        """Forget taken gradients: the step is over."""
        for member in self.members:
            member.taken = False


def layer_groups(
    model: torch.nn.Module, optimizer: Optimizer, group_bytes: int
) -> tuple[list[LayerGroup], list[tuple[str, Parameter]]]:
    """Return the parameters to exchange, in groups, and the optimizer's parameters without gradients.

    Raises
    ------
    ValueError
        The optimizer has a parameter that is not in the model or cannot be exchanged, or it has none to train.
    """
    named = dict(model.named_parameters())
    layers = layers_in_order(list(named))
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strangers = owned - {id(parameter) for parameter in named.values()}
    if strangers:
        raise ValueError(f"the optimizer has {len(strangers)} parameters that are not in the model")
    mine = [(name, parameter) for name, parameter in named.items() if id(parameter) in owned]
    trained = [(name, parameter, layers[name]) for name, parameter in mine if parameter.requires_grad]
    if not trained:
        raise ValueError("the optimizer has no parameter that requires a gradient")
    for name, parameter, _ in trained:
        if parameter.dtype not in VALUE_TYPES or parameter.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"parameter {name} is {parameter.dtype} on {parameter.device}; cross_step exchanges "
                f"{', '.join(kind.value for kind in VALUE_TYPES.values())} on the CPU and on CUDA"
            )
    groups = [LayerGroup(index, part) for index, part in enumerate(in_groups(trained, group_bytes))]
    return groups, [(name, parameter) for name, parameter in mine if not parameter.requires_grad]


def in_groups(
    parameters: Iterable[tuple[str, Parameter, Layer]], group_bytes: int
) -> list[list[tuple[str, Parameter, Layer]]]:
    """Divide parameters, in their order, into groups of at least ``group_bytes`` where type and device allow.

    Each group except the first should be twice as large as the previous one, up to :data:`GROWTH` times
    ``group_bytes``: layers far from the input are not urgent. The parameters of one module stay together.
    """
    groups: list[list[tuple[str, Parameter, Layer]]] = []
    size, previous = 0, None
    for name, parameter, layer in parameters:
        module = name.rpartition(".")[0]
        kind = (parameter.dtype, parameter.device)
        least = group_bytes * min(GROWTH, 1 << max(0, len(groups) - 1))
        if previous is None or previous[1] != kind or (size >= least and previous[0] != module):
            groups.append([])
            size = 0
        groups[-1].append((name, parameter, layer))
        size += parameter.numel() * parameter.element_size()
        previous = module, kind
    return groups


def _view(flat: torch.Tensor, start: int, parameter: Parameter) -> torch.Tensor:
    """Return the part of ``flat`` from ``start`` on as a tensor like ``parameter``, with its strides if dense."""
    strides = torch.empty_like(parameter, memory_format=torch.preserve_format, device="meta").stride()
    # .data: with its own version, so that a change to one gradient does not look like a change to its neighbours.
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + start).data
