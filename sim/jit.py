# SPDX-License-Identifier: Apache-2.0
"""Compile the kernel, and cache the result on disk."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

_KEPT: Final = 8
"""How many compiled versions of the kernel stay on disk; not tuned."""
_COMPILED: Final = ("engines/flows", "engines/kernel")
"""Packages with compiled functions."""
_SHARED: Final = (
    *(
        f"dlcp.sim.{name}"
        for name in ("arithmetic", "jit", "limits", "rows", "graphs.graph", "network.nodes", "transports.specs")
    ),
    *(f"dlcp.sim.engines.{name}" for name in ("network_tables", "packet_engine", "rules")),
    "dlcp.wire.header",
)
"""Modules outside these packages whose constants and rules are compiled into them."""


def call(function: _F) -> _F:
    """Compile a function that other kernel functions call."""
    return _jit(function)


def inlined(function: _F) -> _F:
    """Compile a function inline into its callers: for the per-packet path, where calls cost 5 to 10 % of a run."""
    return _jit(function, inline="always")


def shared(function: _F) -> _F:
    """Make a Python function callable from the kernel too. The reference calls it as Python, even without Numba."""
    if importlib.util.find_spec("numba") is None:
        return function
    import numba.extending

    marked: _F = numba.extending.register_jitable(function)
    return marked


def entry(function: _F) -> _F:
    """Compile a function that Python calls, and cache the result on disk."""
    import numba

    config: Any = numba.config
    before, folder = config.CACHE_DIR, _cache_folder()
    config.CACHE_DIR = str(folder) if folder else before
    try:
        return _jit(function, cache=folder is not None, nogil=True)
    finally:
        config.CACHE_DIR = before


def _jit(function: _F, **options: Any) -> _F:
    import numba

    compiled: _F = numba.njit(**options)(function)
    return compiled


@cache
def _cache_folder() -> Path | None:
    """Return a folder for Numba's cache, named after a hash of all compiled sources; None if there is no safe place.

    By default, Numba checks only the file of the compiled function, not the files of the functions it calls.
    """
    from dlcp.switch import cache_directory  # only the kernel is compiled

    base = cache_directory()
    if base is None:
        return None
    numba_version = importlib.metadata.version("numba")
    digest = hashlib.sha256(f"{numba_version} {os.environ.get('NUMBA_BOUNDSCHECK', '')}".encode())
    shared = (Path(str(importlib.import_module(name).__file__)) for name in _SHARED)
    compiled = (path for folder in _COMPILED for path in sorted((Path(__file__).parent / folder).glob("*.py")))
    plugins = importlib.import_module("dlcp.sim.transports.plugins")
    own = (Path(inspect.getfile(each)) for each in (*plugins.OWN_TRANSPORTS, *plugins.OWN_DISCIPLINES.values()))
    for source in (*compiled, *shared, *own):
        digest.update(source.read_bytes())
    kernels = base.parent / "sim"
    kernels.mkdir(exist_ok=True, mode=0o700)
    version = kernels / digest.hexdigest()[:16]
    if not version.is_dir():
        version.mkdir(exist_ok=True, mode=0o700)
        _prune(kernels)
    return version


def _prune(kernels: Path) -> None:
    """Remove all but the latest versions, even while another process does the same."""

    def age(version: Path) -> float:
        try:
            return -version.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    for version in sorted(kernels.iterdir(), key=age)[_KEPT:]:
        shutil.rmtree(version, ignore_errors=True)
