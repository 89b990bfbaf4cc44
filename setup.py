# SPDX-License-Identifier: Apache-2.0
"""The packages of DLCP and its compiled part, ``dlcp/native/*.c``; all else about it stands in pyproject.toml.

cffi writes the part of that which Python calls, from what ``engine.h`` declares. Without a C compiler or Python's
headers the installation fails and says what to do; a wheel needs neither.
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "DLCP does not support free-threaded builds of Python, such as 3.13t, which lack the stable ABI that its "
        "compiled library uses: install it with an ordinary build of Python"
    )

from cffi import FFI
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, PlatformError

FOLDER = Path(__file__).parent / "dlcp" / "native"
SOURCES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".c", ".h"))


def digest() -> str:
    """Return the SHA-256 of the sources, as :func:`dlcp.native.digest_of_sources` finds it."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()


def relative(suffix: str) -> list[str]:
    """Return the paths of the sources of one kind, from this folder, as setuptools wants them."""
    return [f"dlcp/native/{path.name}" for path in SOURCES if path.suffix == suffix]


def interface() -> FFI:
    """Return what Python may call: everything that ``engine.h`` declares, and the digest of the sources."""
    lines = (FOLDER / "engine.h").read_text().splitlines()
    ffi = FFI()
    ffi.cdef("\n".join(line for line in lines if not line.startswith("#")))
    ffi.cdef("static const char *const SOURCES;")
    ffi.set_source("dlcp.native._native", f'#include "engine.h"\nstatic const char *const SOURCES = "{digest()}";')
    return ffi


REMEDY = (
    "DLCP's engine is written in C, and compiling it failed as shown above: install a C compiler and Python's headers "
    "(Debian and Ubuntu: apt-get install build-essential python3-dev) and run pip again, or install a wheel that `make "
    "dist` has built"
)
if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
    REMEDY += ". DLCP is not tested with musl (Alpine): a system with glibc, such as Debian, is known to work"


class ExplainedBuild(build_ext):
    """Ends a failed build with what to do about it, in the last line of what pip shows."""

    def build_extension(self, ext: Extension) -> None:
        """Compile, together with what cffi writes."""
        written = Path(self.build_temp) / "interface.c"
        written.parent.mkdir(parents=True, exist_ok=True)
        interface().emit_c_code(str(written))
        ext.sources.append(str(written))
        try:
            super().build_extension(ext)
        except (CCompilerError, OSError, PlatformError) as error:
            print(error, file=sys.stderr)
            raise CompileError(REMEDY) from error


if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": ExplainedBuild},
        # dlcp/ links to controller/, sim/ and p4/build, which stand at the top of a checkout.
        packages=[*find_packages(include=["dlcp", "dlcp.*"]), "dlcp.switch.p4"],
        ext_modules=[
            Extension(
                "dlcp.native._native",
                sources=relative(".c"),
                depends=relative(".h"),
                include_dirs=["dlcp/native"],
                # Sums are rounded as NumPy rounds them: no multiply-and-add in one. Calls within the library stay
                # within it, even if another library of the process has a function of that name.
                extra_compile_args=[
                    "-std=gnu11",
                    "-O3",
                    "-UNDEBUG",  # Python's own flags define it: an engine checks itself in wheels, too
                    "-ffp-contract=off",
                    "-fvisibility=hidden",
                    "-Wall",
                    "-Wextra",
                ],
                libraries=["m"],
                py_limited_api=True,
            )
        ],
        options={
            # A source that is gone or a flag that is new must count as a change too.
            "build_ext": {"force": True},
            # It uses only what every Python from 3.10 on keeps as it is, so one wheel serves them all.
            "bdist_wheel": {"py_limited_api": "cp310"},
        },
    )
