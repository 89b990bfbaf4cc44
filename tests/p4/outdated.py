# SPDX-License-Identifier: Apache-2.0
"""Checks that a change to the switch program rules out without the P4 compiler or BMv2.

`compiled` marks tests that compare ``p4/build`` with something written by hand: its sources, the packet tests, the
program for Tofino, the simulator. After a change to the sources they would compare the new rule with the old program.
`recorded` marks tests that compare the program with BMv2's recorded answers to an older one. Where the tool that would
bring these files up to date is missing, such tests are skipped, and the end of the run lists them. Where it is
installed, and in continuous integration, they fail.
"""

import functools
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.p4.p4source import P4, load_compile

RECORDINGS = P4.parent / "tests" / "data" / "conformance"
TITLE = "not checked"


@functools.cache
def outdated(what: str) -> str:
    """Return why tests marked with ``v1model``, ``tna`` or ``recorded`` are skipped; empty if they are not."""
    if os.environ.get("GITHUB_ACTIONS"):  # its workflow fails instead, so that nobody forgets to compile
        return ""
    return _recordings() if what == "recorded" else _build(what)


def _build(what: str) -> str:
    p4_compile = load_compile()
    program = {"v1model": p4_compile.BMV2, "tna": p4_compile.TNA}[what]
    compiler = p4_compile.compiler(program)
    if shutil.which(compiler) is not None or not p4_compile.differences(programs=(program,)):
        return ""
    return f"p4/{program.build} was compiled from other sources, and {compiler} is not installed: run `make p4` with it"


def _recordings() -> str:
    from tests.conformance import recording

    if shutil.which("simple_switch") is not None:
        return ""
    digest = hashlib.sha256((P4 / "build" / "dlcp.json").read_bytes()).hexdigest()
    if all(recording.read(path).program == digest for path in sorted(RECORDINGS.glob("*.jsonl.gz"))[:1]):
        return ""
    return (
        "BMv2's answers were recorded for another program, and simple_switch is not installed: run "
        "`python -m tests.conformance.record` with it"
    )


def mark(items: Iterable[pytest.Item]) -> None:
    """Skip the marked tests whose files are out of date."""
    for item in items:
        names = [marker.args[0] for marker in item.iter_markers("compiled")]
        names += ["recorded" for _ in item.iter_markers("recorded")]
        reason = next(filter(None, map(outdated, names)), "")
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def summarize(reporter: pytest.TerminalReporter) -> None:
    """List at the end of a run the modules with tests skipped because files are out of date."""
    skipped = [(report.nodeid, str(report.longrepr[2])) for report in reporter.stats.get("skipped", ())]
    for reason in filter(None, map(outdated, ("v1model", "tna", "recorded"))):
        modules = Counter(nodeid.partition("::")[0] for nodeid, said in skipped if said.endswith(reason))
        if modules:
            reporter.section(TITLE)
            reporter.line(f"{reason}.")
            for module, count in sorted(modules.items()):
                reporter.line(f"  {module}: {count} {'test' if count == 1 else 'tests'}")
