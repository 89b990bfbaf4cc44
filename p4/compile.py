# SPDX-License-Identifier: Apache-2.0
"""Compiles the switch programs and records digests of their sources: ``python3 p4/compile.py`` or ``make p4``.

There are two programs: ``v1model/`` for BMv2 and the built-in switch, and ``tna/`` for Tofino, whose output stays as it
is if its compiler is missing. ``--check`` compiles nothing and reports whether ``p4/build/`` comes from the current
sources. The digest of a program's sources is a SHA-256 over each ``*.p4`` in ``shared/`` and in its own folder, in the
order of their paths below ``p4/``: the path, a zero byte, the file with empty lines in place of comments, a zero byte.
Comments that follow code count: compiled files have some of them.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

P4_DIR: Final = Path(__file__).resolve().parent
DIGEST: Final = "dlcp.digest"
"""File next to the compiled files with the compiler's version and the digests."""
PROGRAM: Final = "v1model/dlcp.p4"
CONFIG: Final = "dlcp.json"
P4INFO: Final = "dlcp.p4info.txtpb"
TNA_PROGRAM: Final = "tna/dlcp.p4"
TNA_SCHEMA: Final = "bf-rt.json"
TNA_RESOURCES: Final = "resources.json"
ASSEMBLER: Final = "bfas"

KINDS: Final = {
    "logical_tables": ("logical_tables", "ids"),
    "srams": ("rams", "srams"),
    "map_rams": ("map_rams", "maprams"),
    "tcams": ("tcams", "tcams"),
    "meter_alus": ("meter_alus", "meters"),
    "statistics_alus": ("statistic_alus", "stats"),
    "gateways": ("gateways", "gateways"),
    "hash_bits": ("hash_bits", "bits"),
}
"""Resources of a stage, and where the compiler's ``resources.json`` lists the ones in use. A meter ALU serves a meter,
a register or a selector, a statistics ALU a counter."""

# p4c gives every table a default action, and then warns about it if the table has an action selector. Neither @noWarn
# nor --Wdisable silences the warning, so this one is ignored.
HARMLESS: Final = re.compile(
    r"^\S+ \[--Wwarn=unsupported\] warning: Target does not support default_action for \S+ \(due to action profiles\)\n"
    r".*\n *\^+\n",
    re.MULTILINE,
)

ADVICE: Final = """\
{compiler} is not on PATH. It is part of p4c, the P4 compiler: p4lang publishes packages named p4lang-p4c for Ubuntu and
Debian; https://github.com/p4lang/p4c describes how to add the package source, and how to build p4c."""
TNA_ADVICE: Final = """\
{compiler} is not on PATH. It is p4c's back end for Tofino: build https://github.com/p4lang/p4c with ENABLE_TOFINO."""


class CompileError(RuntimeError):
    """The compiler is missing, or reported an error or a warning; the message has its output."""


@dataclass(frozen=True)
class Program:
    """One of the switch programs and its compiled files.

    Parameters
    ----------
    source
        Path of the main file, which includes all others, below ``p4/``.
    build
        Path of the folder of compiled files, below ``p4/``.
    outputs
        Names of the compiled files.
    compiler
        Name of the compiler, and the environment variable that overrides it.
    advice
        Message if the compiler is missing.
    """

    source: str
    build: str
    outputs: tuple[str, ...]
    compiler: tuple[str, str]
    advice: str

    @property
    def folder(self) -> str:
        """The folder of its own sources."""
        return self.source.partition("/")[0]


BMV2: Final = Program(PROGRAM, "build", (CONFIG, P4INFO), ("p4c-bm2-ss", "P4C"), ADVICE)
TNA: Final = Program(TNA_PROGRAM, "build/tna", (TNA_SCHEMA, TNA_RESOURCES), ("p4c-barefoot", "P4C_TOFINO"), TNA_ADVICE)


def sources(p4_dir: Path = P4_DIR, program: Program = BMV2) -> list[Path]:
    """Return the source files of a program, in the order of the digest."""
    files = [path for folder in ("shared", program.folder) for path in p4_dir.glob(f"{folder}/*.p4")]
    return sorted(files, key=lambda path: path.relative_to(p4_dir).as_posix())


