# SPDX-License-Identifier: Apache-2.0
"""The commands of each page work when a new reader follows them in the page's order.

Every page with commands is in :data:`PAGES`, or in :data:`EXCLUDED` with the reason. `make test` follows what takes
seconds, `make test-pages` everything.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("finsy")
pytest.importorskip("prometheus_client")
pytest.importorskip("simpy")

from dlcp.controller.testbed import lifecycle
from dlcp.controller.testbed.requirements import missing
from tests.docs.following import Shell
from tests.docs.pages import blocks
from tests.testbed.conftest import ASKED as TESTBED
from tests.train.preloaded import Preloaded

NOTHING, ALL = "(?!)", ""
"""Patterns of commands."""
EVERYTHING = bool(os.environ.get("FOLLOW_EVERYTHING"))


class Page(NamedTuple):
    """How a page is followed.

    Parameters
    ----------
    before
        Set-up commands, such as those that make the reader's own files, by a part of the command that they precede;
        ``""`` means before the page.
    long
        What only `make test-pages` runs: a pattern of commands.
    testbed
        Whether the page needs what tests/testbed needs, and so is followed only where that is asked for.
    """

    before: Mapping[str, str] = MappingProxyType({})
    long: str = NOTHING
    testbed: bool = False


NEVER = {
    r"pip install|python3 -m venv|apt-get install": "the commands run in the environment that these make",
    r"--nnodes": "needs several machines: tests/cluster/test_tutorial.py follows docs/several-machines.md",
    r"sbatch|kubectl|docker|ssh\.sh|--dask": "needs a cluster, or hosts with ssh",
    r"make (demo|test)|-jax|set-up-framework": "docs/quick-start.md has the demo; make test runs the tests",
    r"(sweep|report) fct_144 speedup|tests\.bench": "takes hours",
}
"""Commands that are not run, and why."""
NEEDED = {
    "--switch bmv2": "simple_switch_grpc",
    "make p4|merged.json": "p4c-bm2-ss",
    "tshark": "tshark",
    "openssl": "openssl",
}
"""Commands that need a program, which may be missing here."""
LEFT_OUT = "|".join([*NEVER, *(words for words, program in NEEDED.items() if not shutil.which(program))])
SERVES = r"--listen|dlcp (switch (?!.*--write-entries)|(live|server|fabric watch) )"
"""Commands that run until they are stopped."""
BESIDE = r"&$|--node 0"
"""Commands that run while the block's next ones do."""
STATUS = {r"dlcp fabric plan": 3, r"# loses packets": 1}
"""Exit statuses other than 0, as the pages say."""
LIMIT_S = 1500 if EVERYTHING else 300
"""For each command; `make sim` takes longest."""
SCRIPT = "cp dlcp/examples/image_classifier.py script.py"
EXCLUDED = {
    "docs/alternatives.md": "takes hours",
    "docs/measurements.md": "takes hours",
    "docs/install.md": "builds packages: tests/test_setting_up.py",
    "docs/several-machines.md": "tests/cluster/test_tutorial.py follows it",
    "docs/tofino.md": "needs bfrt_grpc, which comes with Intel's SDE",
}
PAGES = {
    "README.md": Page(),
    "docs/benchmarks.md": Page(long=ALL),
    "docs/cluster.md": Page({"": f"{SCRIPT}; umask 077; openssl rand -hex 32 > secret"}),
    "docs/diagnosis.md": Page({"": SCRIPT}),
    "docs/elastic.md": Page({"dlcp launch": "cp dlcp/examples/elastic.py script.py"}, long=ALL),
    "docs/fabric.md": Page({"=packet:": "for n in 1 3; do ip link add eth$n type veth peer eth$((n + 1)); done"}),
    "docs/frameworks.md": Page({"": SCRIPT}, long=ALL),
    "docs/index.md": Page({"": SCRIPT}),
    "docs/observing.md": Page({"": SCRIPT}),
    "docs/ordinary-switches.md": Page(),
    "docs/pipelines.md": Page(long="dlcp (train|sim)"),
    "docs/pytorch.md": Page({"": SCRIPT}),
    "docs/quick-start.md": Page(long="dlcp demo"),
    "docs/security.md": Page(),
    "docs/simulate.md": Page(long=ALL),
    "docs/simulate-1000.md": Page(long=ALL),
    "docs/simulation-guide.md": Page(
        {
            "": "dlcp sim new job.yaml --yes --workers 4; dlcp sim new dctcp.yaml --yes --workers 4 --transport dctcp",
            "out/old": "cp -r out/sim out/old",
        },
        long=ALL,
    ),
    "docs/testbed.md": Page(long=ALL, testbed=True),
    "docs/traces.md": Page(
        {
            "": SCRIPT,
            "all_reduce": "dlcp sim new small.yaml --yes --workers 4 --transport dctcp && "
            "dlcp sim export small.yaml --output all_reduce.et",
            "replay run.json": "dlcp train --trace run.json --nproc-per-node 2 script.py",
            "profiles/": "torchrun --nproc-per-node 2 profiled.py && gzip -c profiles/rank0.json > rank0.json.gz",
        },
        long=ALL,
    ),
    "docs/training-libraries.md": Page({"": SCRIPT}),
    "docs/tuning.md": Page({"": SCRIPT}),
    "docs/wire-format.md": Page(),
    "dlcp/examples/README.md": Page(long="torchrun"),
    "dlcp/examples/frameworks/README.md": Page(long=ALL),
    "p4/README.md": Page(),
    "p4/stf/README.md": Page(long=ALL),
    "sim/experiments/README.md": Page({"out/old": "dlcp sim sweep bound --quick && cp -r out/sim out/old"}, long=ALL),
}


