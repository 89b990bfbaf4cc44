# SPDX-License-Identifier: Apache-2.0
"""DLCP for MXNet: a KVStore that sums gradients over all workers, each layer as soon as it is computed.

The lines that a training script needs::

    import dlcp.mxnet

    trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_dlcp")

``dlcp launch -n 4 python script.py`` starts it on four workers. As with MXNet's ``dist_sync``, gradients are summed:
``trainer.step`` takes the batch size of all workers together.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import mxnet as mx
import numpy as np
from mxnet.kvstore import KVStoreBase
from numpy.typing import NDArray

import dlcp.session
from dlcp.collectives.reduction_rules import SUM
from dlcp.host.closing import ExitCallback
from dlcp.mxnet.scheduling import memory, push
from dlcp.session import Group, Options
from dlcp.session.training_session import reason_of_exit

__all__ = ["NAME", "Dist_DLCP"]

NAME: Final = "dist_dlcp"
"""The store's name for MXNet. It contains ``dist``, because trainers ignore other stores."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A key: its name in the group, the exchanged array, a view of that array's memory, and its priority."""

    name: str
    held: Any
    values: NDArray[Any]
    priority: int = 0


class Dist_DLCP(KVStoreBase):  # type: ignore[misc]  # noqa: N801 - MXNet is not annotated, and registers the class's name
    """Sums gradients with DLCP. The trainer updates the parameters, as with ``update_on_kvstore=False``.

    ``pushpull`` returns at once. The engine waits for each gradient separately, and operations on a sum wait for that
    sum. The engine does not accept errors. So if an exchange fails, its gradients become NaN, and the next call raises
    the error.

    Parameters
    ----------
    options
        By default ``Options()``.
    group
        An existing group.

    Raises
    ------
    RuntimeError
        MXNet runs its ``NaiveEngine``, which does not support asynchronous operations.
    """

    def __init__(self, options: Options | None = None, *, group: Group | None = None) -> None:
        if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
            raise RuntimeError(
                "dist_dlcp needs an engine that runs operations concurrently: unset MXNET_ENGINE_TYPE=NaiveEngine"
            )
        self.group = group or dlcp.session.join(options)
        self._entries: dict[str, _Entry] = {}
        self._order: list[str] = []
        """Names in the order registered with the group; empty until the first push."""
        self._step: dict[str, _Entry] = {}
        """Entries pushed since the step began."""
        self._turn = mx.nd.zeros((1,), ctx=mx.cpu())
        """Written when a step ends, and read by all operations of a step."""
        self._error: BaseException | None = None
        self._factor = 1 if self.group.options.combine == SUM else self.group.size
        """Factor on the group's result: a KVStore sums, while a group averages unless its options differ."""
        self._exit = ExitCallback(self._at_exit)

    # MXNet's interface ------------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The store's name."""
        return NAME

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.group.rank

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.group.size

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False: the store does not update parameters, the only capability that MXNet asks about."""
        return False

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Write worker 0's values into ``out`` on all workers, and into the store."""
        self._end_step()
        self._turn.wait_to_read()
        self._check()
        for one, values, outs in _pairs(key, value, out):
            entry = self._entry(one, values[0])
            values[0].copyto(entry.held)
            entry.held.wait_to_read()
            self.group.broadcast(entry.values)
            for target in outs:
                entry.held.copyto(target)

    def init(self, key: Any, value: Any) -> None:
        """Put worker 0's values into the store."""
        self.broadcast(key, value, out=[])

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum values over all workers, into ``out`` or in place; higher priorities are exchanged first.

        Raises
        ------
        TransportError
            An earlier exchange has failed.
        """
        for one, values, outs in _pairs(key, value, value if out is None else out):
            self._push(self._entry(one, values[0]), values, priority)
            self._pull(one, outs)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum values over all workers, into the store."""
        for one, values, _ in _pairs(key, value, []):
            self._push(self._entry(one, values[0]), values, priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the last sum, or before the first one the broadcast values, into ``out``."""
        for one, _, outs in _pairs(key, out, out):
            self._pull(one, outs)

    def barrier(self) -> None:
        """Wait until all workers have called this, and all pushed work is done."""
        mx.nd.waitall()
        self.group.barrier()
        self._check()

    def set_optimizer(self, optimizer: Any) -> None:
        """Raise NotImplementedError: no server updates parameters."""
        raise NotImplementedError(
            "dist_dlcp sums gradients and leaves updating to the workers: set update_on_kvstore=False"
        )

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Raise NotImplementedError: MXNet's compression works with its own stores only."""
        raise NotImplementedError("dist_dlcp does not support MXNet's compression: leave out compression_params")

    def close(self) -> None:
        """Wait until all pushed work is done, and leave the group."""
        if self._exit.is_fork:
            return
        self._exit.cancel()
        mx.nd.waitall()
        self.group.close()

    def _at_exit(self) -> None:
        if reason := reason_of_exit(self.rank):
            self.group.close(reason)  # first, because the pushed work may block on this process
        self.close()

    # Implementation ---------------------------------------------------------------------------------------------------

    def _entry(self, key: Any, like: Any) -> _Entry:
        name = f"parameter {key}"
        entry = self._entries.get(name)
        if entry is None:
            if like.stype != "default":
                raise TypeError(f"{name} is {like.stype}; dist_dlcp sums dense gradients only")
            if self._order:
                raise ValueError(f"{name} is new; init or broadcast all keys before the first push")
            held = mx.nd.zeros(like.shape, ctx=mx.cpu(), dtype=like.dtype)
            entry = self._entries[name] = _Entry(name, held, memory(held))
        return entry

    def _push(self, entry: _Entry, values: list[Any], priority: int) -> None:
        self._check()
        if entry.name in self._step:
            self._end_step()
        if not self._order:
            self._order = list(self._entries)
            self.group.register(self._order)
        entry.priority = priority
        self._step[entry.name] = entry
        if len(values) == 1:
            values[0].copyto(entry.held)
        else:
            mx.nd.add_n(*(each.as_in_context(mx.cpu()) for each in values), out=entry.held)
        push(partial(self._start, entry), reads=[self._turn], writes=[entry.held], priority=priority)

    def _pull(self, key: Any, outs: list[Any]) -> None:
        for target in outs:
            self._entries[f"parameter {key}"].held.copyto(target)

    def _start(self, entry: _Entry, done: Any) -> None:
        try:
            self.group.start(entry.name, entry.values).add_done_callback(partial(self._on_averaged, entry, done))
        except Exception as error:
            self._fail(entry, error)
            done()

    def _on_averaged(self, entry: _Entry, done: Any, averaged: Any) -> None:
        if error := averaged.exception():
            self._fail(entry, error)
        else:
            np.multiply(entry.values, self._factor, out=entry.values)
        done()

    def _end_step(self) -> None:
        """Schedule the end of the step, after all work pushed in it; called when another step or operation begins."""
        if self._step:
            entries, self._step = self._step, {}
            work = partial(self._on_step_done, list(entries.values()))
            push(work, reads=[entry.held for entry in entries.values()], writes=[self._turn])

    def _on_step_done(self, entries: list[_Entry], done: Any) -> None:
        try:
            self.group.end_step()
            urgent = [entry.name for entry in sorted(entries, key=lambda entry: -entry.priority)]
            if urgent != [name for name in self._order if name in urgent]:
                # The first step shows the priorities; until then the order is that of the keys' initialisation.
                self._order = urgent
                self.group.register(urgent)
        except Exception as error:
            self._error = self._error or error
        done()

    def _fail(self, entry: _Entry, error: BaseException) -> None:
        entry.values.fill(np.nan)
        self._error = self._error or error

    def _check(self) -> None:
        if self._error:
            raise self._error


def _pairs(key: Any, value: Any, out: Any) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Yield each key with its values and outputs, both as lists by device; MXNet passes one key or a list of keys."""
    if isinstance(key, list | tuple):
        for number, one in enumerate(key):
            yield one, _listed(value[number]), _listed(out[number]) if out else []
    else:
        yield key, _listed(value), _listed(out)


def _listed(arrays: Any) -> list[Any]:
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]


KVStoreBase.register(Dist_DLCP)  # MXNet uses the lower-case class name
