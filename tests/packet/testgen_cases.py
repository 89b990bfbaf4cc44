# SPDX-License-Identifier: Apache-2.0
"""Writes p4/stf/p4testgen.stf.gz: ``python -m tests.packet.testgen_cases``; it takes p4testgen, of p4c.

p4testgen finds a case for every path through the program that it can follow, and says itself what has to come out. So
its cases test both switches by a third opinion.
"""

import gzip
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conformance import p4testgen
from tests.packet import as_stf, stf
from tests.packet.stf_text import text

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "p4" / "stf" / "p4testgen.stf.gz"


def main() -> int:
    """Write the file."""
    info = p4testgen.Info(p4testgen.parse((ROOT / "p4" / "build" / "dlcp.p4info.txtpb").read_text(encoding="utf-8")))
    made = list(p4testgen.cases(ROOT / "p4" / "v1model" / "dlcp.p4"))
    # p4testgen does not tell its own.
    version = subprocess.run(["p4c-bm2-ss", "--version"], capture_output=True, text=True, check=True)
    said = (version.stdout + version.stderr).split("Version ")[-1].split()[0]
    head = f"# SPDX-License-Identifier: Apache-2.0\n# {len(made)} cases of p4testgen, of p4c {said}, made by\n"
    head += f"# python tests/packet/testgen_cases.py: {p4testgen.COMMAND}\n"
    lines = [head]
    for number, case in enumerate(made):
        lines.append(f"\n# case {number + 1}\n{text(_statements(info, case, number))}")
    TARGET.write_bytes(gzip.compress("".join(lines).encode(), 9, mtime=0))
    print(f"{TARGET.relative_to(ROOT)}: {len(made)} cases, {TARGET.stat().st_size} bytes")
    return 0


def _statements(info: p4testgen.Info, case: p4testgen.Message, number: int) -> Iterator[stf.Statement]:
    yield from as_stf.of_entries(info.document(case.get("entities", []), number))
    sent = case["input_packet"][0]
    yield stf.SendPacket(0, int(sent["port"][0]), sent["packet"][0])
    expected = case.get("expected_output_packet", [])
    for packet in expected:
        yield as_stf.expect(int(packet["port"][0]), packet["packet"][0], packet["packet_mask"][0])
    if not expected:
        yield stf.NoPacket(0)


if __name__ == "__main__":
    sys.exit(main())
