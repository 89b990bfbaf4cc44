# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: copies of the parameters that it does not divide stay equal.

Ranks that hold the same part of a model average its gradients. With tensor parallelism there are several such groups,
and each averages the gradients of an undivided parameter, such as a norm's, on its own. Each would lose and round off
different values, and the copies would drift apart. So these gradients are sent in full, the divided ones within the
bound.
"""

import glob
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from dlcp.policies.arms import EXACT
from dlcp.session.options import Options
from dlcp.values.planes import FULL_BITS


def keep_copies_equal(model: torch.nn.Module, options: Options) -> Options:
    """Return the options with which copies of a DDP or FSDP2 model's parameters stay equal.

    Raises
    ------
    ValueError
        An option would let them drift apart; the message names it and a parameter.
    """
    copied = undivided(model)
    if not copied or options.precision == EXACT:
        return options
    conflicts = ["compression"] * bool(options.compression)
    conflicts += [f"precision {options.precision}"] * options.is_coarse
    if conflicts:
        raise ValueError(
            f"tensor parallelism does not divide {len(copied)} parameters, such as {copied[0]}, whose copies would "
            f"drift apart with {', '.join(conflicts)}: leave that out"
        )
    bounds = options.reduction().layers
    exact = [f"{glob.escape(name)}=0" for name in copied if bounds.of(name) != 0]
    others, *layers = str(options.loss_bound).split(", ")
    return options.with_(precision=str(FULL_BITS), loss_bound=", ".join([others, *exact, *layers]))


def undivided(model: torch.nn.Module) -> list[str]:
    """Return the names of trained parameters that tensor parallelism copies and does not divide; none without it."""
    if isinstance(model, DistributedDataParallel):
        # DDP replaces each DTensor by its part, with this note.
        divided = {
            name: _divides(parameter._st_info.placements) if hasattr(parameter, "_st_info") else None
            for name, parameter in _trained(model.module)
        }
    else:
        own = _dimensions_of_fsdp(model)
        divided = {name: _divides_beyond(parameter, own) for name, parameter in _trained(model)}
    uses_tensor_parallelism = any(found is not None for found in divided.values())
    return [name for name, found in divided.items() if uses_tensor_parallelism and not found]


def _trained(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _dimensions_of_fsdp(model: torch.nn.Module) -> set[str]:
    """Return the names of the mesh dimensions over which FSDP2 shards or replicates."""
    from dlcp.torch.fsdp import groups_of  # most jobs do not need it

    groups = [group for module in model.modules() if isinstance(module, FSDPModule) for group in groups_of(module)]
    return {name for group in groups if group for name in group.mesh_info.mesh.mesh_dim_names or ()}


def _divides_beyond(parameter: torch.Tensor, own: set[str]) -> bool | None:
    """Return whether tensor parallelism divides a parameter of FSDP2's; None if it has no such dimension."""
    if not isinstance(parameter, DTensor):
        return None
    placements: Mapping[str, object] = dict(
        zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
    )
    others = [placement for name, placement in placements.items() if name not in own]
    return _divides(others) if others else None


def _divides(placements: Iterable[object]) -> bool:
    return any(not isinstance(placement, Replicate) for placement in placements)