def sources_digest(p4_dir: Path = P4_DIR, program: Program = BMV2) -> str:
    """Return the SHA-256 of the source files in hexadecimal."""
    digest = hashlib.sha256()
    for path in sources(p4_dir, program):
        code = re.sub(rb"^ *//.*", b"", path.read_bytes(), flags=re.MULTILINE)
        digest.update(path.relative_to(p4_dir).as_posix().encode() + b"\0" + code + b"\0")
    return digest.hexdigest()


def compiler(program: Program = BMV2) -> str:
    """Return the name of a program's compiler: from the environment (``P4C``, ``P4C_TOFINO``), else the usual one."""
    name, variable = program.compiler
    return os.environ.get(variable, name)


def compiler_version(program: Program = BMV2) -> str:
    """Return the compiler's version, such as ``1.2.5.10``.

    Raises
    ------
    CompileError
        The compiler is not installed.
    """
    if shutil.which(compiler(program)) is None:
        raise CompileError(program.advice.format(compiler=compiler(program)))
    result = subprocess.run([compiler(program), "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"Version (\S+)", result.stdout + result.stderr)
    return version[1] if version else "unknown"


def compile_program(target: Path, p4_dir: Path = P4_DIR) -> None:
    """Compile the program for BMv2 into ``target``: its JSON and its P4Runtime description.

    Raises
    ------
    CompileError
        The compiler is not installed, or reported an error or a warning.
    """
    compiler_version()
    outputs = ("-o", str(target / CONFIG), "--p4runtime-files", str(target / P4INFO))
    result = _run([compiler(), "--std", "p4-16", "--Werror", *outputs], BMV2, p4_dir)
    if result.returncode or HARMLESS.sub("", result.stderr).strip():
        raise CompileError(result.stdout + result.stderr)


def compile_tna(target: Path, p4_dir: Path = P4_DIR) -> None:
    """Compile the program for Tofino into ``target``: its tables for BF Runtime, and its use of the chip's resources.

    If p4c's assembler ``bfas`` is on PATH, it also makes the binary, which proves that the program fits the chip; the
    binary is not kept.

    Raises
    ------
    CompileError
        The compiler is not installed, or compiler or assembler reported an error.
    """
    compiler_version(TNA)
    with TemporaryDirectory() as folder:
        outputs = ("-o", folder, "--bf-rt-schema", str(target / TNA_SCHEMA))
        options = ["--std", "p4-16", "--target", "tofino", "--arch", "tna", "-g", "-D__TARGET_TOFINO__=1"]
        result = _run([compiler(TNA), *options, *outputs], TNA, p4_dir)
        if result.returncode:
            raise CompileError(result.stdout + result.stderr)
        _assemble(Path(folder) / "pipe")
        logs = Path(folder) / "pipe" / "logs"
        report, phv = (json.loads((logs / name).read_text()) for name in ("resources.json", "phv.json"))
        used = resources(report["resources"]["mau"]["mau_stages"], phv)
    without_snapshots(target / TNA_SCHEMA)
    (target / TNA_RESOURCES).write_text(json.dumps(used, indent=1) + "\n")


def without_snapshots(schema: Path) -> None:
    """Remove the debugging tables, which are most of a schema; keep the tables that the program declares."""
    content = json.loads(schema.read_text())
    content["tables"] = [
        table for table in content["tables"] if not table["table_type"].startswith(("Snapshot", "TblDbg", "DynHash"))
    ]
    schema.write_text(json.dumps(content, indent=1) + "\n")


def resources(stages: Sequence[Mapping[str, Any]], phv: Mapping[str, Any]) -> dict[str, Any]:
    """Return a program's use of the chip's resources, in total and by stage.

    Parameters
    ----------
    stages
        ``resources.mau.mau_stages`` of the compiler's ``resources.json``.
    phv
        The compiler's ``phv.json``: the containers that hold headers and metadata.
    """
    rows = [
        {
            "stage": stage["stage_number"],
            **{name: len(stage[unit][items]) for name, (unit, items) in KINDS.items()},
        }
        for stage in stages
    ]
    occupied = [container["bit_width"] for container in phv["containers"]]
    available = dict.fromkeys(occupied, 0)
    for group in phv["resources"]:
        if group["group_type"] == "deparser":  # every container is in exactly one of the deparser's groups
            available[group["bit_width"]] = available.get(group["bit_width"], 0) + group["num_containers"]
    return {
        "stages": {"used": sum(row["logical_tables"] > 0 for row in rows), "of": phv["nStages"]},
        **{name: sum(row[name] for row in rows) for name in KINDS},
        "phv_containers": {
            str(width): {"used": occupied.count(width), "of": available[width]} for width in sorted(available)
        },
        "by_stage": rows,
    }


def digests(p4_dir: Path = P4_DIR, program: Program = BMV2) -> dict[str, str]:
    """Return the SHA-256 of the sources, and of each compiled file by its name."""
    build = p4_dir / program.build
    compiled = {name: hashlib.sha256((build / name).read_bytes()).hexdigest() for name in program.outputs}
    return {"sources": sources_digest(p4_dir, program), **compiled}


def record(version: str, p4_dir: Path = P4_DIR, program: Program = BMV2) -> None:
    """Write the compiler's version and the digests next to the compiled files."""
    lines = {"compiler": version, **digests(p4_dir, program)}
    (p4_dir / program.build / DIGEST).write_text("".join(f"{name} {value}\n" for name, value in lines.items()))


def recorded(p4_dir: Path = P4_DIR, program: Program = BMV2) -> dict[str, str]:
    """Return the values that ``record`` wrote: ``compiler``, ``sources`` and a digest for each compiled file."""
    return dict(line.split(" ", 1) for line in (p4_dir / program.build / DIGEST).read_text().splitlines())


def differences(p4_dir: Path = P4_DIR, programs: Sequence[Program] = (BMV2, TNA)) -> list[str]:
    """Return a sentence for each missing file, and for each that differs from its recorded digest."""
    found = []
    for program in programs:
        build = p4_dir / program.build
        where = f"{p4_dir.name}/{program.build}"
        missing = [name for name in (DIGEST, *program.outputs) if not (build / name).exists()]
        if missing:
            found += [f"{where}/{name} is missing: run `make p4`" for name in missing]
            continue
        then = recorded(p4_dir, program)
        found += [
            f"{p4_dir.name}: {name} changed since the program was compiled: run `make p4`"
            for name, digest in digests(p4_dir, program).items()
            if then.get(name) != digest
        ]
    return list(dict.fromkeys(found))  # the shared sources belong to both programs


def main() -> int:
    """Compile and record, or check; return the exit status."""
    parser = argparse.ArgumentParser(description="Compile the DLCP switch programs, for BMv2 and for Tofino.")
    parser.add_argument("--check", action="store_true", help="only report whether p4/build/ comes from these sources")
    if parser.parse_args().check:
        problems = differences()
        print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
        return bool(problems)
    try:
        _make(BMV2, compile_program)
        if shutil.which(compiler(TNA)) is None:
            print(f"{P4_DIR.name}/{TNA.build}: left as it is. {TNA.advice.format(compiler=compiler(TNA))}")
        else:
            _make(TNA, compile_tna)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _make(program: Program, compile_into: Callable[[Path], None]) -> None:
    """Compile a program, move the output into its folder, and record the digests."""
    with TemporaryDirectory() as folder:
        compile_into(Path(folder))
        build = P4_DIR / program.build
        build.mkdir(exist_ok=True)
        for name in program.outputs:
            shutil.move(Path(folder) / name, build / name)
    version = compiler_version(program)
    record(version, P4_DIR, program)
    print(f"{P4_DIR.name}/{program.build}: compiled with {compiler(program)} {version}")


def _run(command: Sequence[str], program: Program, p4_dir: Path) -> subprocess.CompletedProcess[str]:
    # From the parent folder with a relative path, so that the output names no folder of this machine.
    source = f"{p4_dir.name}/{program.source}"
    return subprocess.run([*command, source], cwd=p4_dir.parent, capture_output=True, text=True, check=False)


def _assemble(pipe: Path) -> None:
    """Assemble a compiled pipe if the assembler is installed; it refuses a program that does not fit the chip."""
    if shutil.which(ASSEMBLER) is None:
        return
    (pipe / "logs").mkdir(exist_ok=True)
    command = [ASSEMBLER, "--target", "tofino", "-o", str(pipe), str(pipe / "dlcp.bfa")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CompileError(f"{ASSEMBLER}: {result.stdout}{result.stderr}")


if __name__ == "__main__":
    sys.exit(main())
