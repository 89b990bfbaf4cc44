# SPDX-License-Identifier: Apache-2.0
"""The ``torch.distributed`` backend ``dlcp``: ``dist.init_process_group("dlcp")`` after ``import dlcp.torch``.

Everything arrives in full; only after :func:`allow_loss` may a sum or average of floats lose packets. A group has no
steps and no layers: ``samples``, ``compression``, ``combine`` and a ``precision`` of 16 bits or less are for
:func:`dlcp.torch.enable`. As a group's arguments they are an error; from the environment, where they may be meant for
the hook, they are logged once.
"""

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dlcp.collectives.raw.channel import AllowedLoss
from dlcp.collectives.raw.group import Collectives
from dlcp.inputs.configuration import Trait
from dlcp.session.options import FRAMEWORK_ROUTE, Options
from dlcp.torch.backend.process_group import ProcessGroup
from dlcp.torch.framework import endpoint_of_new_group
from dlcp.transport.ledger import Ledger
from dlcp.transport.settings import SECONDS
from dlcp.values.tags import Tagger

log = logging.getLogger("dlcp")

_said: set[str] = set()
"""Messages that this process has already logged."""


def allow_loss(group: dist.ProcessGroup | None = None, options: Options | None = None) -> Ledger:
    """Let sums and averages of floats in a ``dlcp`` group lose packets within a bound from now on.

    For training that :func:`dlcp.torch.enable` does not support. All ranks must call it at the same point, with the
    same options. It applies to all-reduce, reduce and reduce-scatter of buffers of at least
    ``options.tag_policy.small_layer_values`` values, whatever they are for: give gradients their own group if other
    sums must be exact. Only contributions may be lost; results arrive in full, so that ranks never differ. The sum of
    the delivered contributions is scaled to represent all. There is no error feedback, since nothing matches a buffer
    to one of the last step: lost values stay lost.

    Parameters
    ----------
    group
        The group; by default the world.
    options
        ``loss_bound`` (not those of single layers), ``immediate`` and ``tag_policy`` are used; a bound of 0 makes the
        group reliable again. By default ``Options()``.

    Returns
    -------
    The ledger that records messages that may lose packets.

    Raises
    ------
    TypeError
        The group has another backend.
    ValueError
        ``options`` set something that a group does not support, such as ``samples``.
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
    endpoint = endpoint_of_new_group(options, given.store, given.group_rank, given.group_size, timeout)
    return ProcessGroup(Collectives(endpoint, given.group_size, given.group_id))


def _heeded(options: Options | None, *, says: bool = False) -> Options:
    """Return a group's options; unsupported ones are an error if given as arguments, or otherwise logged, once.

    Raises
    ------
    ValueError
        ``options`` have some of these as arguments.
    """
    found = options or Options()
    names = found.given(Trait.WHOLE_STEP) + ["precision"] * found.is_coarse
    names += ["route"] * (found.route == FRAMEWORK_ROUTE)
    if names:
        wrong = [name for name in names if name in found.arguments]
        problem = f"a group of backend dlcp does not support {', '.join(wrong or names)}: only dlcp.torch.enable does"
        if wrong:
            raise ValueError(f"{problem}; leave that out")
        if says and problem not in _said:
            _said.add(problem)
            log.warning("%s", problem)
    return found
