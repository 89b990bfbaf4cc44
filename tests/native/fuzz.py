# SPDX-License-Identifier: Apache-2.0
"""The engine under libFuzzer: ``python -m tests.native.fuzz 3600`` goes on for an hour, or until it finds something.

It takes clang with its runtime libraries. In ``out/fuzz`` it keeps inputs that reach more of the engine than those
before them, to begin with them next time, and the input that fails: ``out/fuzz/fuzz_engine out/fuzz/crash-...`` shows
it again.
"""

import random
import shutil
import subprocess
import sys
from pathlib import Path

from dlcp import native

HARNESS = Path(__file__).with_name("fuzz_engine.c")
COMPILER = "clang"
FLAGS = ("-std=gnu11", "-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined")
SYSTEM = ("clock_gettime", "ppoll", "recvmsg", "recvmmsg", "sendmsg")
"""Parts that the harness does in the system's place."""
OUT = Path("out/fuzz")


def available() -> bool:
    """Return whether there is a compiler with libFuzzer."""
    if not shutil.which(COMPILER):
        return False
    empty = b"int LLVMFuzzerTestOneInput(const char *data, unsigned long size) { return data && size ? 0 : 0; }"
    command = [COMPILER, *FLAGS, "-x", "c", "-", "-o", "/dev/null"]
    return subprocess.run(command, input=empty, capture_output=True, timeout=60).returncode == 0


def build(program: Path, folder: Path = native.FOLDER) -> None:
    """Compile the harness and the engine in a folder into a program."""
    defined = [f"-D{name}=fuzz_{name}" for name in SYSTEM]
    sources = [str(path) for path in (*sorted(folder.glob("*.c")), HARNESS)]
    subprocess.run([COMPILER, *FLAGS, *defined, f"-I{folder}", *sources, "-o", str(program), "-lm"], check=True)


def write_inputs(folder: Path, count: int) -> None:
    """Write random inputs to begin with, always the same."""
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(1)
    for number in range(count):
        (folder / f"random-{number}").write_bytes(source.randbytes(source.choice([40, 150, 400, 1000])))


def main(seconds: str) -> int:
    """Fuzz for some seconds; return the exit status, 0 if nothing was found."""
    write_inputs(OUT / "inputs", 300)
    build(OUT / "fuzz_engine")
    limits = [f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-timeout=60", "-max_len=2048", "-len_control=10"]
    told = ["-print_final_stats=1", f"-artifact_prefix={OUT}/"]
    return subprocess.run([str(OUT / "fuzz_engine"), *limits, *told, str(OUT / "inputs")]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
