# SPDX-License-Identifier: Apache-2.0
"""The parts of PyTorch that a session uses: its store, to agree and to watch others, and Gloo, to recover."""

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

# torch.distributed has them too, but without types.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.autograd import profiler

from dlcp.host.ip import loopback
from dlcp.inputs.addresses import Address, format_host, parse_address
from dlcp.session.addresses import OwnAddresses, bind
from dlcp.session.choosing import FrameworkRoute
from dlcp.session.joining import Agreement, join, next_number
from dlcp.session.options import Options
from dlcp.session.recovery import PeerWatch
from dlcp.session.secret import configured_secret
from dlcp.session.training_session import LEFT
from dlcp.transport import Endpoint, Membership, PeerAbortedError, PeerSilentError

log = logging.getLogger("dlcp")

_sessions: "weakref.WeakKeyDictionary[LeavesAtExit, dist.ProcessGroup | None]" = weakref.WeakKeyDictionary()
"""This process's sessions and watches, and the process groups of their ranks."""

# Agreeing and joining -------------------------------------------------------------------------------------------------


def agreement_of(group: dist.ProcessGroup | None, options: Options) -> Agreement:
    """Open the next agreement of a process group; its ranks must open them in the same order."""
    secret = _secret_of(options)  # before the agreement's number: a rank that fails here has opened none
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = f"dlcp/{'-'.join(map(str, ranks)) if len(ranks) < dist.get_world_size() else 'world'}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's own store outlives its ranks and their entries.
        name = f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store, rank = PrefixStore(name, store), dist.get_rank(group)
    store = PrefixStore(str(next_number(store, rank)), store)
    return Agreement(store, rank, len(ranks), options.meet_s, secret, _address_of(store))


class LeavesAtExit(Protocol):
    """Something that must end before its process group."""

    def leave_at_exit(self) -> None:
        """Leave the other ranks."""


def leave_with_group(session: LeavesAtExit, group: dist.ProcessGroup | None) -> None:
    """Make a session leave before its process group is destroyed: the process may end right after that."""
    _sessions[session] = group or dist.group.WORLD
    modules: tuple[Any, ...] = dist, dist.distributed_c10d
    for module in modules:
        original = module.destroy_process_group
        if not hasattr(original, "leaves_sessions"):
            module.destroy_process_group = _leaving_first(original)


