# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of this machine, whose methods are called all at once; no wait is without a deadline.

They talk to the program that started them over pipes, so that neither meeting at a barrier nor collecting times uses
the network that is being measured.
"""

import contextlib
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, untyped

from dlcp.host.closing import Closing
from dlcp.host.processes import Fork

CALL_DEADLINE_S: Final = 120.0
"""How long a call may take on the slowest rank, by default. Far above any run's time."""
_STOP_DEADLINE_S: Final = 5.0


class RankError(RuntimeError):
    """A rank failed, ended or did not answer in time; the message names it and the call."""


class Ranks(Closing):
    """Processes that each hold an object whose methods are called on all of them at once; a context manager.

    Parameters
    ----------
    make
        Makes the object of a rank: ``make(rank, *arguments)``. Has to be importable.
    arguments
        The same for all ranks, and picklable.
    namespaces
        Where each rank runs: the path of a network namespace, or None for this process's own.

    Raises
    ------
    RankError
        A rank could not make its object.
    """

    def __init__(self, make: Callable[..., Any], arguments: Sequence[Any], namespaces: Sequence[str | None]) -> None:
        self._forks: list[Fork] = []
        try:
            for rank, namespace in enumerate(namespaces):
                serve = (rank, make, tuple(arguments))
                self._forks.append(Fork(f"rank {rank}", _serve, serve, namespace=namespace))
            self._collect("start", CALL_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, deadline_s: float = CALL_DEADLINE_S) -> list[Any]:
        """Call a method on all ranks at once and return what each returned, rank 0 first.

        Raises
        ------
        RankError
            A rank's method raised, its process ended, or it took longer than ``deadline_s``.
        """
        for rank, fork in enumerate(self._forks):
            try:
                fork.channel.send((method, arguments))
            except OSError as error:
                raise RankError(f"rank {rank} has ended, {method} could not be asked of it: {error}") from error
        return self._collect(method, deadline_s)

    def close(self) -> None:
        """End the processes, politely first."""
        for fork in self._forks:
            fork.channel.close()
        end_s = time.monotonic() + _STOP_DEADLINE_S
        for fork in self._forks:
            fork.join(end_s - time.monotonic())
            fork.close()
        self._forks = []

    def _collect(self, method: str, deadline_s: float) -> list[Any]:
        end_s = time.monotonic() + deadline_s
        return [self._answer(rank, method, end_s, deadline_s) for rank in range(len(self._forks))]

    def _answer(self, rank: int, method: str, end_s: float, deadline_s: float) -> Any:
        fork = self._forks[rank]
        try:
            if not fork.channel.poll(max(0.0, end_s - time.monotonic())):
                raise RankError(f"rank {rank} has not answered {method} within {deadline_s:.0f} s")
            worked, value = fork.channel.recv()
        except (EOFError, OSError) as error:
            status = fork.join(_STOP_DEADLINE_S)
            raise RankError(f"rank {rank} ended during {method}, exit status {status}") from error
        if not worked:
            raise RankError(f"rank {rank} failed in {method}:\n{value}")
        return value


def join_gloo(rank: int, ranks: int, store: str, interface: str) -> None:
    """Let a rank, which computes with one thread, be one of PyTorch's default group over Gloo.

    Parameters
    ----------
    store
        Path of the file by which the ranks find each other.
    interface
        That Gloo uses.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    limit = timedelta(seconds=CALL_DEADLINE_S)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit)


def _serve(channel: Connection, rank: int, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Carry out the commands of the channel until it is closed."""
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    held: list[Any] = []
    _reply(channel, lambda: held.append(make(rank, *arguments)))
    while True:
        try:
            method, parameters = channel.recv()
        except (EOFError, OSError):
            break
        _reply(channel, partial(getattr(held[0], method), *parameters))
    if held and hasattr(held[0], "close"):
        held[0].close()
    os._exit(0)  # a process group whose peers are gone does not end by itself


def _end_with(channel: Connection) -> None:
    """End this process soon after the other end of the channel has: the program that calls may have been killed."""
    ends = select.poll()
    ends.register(channel.fileno(), 0)  # poll reports a hang-up in any case
    ends.poll()
    time.sleep(_STOP_DEADLINE_S)
    os._exit(1)


def _reply(channel: Connection, action: Callable[[], Any]) -> None:
    try:
        answer = (True, action())
    except Exception:
        answer = (False, traceback.format_exc())
    with contextlib.suppress(OSError):
        channel.send(answer)
