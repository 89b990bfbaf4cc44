# SPDX-License-Identifier: Apache-2.0
"""Compile the kernel, and cache the result on disk."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

AVAILABLE: Final = importlib.util.find_spec("numba") is not None
"""Whether Numba is installed. Without it the functions stay plain Python, which is too slow to be useful."""
_KEPT: Final = 8
"""How many compiled versions of the kernel stay on disk; not tuned."""
_SHARED: Final = (
    *("dlcp.sim.arithmetic", "dlcp.sim.jit", "dlcp.sim.packet_engine", "dlcp.sim.plan", "dlcp.sim.rules"),
    "dlcp.wire.header",
)
"""Modules outside the kernel package whose constants and rules are compiled into it."""


def call(function: _F) -> _F:
    """Compile a function that other kernel functions call."""
    return _jit(function)


def inlined(function: _F) -> _F:
    """Compile a function inline into its callers: for the per-packet path, where calls cost 5 to 10 % of a run."""
    return _jit(function, inline="always")


def shared(function: _F) -> _F:
    """Make a Python function callable from the kernel too; the reference still calls it as Python."""
    if not AVAILABLE:
        return function
    import numba.extending

    marked: _F = numba.extending.register_jitable(function)
    return marked


def entry(function: _F) -> _F:
    """Compile a function that Python calls, and cache the result on disk."""
    with _cache_folder() as kept:
        return _jit(function, cache=kept, nogil=True)


def _jit(function: _F, **options: Any) -> _F:
    if not AVAILABLE:
        return function
    import numba

    compiled: _F = numba.njit(**options)(function)
    return compiled


@contextmanager
def _cache_folder() -> Iterator[bool]:
    """Point Numba's cache at a folder named after a hash of all kernel sources; yield whether results are cached.

    By default, Numba checks only the file of the compiled function, not the files of the functions it calls.
    """
    from dlcp.switch import cache_directory

    base = cache_directory()
    if base is None or not AVAILABLE:
        yield False
        return
    config: Any = importlib.import_module("numba").config
    numba_version = importlib.metadata.version("numba")
    digest = hashlib.sha256(f"{numba_version} {os.environ.get('NUMBA_BOUNDSCHECK', '')}".encode())
    folder = Path(__file__).parent / "kernel"
    shared = (Path(str(importlib.import_module(name).__file__)) for name in _SHARED)
    for source in (*sorted(folder.glob("*.py")), *shared):
        digest.update(source.read_bytes())
    kernels = base.parent / "sim"
    kernels.mkdir(exist_ok=True, mode=0o700)
    before = config.CACHE_DIR
    version = kernels / digest.hexdigest()[:16]
    config.CACHE_DIR = str(version)
    if not version.is_dir():
        version.mkdir(exist_ok=True, mode=0o700)
        _prune(kernels)
    try:
        yield True
    finally:
        config.CACHE_DIR = before


def _prune(kernels: Path) -> None:
    """Remove all but the latest versions, even while another process does the same."""

    def age(version: Path) -> float:
        try:
            return -version.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    for version in sorted(kernels.iterdir(), key=age)[_KEPT:]:
        shutil.rmtree(version, ignore_errors=True)