def _leaving_first(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``destroy_process_group`` so that sessions leave first."""

    @functools.wraps(original)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        everything = group is None or group is dist.group.WORLD
        for session, its_group in list(_sessions.items()):
            if everything or its_group is group:
                del _sessions[session]
                session.leave_at_exit()
        original(group)

    destroy_process_group.leaves_sessions = True  # type: ignore[attr-defined]  # prevents a second replacement
    return destroy_process_group


def _secret_of(options: Options) -> bytes | None:
    if options.elastic:
        raise ValueError("PyTorch's process groups keep their ranks: omit elastic, or use dlcp.torch.Elastic")
    if options.tls:
        raise ValueError("PyTorch's store, where these ranks meet, has no TLS: omit tls, and set secret_file")
    return configured_secret(options)


def _without_port(text: str) -> str:
    return format_host(parse_address(text, 0)[0]) if text else ""


def _address_of(store: Store) -> Address | None:
    """Return the address of a network store, if it is one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def endpoint_of_new_group(options: Options, store: Store, rank: int, size: int, timeout: timedelta) -> Endpoint:
    """Open an endpoint for a new process group, and wait until every peer has answered.

    A process makes several groups, so only the hosts of ``options.bind`` and ``options.advertise`` are used.

    Parameters
    ----------
    options
        ``meet_s`` limits the time once all ranks are there.
    store, rank, size, timeout
        From PyTorch: the group's own part of the store, and how long to wait for the other ranks.

    Raises
    ------
    RuntimeError
        A rank has not joined within ``timeout``, or cannot be reached; the message names it.
    """
    options = options.with_(bind=_without_port(options.bind), advertise=_without_port(options.advertise))
    if size == 1:  # nothing will ever be sent to its socket
        sock = bind(options.with_(bind=""), OwnAddresses(loopback()))
        return Endpoint(Membership(rank, job=options.job, token=1), sock, options=options.transport(size))
    secret = _secret_of(options)  # before the number, as above
    # A group may be made again over the same store, which keeps the last one's entries.
    store = PrefixStore(str(next_number(store, rank)), store)
    agree = functools.partial(
        Agreement, PrefixStore("dlcp", store), rank, size, options.meet_s, secret, _address_of(store)
    )
    store.set(f"here/{rank}", "")
    keys = [f"here/{peer}" for peer in range(size)]
    try:
        store.wait(keys, timeout)
    except Exception as error:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        problem = (
            f"rank {rank}: of {size} ranks, {missing} have not joined the group in {timeout.total_seconds():.0f} s"
        )
        agree().give_up(problem)
        raise RuntimeError(problem) from error
    return join(options, agree(), call="init_process_group").endpoint  # meet_s begins now


def copy_from_first_rank(model: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Copy the first rank's parameters and buffers to the others; all must call it."""
    first = dist.get_global_rank(group, 0) if group is not None else 0
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, first, group=group)


# Recovering -----------------------------------------------------------------------------------------------------------


class GlooWatch(PeerWatch):
    """Ranks notice in PyTorch's store that another one has left DLCP; they recover over a Gloo group.

    Parameters
    ----------
    group
        The model's process group.
    agreement
        Where ranks announce that they have left DLCP.
    deadline_s
        Time limit of each exchange of the recovery.
    """

    def __init__(self, group: dist.ProcessGroup | None, agreement: Agreement, deadline_s: float) -> None:
        self._group, self._agreement, self._deadline_s = group, agreement, deadline_s
        self._gloo: GlooChannel | None = None

    def open(self) -> bool:
        """Make a Gloo group of the same ranks; all must call it. Return False, with a warning, if that fails."""
        self._gloo = open_channel(self._group, self._agreement, self._deadline_s)
        return self._gloo is not None

    def channel(self) -> "GlooChannel":
        """Return the Gloo group."""
        assert self._gloo
        return self._gloo

    def check_peers(self, where: str) -> BaseException | None:
        """Check PyTorch's store for another rank that has left DLCP."""
        left = self._agreement.latest(LEFT)
        return PeerAbortedError(f"rank {left[0]} has left DLCP: {left[1]}") if left else None

    def publish_left(self, reason: str) -> None:
        """Announce in PyTorch's store that this rank has left DLCP."""
        self._agreement.publish(LEFT, reason)

    def publish_failed(self, reason: str) -> None:
        """Announce the same: the others may wait for nothing at the moment, and would not notice."""
        with contextlib.suppress(RuntimeError):  # the store ended with its rank
            self.publish_left(reason)

    def close(self) -> None:
        """Destroy the Gloo group."""
        gloo, self._gloo = self._gloo, None
        if gloo:
            gloo.close()


class GlooChannel:
    """A process group as a recovery channel.

    Parameters
    ----------
    group
        A Gloo group of the same ranks, for this purpose only.
    agreement
        Where ranks announce that they have left DLCP, which shows the ones that have not.
    """

    def __init__(self, group: dist.ProcessGroup, agreement: Agreement) -> None:
        self.group, self.agreement = group, agreement

    def gather(self, item: Any) -> dict[int, Any]:
        """Return every rank's item, by rank."""
        items: list[Any] = [None] * len(self.agreement.ranks)
        with self._naming_absent():
            dist.all_gather_object(items, (self.agreement.rank, item), group=self.group)
        return dict(items)

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over all ranks."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        with self._naming_absent():
            dist.all_reduce(tensor, group=self.group)
        total: NDArray[Any] = tensor.numpy()
        return total

    def close(self) -> None:
        """Destroy the group."""
        destroy_group(self.group)
        del self.group

    @contextlib.contextmanager
    def _naming_absent(self) -> Iterator[None]:
        """Add to errors the ranks that have not left DLCP, and so have probably ended, according to the store."""
        try:
            yield
        except RuntimeError as error:
            absent: list[int] = []
            with contextlib.suppress(RuntimeError):
                absent = [rank for rank in self.agreement.ranks if not self.agreement.published(LEFT, [rank])]
            if not absent:
                raise
            who = ", ".join(f"rank {rank}" for rank in absent)
            raise PeerSilentError(f"{error} (not there: {who})") from error


def open_channel(group: dist.ProcessGroup | None, agreement: Agreement, deadline_s: float) -> GlooChannel | None:
    """Make a Gloo group of the same ranks; all must call it. Return None, with a warning, if that fails."""
    try:
        return GlooChannel(own_gloo_group(group, deadline_s), agreement)
    except (RuntimeError, ValueError) as problem:
        log.warning("DLCP has no Gloo group for recovery, so a failure will be an error: %s", problem)
        return None


def own_gloo_group(group: dist.ProcessGroup | None, deadline_s: float) -> dist.ProcessGroup:
    """Make a Gloo group of the same ranks; all must call it, and it fails on all if it fails on one."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    some = len(ranks) < dist.get_world_size()
    wait = timedelta(seconds=deadline_s)
    with _connecting_at_once():
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=wait, backend="gloo", use_local_synchronization=some)
    return made


@contextlib.contextmanager
def _connecting_at_once() -> Iterator[None]:
    """Let Gloo connect all ranks of a new group now, whatever the user has set.

    A group that connects when it is needed would wait a minute for a rank that has died by then, instead of noticing
    that its connection broke.
    """
    lazy = os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    try:
        yield
    finally:
        if lazy is not None:
            os.environ["TORCH_GLOO_LAZY_INIT"] = lazy


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group of :func:`own_gloo_group`, if PyTorch has not yet. The caller has to drop its reference.

    Only then do the group's threads end. One that releases a tensor while Python ends aborts the process.
    """
    with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # it ended with the default group
        dist.destroy_process_group(group)


def framework_route(group: dist.ProcessGroup | None, device: torch.device) -> FrameworkRoute:
    """Describe a process group that may average tensors of a device instead of DLCP."""
    # The future of an all-reduce on a GPU is resolved when it has been queued there.
    return FrameworkRoute(str(dist.get_backend(group)), device.type == "cpu")


# Operations ----------------------------------------------------------------------------------------------------------


def scale_of(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM: a number or a tensor. Before PyTorch 2.13, it has no attribute for that."""
    return op.__getstate__()[1]


# Profiling -----------------------------------------------------------------------------------------------------------


def profiled(name: str, what: str = "") -> contextlib.AbstractContextManager[Any]:
    """Return a named profiler range as a context manager; a no-op while no profiler is active.

    Parameters
    ----------
    what
        Its object, which the profiler shows next to the name if it records shapes.
    """
    if not profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return profiler.record_function(f"dlcp: {name}", what)
