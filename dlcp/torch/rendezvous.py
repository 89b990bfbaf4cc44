# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a new process group find each other: over the store that PyTorch made for it, and nothing else."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but its types do not say

from dlcp.session.addresses import bind
from dlcp.session.agreement import Agreement
from dlcp.session.joining import join
from dlcp.session.options import Options
from dlcp.transport import Endpoint


def meet(options: Options, store: Store, rank: int, size: int, timeout: timedelta) -> Endpoint:
    """Open an endpoint for a process group that is being made, and wait until every peer has answered.

    A process makes several groups, so of ``options.bind`` and ``options.advertise`` only the hosts count.

    Parameters
    ----------
    options
        ``meet_s`` is how long it may take once all ranks are there.
    store, rank, size, timeout
        What PyTorch gives: the group's own part of the store, and how long to wait for the other ranks.

    Raises
    ------
    RuntimeError
        A rank has not come within ``timeout``, or is not reached; the message names it.
    """
    options = options.with_(bind=_any_port(options.bind), advertise=_host(options.advertise))
    if size == 1:
        return Endpoint(rank, _alone(options), {}, job=options.job, token=1, options=options.transport(size))
    _wait_for_all(store, rank, size, timeout)
    agreement = Agreement(PrefixStore("dlcp", store), rank, size, options.meet_s)
    return join(options, agreement, call="init_process_group").endpoint


def _wait_for_all(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    store.set(f"here/{rank}", "")
    keys = [f"here/{peer}" for peer in range(size)]
    try:
        store.wait(keys, timeout)
    except Exception as error:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"rank {rank}: of {size} ranks, {missing} have not joined the group in {timeout.total_seconds():.0f} s"
        ) from error


def _alone(options: Options) -> socket.socket:
    """Return the socket of a group of one, which nobody will ever write to."""
    return bind(options.with_(bind="127.0.0.1:0"))


def _any_port(bind_to: str) -> str:
    return f"{_host(bind_to)}:0" if bind_to else ""


def _host(address: str) -> str:
    return address.partition(":")[0]
