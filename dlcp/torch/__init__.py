# SPDX-License-Identifier: Apache-2.0
"""DLCP for PyTorch: ``state = dlcp.torch.enable(ddp_model)``, or ``init_process_group("dlcp")``."""

from dlcp.torch.backend import allow_loss
from dlcp.torch.crossstep import CrossStep, cross_step
from dlcp.torch.hook import State, enable, hook, noop_hook, parameter_digest, replicas_identical
from dlcp.torch.options import Options

__all__ = [
    "CrossStep",
    "Options",
    "State",
    "allow_loss",
    "cross_step",
    "enable",
    "hook",
    "noop_hook",
    "parameter_digest",
    "replicas_identical",
]