def commands_of(page):
    """Return the commands of each block of a page."""
    texts = [block.text.replace("\\\n", " ") for block in blocks("sh") if block.place.startswith(f"{page}:")]
    return [
        [
            re.sub(r"\s+# (?!loses).*", "", line)
            for line in text.splitlines()
            if line.strip() and not line.startswith("#")
        ]
        for text in texts
    ]


def status_of(command):
    """Return the exit status that a page promises for a command."""
    return next((status for words, status in STATUS.items() if re.search(words, command)), 0)


@pytest.fixture(scope="module")
def python():
    """Return words that stand for Python, to begin sooner, or None: `make test-pages` runs what a reader runs."""
    with contextlib.nullcontext() if EVERYTHING else Preloaded() as words:
        yield words


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page, python, tmp_path):
    how = PAGES[page]
    if how.long == ALL and not EVERYTHING:
        pytest.skip("takes minutes: `make test-pages` follows this page")
    if how.testbed and (not TESTBED or missing("builtin")):
        pytest.skip("testbeds take root and minutes: `DLCP_TESTBED=1 make test-pages` follows this page")
    before = dict(how.before)
    with contextlib.ExitStack() as stack:
        if how.testbed:
            stack.callback(lifecycle.down, "dlcp")  # if the page does not come so far
        shell = stack.enter_context(Shell(tmp_path, python))

        def check(command, status=0):
            began_s = time.monotonic()
            found = shell.run(command, LIMIT_S)
            print(f"{time.monotonic() - began_s:6.1f} s, status {found}: {command}", flush=True)
            assert found == status, f"{page}: {command}\n{shell.tail()}"

        for commands in commands_of(page):
            beside = False
            for command in commands:
                if re.search(LEFT_OUT, command) or (not EVERYTHING and re.search(how.long, command)):
                    print("not run:", command)
                    continue
                for words in [words for words in before if words in command]:
                    check(before.pop(words))
                if re.search(SERVES, command):
                    shell.serve(command, LIMIT_S)
                elif re.search(BESIDE, command):
                    check(f"{command.rstrip(' &')} & beside=$!")
                    beside = True
                else:
                    check(command, status_of(command))
            if beside:
                check("wait $beside")
        assert shell.ended() == []


def test_every_page_with_commands_is_followed_or_has_a_reason_not_to_be():
    found = {block.place.partition(":")[0] for block in blocks("sh")}
    assert found == {*PAGES, *EXCLUDED}
    assert not PAGES.keys() & EXCLUDED.keys()
    followed = "\n".join(command for page in PAGES for commands in commands_of(page) for command in commands)
    assert [words for words in (*NEVER, *NEEDED, *STATUS) if not re.search(words, followed)] == []
    for page, how in PAGES.items():
        text = "\n".join(command for commands in commands_of(page) for command in commands)
        assert all(words in text for words in how.before), f"{page} has no such command any more: {[*how.before]}"
