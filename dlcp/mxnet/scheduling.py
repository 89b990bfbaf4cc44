# SPDX-License-Identifier: Apache-2.0
"""Schedule DLCP's work on MXNet's engine, which starts it when its arrays are ready.

MXNet 1.9.1, the last release, offers this in its C interface (``include/mxnet/c_api.h`` in its package), which its own
Python package uses in the same way. Operations are asynchronous: DLCP reports their completion, from any thread.
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from mxnet.base import _LIB, NDArrayHandle, check_call
from numpy.typing import NDArray

Work = Callable[[Callable[[], None]], None]
"""Called on a thread of the engine, with a function to call when the work is done."""

_CPU: Final = 1
_PRIORITIZED: Final = 3
"""``FnProperty::kCPUPrioritized``: threads of its own, so that computations do not delay DLCP."""


class _Completion(ctypes.Structure):
    """``mxnet::engine::CallbackOnComplete`` of ``include/mxnet/engine.h``: it may be copied and called later."""

    _fields_ = (("function", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("parameter", ctypes.c_void_p))


class _Context(ctypes.Structure):
    """``mxnet::Context``: the kind of a device, and its number."""

    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_pushed: dict[int, Work] = {}
_numbers = itertools.count(1)


def push(work: Work, *, reads: Sequence[Any], writes: Sequence[Any], priority: int = 0) -> None:
    """Schedule work for when no operation writes ``reads`` or uses ``writes`` any more.

    Parameters
    ----------
    work
        Must not raise.
    reads, writes
        MXNet arrays; none may be in both.
    priority
        Higher priorities run first.
    """
    number = next(_numbers)
    _pushed[number] = work
    check_call(
        _LIB.MXEnginePushAsyncND(
            _run,
            ctypes.c_void_p(number),
            None,
            ctypes.byref(_Context(_CPU, 0)),
            _handles(reads),
            ctypes.c_int(len(reads)),
            _handles(writes),
            ctypes.c_int(len(writes)),
            ctypes.byref(ctypes.c_int(_PRIORITIZED)),
            ctypes.c_int(priority),
            b"dlcp",
            ctypes.c_bool(False),
        )
    )


def memory(array: Any) -> NDArray[Any]:
    """Return a view of an MXNet array on the CPU, in MXNet's ordinary layout; valid as long as the array exists."""
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    kind = np.dtype(array.dtype)
    held = (ctypes.c_byte * (array.size * kind.itemsize)).from_address(pointer.value or 0)
    values: NDArray[Any] = np.frombuffer(held, kind).reshape(array.shape)
    return values


def _handles(arrays: Sequence[Any]) -> Any:
    return (NDArrayHandle * len(arrays))(*(array.handle for array in arrays))


def _on_turn(_: int, completion: int, number: int) -> None:
    once = _Completion.from_buffer_copy(ctypes.string_at(completion, ctypes.sizeof(_Completion)))

    def done() -> None:
        _Function(once.function)(once.engine, once.parameter, None)

    _pushed.pop(number)(done)


_run = _Function(_on_turn)
