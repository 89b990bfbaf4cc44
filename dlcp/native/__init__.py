# SPDX-License-Identifier: Apache-2.0
"""The compiled part of DLCP: the transport's engine, and what is done for every value or packet.

``*.c`` next to this file become one module when DLCP is installed. Python calls it as ``lib.dlcp_...``, and ``ffi`` is
its interface to memory, as in cffi. ``engine.h`` declares and documents everything in it. Calls run outside the GIL.
The caller must keep an array that it passes to C (``ffi.from_buffer``) for as long as C may use it.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
LIBRARY: Final = FOLDER / "_native.abi3.so"

_REMEDY: Final = (
    "install a C compiler and Python's headers (Debian and Ubuntu: apt-get install build-essential python3-dev) and "
    "run `pip install --editable .` in DLCP's source tree; or install a wheel that `make dist` has built, and run "
    "Python outside of the source tree"
)


def digest_of_sources() -> str | None:
    """Return the SHA-256 of the C sources next to this file, or None where there are none, as in a wheel."""
    sources = sorted(path for path in FOLDER.iterdir() if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest() if sources else None


def _refusal(words: str) -> ImportError:
    return ImportError(words, name=f"{__name__}._native", path=str(LIBRARY))


def _unsupported() -> str:
    """Return why DLCP supports no Python of this kind, as a sentence; ``""`` if it does."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "DLCP does not support free-threaded builds of Python, such as 3.13t: use an ordinary build"
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        return (
            "DLCP is not tested with musl (Alpine), and its wheels need glibc: use a system with glibc, such as Debian"
        )
    return ""


try:
    import dlcp.native._native as _native
except ImportError as error:
    if why := _unsupported():
        raise _refusal(f"DLCP's compiled library does not load, {error}. {why}") from None
    if not LIBRARY.exists():
        raise _refusal(f"DLCP was not compiled, {LIBRARY} is missing: {_REMEDY}") from None
    raise _refusal(f"DLCP's compiled library does not load, {error}: {_REMEDY}") from error

ffi: Final[Any] = _native.ffi
lib: Final[Any] = _native.lib
# Other sources may declare other records and arguments than this Python code passes.
if digest_of_sources() not in (None, ffi.string(lib.SOURCES).decode()):
    raise _refusal(f"the C sources of DLCP have changed since {LIBRARY} was compiled: run `pip install --editable .`")
# cffi builds a type when it is first used, and aborts the process if two threads do so at once.
for _name in ffi.list_types()[0]:
    ffi.typeof(f"{_name} *")
