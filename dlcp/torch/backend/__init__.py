# SPDX-License-Identifier: Apache-2.0
"""The ``torch.distributed`` backend ``dlcp``: ``dist.init_process_group("dlcp")`` after ``import dlcp.torch``.

Everything arrives whole; only where :func:`allow_loss` says so may a sum or average of floats lose packets on its way.
A group knows no steps and no layers: ``samples``, ``adapt``, ``phases``, ``compression`` and ``combine`` are for
:func:`dlcp.torch.enable`. Asked of a group they are an error; from the environment, which may mean the hook, they are
mentioned once.
"""

import logging
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but its types do not say so

from dlcp.backend.channel import AllowedLoss
from dlcp.backend.process_group import Collectives
from dlcp.configuration import Trait
from dlcp.ledger import Ledger
from dlcp.session.options import Options
from dlcp.tags import Tagger
from dlcp.torch.backend.process_group import ProcessGroup
from dlcp.torch.framework import endpoint_of_new_group
from dlcp.transport.options import SECONDS

log = logging.getLogger("dlcp")

_made: Counter[str] = Counter()
"""How often this process has made a group of each name."""
_said: set[str] = set()
"""What this process has mentioned already."""


def allow_loss(group: dist.ProcessGroup | None = None, options: Options | None = None) -> Ledger:
    """Let sums and averages of floats in a ``dlcp`` group lose packets within a bound from now on.

    For training that :func:`dlcp.torch.enable` does not serve. All ranks must call it at the same point, with the same
    options. It holds for all-reduce, reduce and reduce-scatter of buffers of at least
    ``options.tag_policy.small_layer_values`` values, whatever they are for: give gradients a group of their own if
    other sums must be exact. Only contributions may be lost; what has been added up arrives whole, so that ranks
    never differ. The sum of those that arrived is scaled to stand for all. There is no error feedback, because nothing
    tells which buffer of the last step a buffer continues: what is lost stays lost.

    Parameters
    ----------
    group
        The group; by default the world.
    options
        ``loss_bound``, ``immediate`` and ``tag_policy`` count; a bound of 0 makes the group reliable again. By default
        :meth:`Options.from_environment`.

    Returns
    -------
    The ledger into which messages that may lose packets are entered.

    Raises
    ------
    TypeError
        The group has another backend.
    ValueError
        ``options`` ask for something that a group cannot heed, such as ``samples``.
    """
    found = group or dist.group.WORLD
    if not isinstance(found, ProcessGroup):
        raise TypeError(f"allow_loss needs a group of backend dlcp, got {dist.get_backend(found)}")
    options = _heeded(options)
    ledger = Ledger(options.job)
    tagger = Tagger(options.tag_policy)
    found.loss = AllowedLoss(options.bound(), tagger, ledger, options.tag_policy.small_layer_values)
    return ledger


def create(given: Any, options: Options | None) -> ProcessGroup:
    """Make a group; ``options`` are ``init_process_group``'s or ``new_group``'s ``pg_options``."""
    options = _heeded(options, says=given.group_rank == 0)
    timeout: timedelta = given.timeout
    limit_s = min(timeout.total_seconds(), SECONDS.most)
    options = options.with_(collective="direct", deadline_s=limit_s, silence_s=min(options.silence_s, limit_s))
    # A group may be made again over the same store, where what was written for the last one stays.
    _made[given.group_id] += 1
    store = PrefixStore(f"{_made[given.group_id]}", given.store)
    endpoint = endpoint_of_new_group(options, store, given.group_rank, given.group_size, timeout)
    return ProcessGroup(Collectives(endpoint, given.group_size, given.group_id))


def _heeded(options: Options | None, *, says: bool = False) -> Options:
    """Return a group's options; what it cannot heed is refused if it was asked of it, or else mentioned, once.

    Raises
    ------
    ValueError
        ``options`` have such.
    """
    found = options or Options.from_environment()
    if names := found.given(Trait.WHOLE_STEP):
        problem = f"a group of backend dlcp heeds no {', '.join(names)}: only dlcp.torch.enable does"
        if options is not None:
            raise ValueError(f"{problem}; leave that out")
        if says and problem not in _said:
            _said.add(problem)
            log.warning("%s", problem)
    return found
