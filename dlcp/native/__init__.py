# SPDX-License-Identifier: Apache-2.0
"""The compiled part of DLCP: the transport's engine, and what is done for every value or packet.

``*.c`` beside this file become one shared library when DLCP is installed. It is loaded with ctypes: it needs no Python
headers and no binding library, serves every version of Python, and runs outside the GIL.
"""

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "_native.abi3.so"
_REMEDY: Final = (
    "install a C compiler (Debian and Ubuntu: apt-get install build-essential) and run `pip install --editable .` in "
    "DLCP's source tree; or install a wheel that `make dist` has built, and run Python outside of the source tree"
)
_AT_BUFFER: Any = (ctypes.c_char * 0).from_buffer


@cache
def library() -> ctypes.CDLL:
    """Load the compiled library and return it.

    Raises
    ------
    ImportError
        It is missing, does not load, or was compiled from other sources; the message says what to do.
    """
    if not LIBRARY.exists():
        raise _refusal(f"DLCP was not compiled, {LIBRARY} is missing: {_REMEDY}")
    try:
        native = ctypes.CDLL(str(LIBRARY))
        native.dlcp_sources.restype = ctypes.c_char_p
        compiled_from = native.dlcp_sources().decode()
    except (OSError, AttributeError) as error:
        raise _refusal(f"DLCP's compiled library does not load, {error}: {_REMEDY}") from error
    # A library of other sources may take other arguments than it is given.
    if digest_of_sources() not in (None, compiled_from):
        raise _refusal(
            f"the C sources of DLCP have changed since {LIBRARY} was compiled: run `pip install --editable .`"
        )
    return native


def _refusal(words: str) -> ImportError:
    return ImportError(words, name=f"{__name__}._native", path=str(LIBRARY))


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
