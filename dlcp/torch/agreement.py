# SPDX-License-Identifier: Apache-2.0
"""Agreements among the ranks of a process group, over the store that PyTorch has."""

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but its types do not say so

from dlcp.session.agreement import Agreement

_calls: dict[str, int] = {}


def agreement_of(group: dist.ProcessGroup | None, deadline_s: float) -> Agreement:
    """Open the next matter of a process group; its ranks must open them in the same order."""
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = f"dlcp/{'-'.join(map(str, ranks)) if len(ranks) < dist.get_world_size() else 'world'}"
    number = _calls[name] = _calls.get(name, -1) + 1
    return Agreement(PrefixStore(f"{name}/{number}", store), dist.get_rank(group), len(ranks), deadline_s)
