# SPDX-License-Identifier: Apache-2.0
"""PyTorch's reduce operations as DLCP's arithmetic."""

from typing import Any

import torch
import torch.distributed as dist

from dlcp.backend.arithmetic import Arithmetic, ReduceOp

_OPERATIONS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.MEAN,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BITWISE_AND,
    dist.ReduceOp.BOR: ReduceOp.BITWISE_OR,
    dist.ReduceOp.BXOR: ReduceOp.BITWISE_XOR,
}
_SCALED_SUM: Any = getattr(dist.ReduceOp, "PREMUL_SUM", None)
"""A sum of scaled contributions, which older versions lack."""
if _SCALED_SUM is not None:
    _OPERATIONS[_SCALED_SUM] = ReduceOp.SUM


def op_of(opts: Any) -> Any:
    """Return the operation that the options of a collective name, or that was given in their place."""
    return getattr(opts, "reduceOp", opts)


def arithmetic_of(op: Any, tensor: torch.Tensor) -> Arithmetic:
    """Return how tensors like this one are reduced.

    Raises
    ------
    TypeError
        The operation is unknown, or makes no sense for the tensor's format.
    """
    kind = getattr(op, "op", op)
    if kind not in _OPERATIONS:
        raise TypeError(f"the dlcp backend does not know {op}")
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return Arithmetic(_OPERATIONS[kind], name)
    except TypeError as error:
        raise TypeError(f"{kind} of {tensor.dtype} tensors: {error}; cast them, or choose another operation") from None


def scaled(op: Any, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """Return what a rank contributes: for PREMUL_SUM the tensor times its factor; ``in_place`` it becomes that."""
    if _SCALED_SUM is None or getattr(op, "op", op) != _SCALED_SUM:
        return tensor
    plain = tensor.detach()
    contribution: torch.Tensor = plain.mul_(op.factor) if in_place else plain * op.factor
    return contribution
