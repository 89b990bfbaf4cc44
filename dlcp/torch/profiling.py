# SPDX-License-Identifier: Apache-2.0
"""DLCP's work in the framework's threads, as ranges in PyTorch's profiler."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch.autograd import profiler

_NOTHING: Final = nullcontext()


def profiled(name: str, what: str = "") -> AbstractContextManager[Any]:
    """Return a named profiler range as a context manager; a no-op while no profiler is active.

    Parameters
    ----------
    what
        Its object, which the profiler shows beside the name if it records shapes.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"dlcp: {name}", what)
