# SPDX-License-Identifier: Apache-2.0
"""Compiles the switch program for BMv2 and records what it was compiled from: ``python3 p4/compile.py`` or ``make p4``.

``--check`` compiles nothing, and tells whether what is committed in ``p4/build/`` comes from the sources beside it. The
digest of the sources is the SHA-256 of, for each ``shared/*.p4`` and ``v1model/*.p4`` in the order of their paths below
``p4/``: the path, a zero byte, the file, a zero byte.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

P4_DIR: Final = Path(__file__).resolve().parent
PROGRAM: Final = "v1model/dlcp.p4"
SOURCES: Final = ("shared/*.p4", "v1model/*.p4")
CONFIG: Final = "dlcp.json"
P4INFO: Final = "dlcp.p4info.txtpb"
DIGEST: Final = "dlcp.digest"

# p4c gives every table a default action, and then warns of it where the table has an action selector. Neither @noWarn
# nor --Wdisable silences that, so this one warning is let pass.
HARMLESS: Final = re.compile(
    r"^\S+ \[--Wwarn=unsupported\] warning: Target does not support default_action for \S+ \(due to action profiles\)\n"
    r".*\n *\^+\n",
    re.MULTILINE,
)

ADVICE: Final = """\
{compiler} is not on PATH. It belongs to p4c, the P4 compiler: p4lang publishes packages named p4lang-p4c for Ubuntu and
Debian, and https://github.com/p4lang/p4c says how to add that package source or to build p4c."""


class CompileError(RuntimeError):
    """The compiler is missing, or found an error or something to warn of; the message is what it said."""


def sources(p4_dir: Path = P4_DIR) -> list[Path]:
    """Return the source files of the program in the order in which the digest takes them."""
    files = [path for pattern in SOURCES for path in p4_dir.glob(pattern)]
    return sorted(files, key=lambda path: path.relative_to(p4_dir).as_posix())


def sources_digest(p4_dir: Path = P4_DIR) -> str:
    """Return the SHA-256 of the source files in hexadecimal."""
    digest = hashlib.sha256()
    for path in sources(p4_dir):
        digest.update(path.relative_to(p4_dir).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compiler() -> str:
    """Return the name of the compiler: ``P4C`` from the environment, else ``p4c-bm2-ss``."""
    return os.environ.get("P4C", "p4c-bm2-ss")


def compiler_version() -> str:
    """Return the version that the compiler tells of itself, such as ``1.2.5.10``.

    Raises
    ------
    CompileError
        There is no compiler.
    """
    if shutil.which(compiler()) is None:
        raise CompileError(ADVICE.format(compiler=compiler()))
    result = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"Version (\S+)", result.stdout + result.stderr)
    return version[1] if version else "unknown"


def compile_program(target: Path, p4_dir: Path = P4_DIR) -> None:
    """Compile the program into ``target``: the JSON for BMv2 and its P4Runtime description.

    Raises
    ------
    CompileError
        There is no compiler, or it did not like the program. A warning counts as an error.
    """
    compiler_version()
    # Run from the folder above with a relative path, so that the JSON names no folder of this machine.
    outputs = ("-o", str(target / CONFIG), "--p4runtime-files", str(target / P4INFO))
    command = [compiler(), "--std", "p4-16", "--Werror", *outputs, f"{p4_dir.name}/{PROGRAM}"]
    result = subprocess.run(command, cwd=p4_dir.parent, capture_output=True, text=True, check=False)
    if result.returncode or HARMLESS.sub("", result.stderr).strip():
        raise CompileError(result.stdout + result.stderr)


def digests(p4_dir: Path = P4_DIR) -> dict[str, str]:
    """Return the SHA-256 of the sources, and of each compiled file by its name."""
    compiled = {name: hashlib.sha256((p4_dir / "build" / name).read_bytes()).hexdigest() for name in (CONFIG, P4INFO)}
    return {"sources": sources_digest(p4_dir), **compiled}


def record(version: str, p4_dir: Path = P4_DIR) -> None:
    """Write the compiler's version and the digests beside the compiled files."""
    lines = {"compiler": version, **digests(p4_dir)}
    (p4_dir / "build" / DIGEST).write_text("".join(f"{name} {value}\n" for name, value in lines.items()))


def recorded(p4_dir: Path = P4_DIR) -> dict[str, str]:
    """Return what ``record`` wrote: ``compiler``, ``sources`` and a digest for each compiled file."""
    return dict(line.split(" ", 1) for line in (p4_dir / "build" / DIGEST).read_text().splitlines())


def differences(p4_dir: Path = P4_DIR) -> list[str]:
    """Return what no longer is as it was recorded, a sentence each; none when all is in order."""
    missing = [name for name in (DIGEST, CONFIG, P4INFO) if not (p4_dir / "build" / name).exists()]
    if missing:
        return [f"{p4_dir.name}/build/{name} is missing: run `make p4`" for name in missing]
    then = recorded(p4_dir)
    return [
        f"{p4_dir.name}: {name} changed since the program was compiled: run `make p4`"
        for name, digest in digests(p4_dir).items()
        if then.get(name) != digest
    ]


def main() -> int:
    """Compile and record, or check; return the exit status."""
    parser = argparse.ArgumentParser(description="Compile the DLCP switch program for BMv2.")
    parser.add_argument("--check", action="store_true", help="only tell whether p4/build/ comes from these sources")
    if parser.parse_args().check:
        problems = differences()
        print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
        return bool(problems)
    try:
        with TemporaryDirectory() as folder:
            compile_program(Path(folder))
            for name in (CONFIG, P4INFO):
                shutil.move(Path(folder) / name, P4_DIR / "build" / name)
        record(compiler_version())
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{P4_DIR.name}/build: compiled with p4c {compiler_version()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
