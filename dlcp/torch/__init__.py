# SPDX-License-Identifier: Apache-2.0
"""DLCP for PyTorch: ``state = dlcp.torch.enable(ddp_model)``, or ``init_process_group("dlcp")``."""

from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from dlcp import on_demand
from dlcp.session.options import Options
from dlcp.torch.hook import enable, hook, noop_hook, parameter_digest, replicas_identical
from dlcp.torch.state import State

if TYPE_CHECKING:
    from dlcp.torch.backend import allow_loss
    from dlcp.torch.balance import BalancedBatches, balanced_batches, samples_per_s
    from dlcp.torch.crossstep import CrossStep, cross_step
    from dlcp.torch.elastic import Elastic, ElasticSampler
    from dlcp.torch.local_sgd import LocalSGD
    from dlcp.torch.watching import StepWatch, watch

__all__ = [
    "BalancedBatches",
    "CrossStep",
    "Elastic",
    "ElasticSampler",
    "LocalSGD",
    "Options",
    "State",
    "StepWatch",
    "allow_loss",
    "balanced_batches",
    "cross_step",
    "enable",
    "hook",
    "noop_hook",
    "parameter_digest",
    "replicas_identical",
    "samples_per_s",
    "watch",
]
BACKEND: Final = "dlcp"
"""The name of DLCP's backend in ``init_process_group``."""
_DEVICES: Final = ["cpu", "cuda"]
"""Listed explicitly: otherwise PyTorch guesses, and with only the CPU it would not accept CUDA tensors."""
__getattr__ = on_demand(
    __name__,
    {
        "BalancedBatches": "balance",
        "CrossStep": "crossstep",
        "Elastic": "elastic",
        "ElasticSampler": "elastic",
        "LocalSGD": "local_sgd",
        "StepWatch": "watching",
        "allow_loss": "backend",
        "balanced_batches": "balance",
        "cross_step": "crossstep",
        "samples_per_s": "balance",
        "watch": "watching",
    },
)


def _create_group(given: Any, options: Options | None) -> Any:
    from dlcp.torch.backend import create  # most jobs use the hook

    return create(given, options)


if BACKEND.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=_DEVICES)
