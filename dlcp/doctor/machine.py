# SPDX-License-Identifier: Apache-2.0
"""What the machine and its Python have to offer."""

import importlib
import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from dlcp import __version__
from dlcp.doctor.findings import Diagnosis, Status
from dlcp.transport import shared_memory
from dlcp.transport.shared_memory import SharedMemoryRendezvous

_MEET_S: Final = 2.0
OLDEST_PYTHON: Final = (3, 10)
OLDEST_TORCH: Final = (2, 4)
OLDEST_KERNEL: Final = (5, 0)
"""The first Linux with both UDP_SEGMENT (4.18) and UDP_GRO (5.0)."""


def examine_kernel() -> Diagnosis:
    """Name the operating system."""
    release = platform.release()
    data = {"system": platform.system(), "release": release, "machine": platform.machine()}
    if sys.platform != "linux":
        fix = "run the ranks on Linux, in a container or a virtual machine"
        return Diagnosis("system", Status.MISSING, f"{platform.system()} {release}: DLCP needs Linux", fix, data)
    text = f"Linux {release}, {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs for this process"
    if version_of(release) < OLDEST_KERNEL:
        return Diagnosis("system", Status.NOTE, text, "a kernel of 5.0 or newer moves whole bursts of packets", data)
    return Diagnosis("system", Status.OK, text, data=data)


def examine_python() -> Diagnosis:
    """Name DLCP's version and Python's."""
    found = platform.python_version()
    text = f"DLCP {__version__} on Python {found}, {sys.executable}"
    data = {"dlcp": __version__, "python": found}
    if sys.version_info < OLDEST_PYTHON:
        return Diagnosis("Python", Status.MISSING, text, "Python 3.10 or newer", data)
    return Diagnosis("Python", Status.OK, text, data=data)


def examine_torch() -> Diagnosis:
    """Examine PyTorch: whether it is installed, and can communicate."""
    found = _version("torch")
    data: dict[str, Any] = {"torch": found}
    install = "pip install 'dlcp[torch]' (a machine that only switches or serves parameters needs none)"
    if found is None:
        return Diagnosis("PyTorch", Status.MISSING, "not installed", install, data)
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return Diagnosis("PyTorch", Status.MISSING, f"{found} does not load: {error}", install, data)
    if version_of(found) < OLDEST_TORCH:
        return Diagnosis("PyTorch", Status.MISSING, f"{found} is too old", "PyTorch 2.4 or newer", data)
    if not dist.is_available():
        fix = "a build of PyTorch with USE_DISTRIBUTED=1"
        return Diagnosis("PyTorch", Status.MISSING, f"{found} was built without torch.distributed", fix, data)
    data["cuda_devices"] = devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    data["backends"] = backends
    where = f"{devices} CUDA device{'s' * (devices != 1)}" if devices else "CPU"
    return Diagnosis("PyTorch", Status.OK, f"{found}, {where}, {', '.join(backends) or 'no backend'}", data=data)


def examine_native() -> Diagnosis:
    """Examine which data path is in use: the native extension, or NumPy."""
    subject, forbidden = "data path", os.environ.get("DLCP_NATIVE") == "0"
    try:
        native = importlib.import_module("dlcp.native")
    except ImportError:
        return Diagnosis(subject, Status.NOTE, "NumPy: this DLCP came without compiled code", data={"native": False})
    status, compiled = str(native.status()), native.library() is not None
    data = {"native": compiled, "native_status": status}
    if compiled:
        return Diagnosis(subject, Status.OK, status, data=data)
    # The status says what to do about it, except where a variable forbids it.
    fix = "unset DLCP_NATIVE" if forbidden else ""
    return Diagnosis(subject, Status.NOTE, f"{status} (two to three times slower)", fix, data)


def examine_extras() -> Diagnosis:
    """Name the optional packages that are there."""
    found = {name: _version(name) for name in ("numpy", "numba", "rich", "msgspec", "scikit-learn")}
    there = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    absent = ", ".join(name for name, version in found.items() if not version)
    text = there + (f"; without {absent}" if absent else "")
    return Diagnosis("packages", Status.OK, text, data={"packages": found})


def examine_shared_memory() -> Diagnosis:
    """Examine whether ranks of this machine can exchange packets through memory, by connecting two."""
    subject, fix = "shared memory", ""
    try:
        if not shared_memory.supported():
            why, fix = (
                "this Python has no memfd_create, eventfd or seals",
                "a Python that was built on a recent Linux",
            )
        elif not shared_memory.available():
            why, fix = "the compiled engine is not in use", "see the data path, below"
        elif _two_meet():
            text = "ranks in one network namespace exchange packets through memory"
            return Diagnosis(subject, Status.OK, text, data={"shared_memory": True})
        else:
            why = "two ranks could not connect"
    except OSError as error:
        why = str(error)
        fix = "in a container, one whose seccomp profile lets memfd_create and Unix sockets through"
    text = f"{why}: ranks of this machine exchange packets through their sockets"
    return Diagnosis(subject, Status.NOTE, text, fix, {"shared_memory": False})


def _two_meet() -> bool:
    with SharedMemoryRendezvous() as first, SharedMemoryRendezvous() as second, ThreadPoolExecutor(2) as pool:
        common: dict[str, Any] = {"job": 0, "token": 1, "timeout_s": _MEET_S}
        met = [
            pool.submit(first.connect, 0, {1: second.name}, **common),
            pool.submit(second.connect, 1, {0: first.name}, **common),
        ]
        both = [each.result() for each in met]
    found = all(shared.ranks for shared in both)
    for shared in both:
        shared.close()
    return found


def examine_namespaces() -> Diagnosis:
    """Examine whether ``dlcp demo`` can give each worker a network namespace; training needs none."""
    from dlcp import namespace

    works, reason = namespace.available()
    root = os.geteuid() == 0
    data = {"root": root, "namespaces": works}
    who = "root" if root else "not root"
    if works:
        return Diagnosis("namespaces", Status.OK, f"{who}; network namespaces and veth links work", data=data)
    userns = Path("/proc/sys/user/max_user_namespaces")
    allowed = not root and userns.is_file() and int(userns.read_text()) > 0
    text = f"{who}; no network namespaces ({reason})"
    if allowed:
        text += "; the demo tries a user namespace of its own"
    return Diagnosis("namespaces", Status.OK, f"{text}; only the demo uses them, and goes on without", data=data)


def version_of(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
