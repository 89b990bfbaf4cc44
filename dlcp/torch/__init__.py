# SPDX-License-Identifier: Apache-2.0
"""DLCP for PyTorch: ``state = dlcp.torch.enable(ddp_model)``, or ``init_process_group("dlcp")``."""

from dlcp.session.options import Options
from dlcp.torch.backend import allow_loss
from dlcp.torch.balance import BalancedBatches, balanced_batches, samples_per_s
from dlcp.torch.crossstep import CrossStep, cross_step
from dlcp.torch.hook import State, enable, hook, noop_hook, parameter_digest, replicas_identical

__all__ = [
    "BalancedBatches",
    "CrossStep",
    "Options",
    "State",
    "allow_loss",
    "balanced_batches",
    "cross_step",
    "enable",
    "hook",
    "noop_hook",
    "parameter_digest",
    "replicas_identical",
    "samples_per_s",
]
