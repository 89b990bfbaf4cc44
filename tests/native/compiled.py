# SPDX-License-Identifier: Apache-2.0
"""The compiled library once more, with other flags, for processes that load it instead of the installed one."""

import os
import runpy
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from dlcp import native

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("dlcp.native._native", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
import dlcp.native
assert dlcp.native.lib is sys.modules[spec.name].lib
"""
"""Has the rest of a script use the library that its first argument names."""


def compiler():
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def can_compile():
    """Whether DLCP's sources are here, and what compiles them."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return (ROOT / "setup.py").exists() and shutil.which(compiler()[0]) is not None and headers.exists()


def build(library, *flags, more=()):
    """Compile the library, with ``more`` sources or objects; return the finished process."""
    interface = library.with_suffix(".c")
    runpy.run_path(str(ROOT / "setup.py"))["interface"]().emit_c_code(str(interface))
    sources = [*sorted(native.FOLDER.glob("*.c")), interface, *more]
    folders = [f"-I{native.FOLDER}", f"-I{sysconfig.get_path('include')}"]
    command = [*compiler(), "-std=gnu11", "-O1", "-g", "-ffp-contract=off", "-fPIC", "-shared", *flags, *folders]
    return subprocess.run(
        [*command, *map(str, sources), "-o", str(library), "-lm"], capture_output=True, timeout=LIMIT_S
    )
