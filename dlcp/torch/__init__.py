# SPDX-License-Identifier: Apache-2.0
"""DLCP for PyTorch: ``state = dlcp.torch.enable(ddp_model)``."""

from dlcp.torch.hook import State, enable, hook, noop_hook, parameter_digest, replicas_identical
from dlcp.torch.options import Options

__all__ = ["Options", "State", "enable", "hook", "noop_hook", "parameter_digest", "replicas_identical"]
