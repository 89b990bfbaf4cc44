# SPDX-License-Identifier: Apache-2.0
"""The compiled part of DLCP, and whether it is here.

``*.c`` beside this file become one shared library when DLCP is installed, if there is a C compiler. It is loaded with
ctypes: it needs no Python headers, no binding library, serves every version of Python, and runs outside the GIL.
Whatever it does, DLCP also does in NumPy, with the same results but slower.
"""

import ctypes
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "_native.abi3.so"
_AT_BUFFER: Any = (ctypes.c_char * 0).from_buffer
_switched_off: ContextVar[bool] = ContextVar("dlcp_native_switched_off", default=False)


@dataclass(frozen=True, slots=True)
class Native:
    """The compiled library, or None and why it is not in use."""

    library: ctypes.CDLL | None
    status: str


def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None where NumPy has to do: it was not compiled, or ``DLCP_NATIVE`` is 0."""
    return None if _switched_off.get() else _load().library


@contextmanager
def switched_off() -> Iterator[None]:
    """Have NumPy do it within a ``with`` block, in this thread: to compare the two."""
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)


def status() -> str:
    """Say in a line whether the compiled library is in use, and if not, why: for ``dlcp doctor``."""
    return _load().status


def address(array: NDArray[np.generic] | memoryview) -> int:
    """Return where a contiguous array lies, as an argument for a function of the library; keep the array meanwhile.

    An empty one lies nowhere: 0.
    """
    if not len(array):
        return 0
    try:
        # Eight times as fast as array.ctypes.data, which read-only arrays have too.
        return ctypes.addressof(_AT_BUFFER(array))
    except TypeError:
        return np.asarray(array).ctypes.data


def digest_of_sources() -> str | None:
    """Return the SHA-256 of the C sources beside this file, or None where there are none, as in a wheel."""
    sources = sorted(path for path in FOLDER.iterdir() if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest() if sources else None


@cache
def _load() -> Native:
    if os.environ.get("DLCP_NATIVE") == "0":
        return Native(None, "NumPy: DLCP_NATIVE=0")
    if not LIBRARY.exists():
        found = any(map(shutil.which, ("cc", "gcc", "clang")))
        why = "compiling failed when DLCP was installed" if found else "no C compiler; install one"
        return Native(None, f"NumPy: {why}; `pip install -v` DLCP again to see more")
    try:
        native = ctypes.CDLL(str(LIBRARY))
        native.dlcp_sources.restype = ctypes.c_char_p
        compiled_from = native.dlcp_sources().decode()
    except (OSError, AttributeError) as error:
        return Native(None, f"NumPy: {LIBRARY} does not load: {error}")
    # A library of other sources may take other arguments than it is given.
    if digest_of_sources() not in (None, compiled_from):
        return Native(None, "NumPy: the C sources have changed since they were compiled; `make test` does it again")
    return Native(native, f"native: {LIBRARY}")
