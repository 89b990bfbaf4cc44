# SPDX-License-Identifier: Apache-2.0
"""Someone without p4c and BMv2 changes the drop rule: the run is green, and lists what it did not check."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

ROOT = Path(__file__).parents[2]
MODULES = ("tests/p4", "tests/packet/test_stf.py", "tests/packet/test_coverage.py")


@pytest.fixture
def tree(tmp_path):
    """A copy of the files that the modules above need; folders that no test changes are links."""
    skipped = shutil.ignore_patterns("__pycache__", "test_without_p4c.py")
    for folder in ("p4", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    switch = tmp_path / "dlcp" / "switch"
    switch.mkdir(parents=True)
    (switch / "p4").symlink_to(tmp_path / "p4" / "build")
    for part in [*(ROOT / "dlcp").iterdir(), *(ROOT / "dlcp" / "switch").iterdir()]:
        link = tmp_path / part.relative_to(ROOT)
        if part.name != "__pycache__" and not link.exists():
            link.symlink_to(part)
    return tmp_path


def run(tree, *command, **more):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB", "PYTEST"))}
    environment |= {"PYTHONPATH": str(tree), "P4C": "no-such-compiler", "P4C_TOFINO": "no-such-compiler", **more}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(shutil.which("simple_switch") is not None, reason="with simple_switch, nothing is skipped")
def test_a_changed_rule_is_green_and_says_what_was_not_checked(tree):
    source = tree / "p4" / "v1model" / "drop.p4"
    source.write_text(source.read_text().replace(" > ", " >= ", 1) + "\n")
    # Its packet test expects something that is not so before the program is compiled.
    test = tree / "p4" / "stf" / "drop.stf"
    line = next(line for line in test.read_text().splitlines() if line.startswith("check_counter"))
    words = line.split()
    test.write_text(test.read_text().replace(line, " ".join([*words[:-1], str(int(words[-1]) + 1)])))

    done = run(tree, "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *MODULES)
    assert done.returncode == 0, done.stdout + done.stderr
    end = done.stdout.split("not checked")[1]
    assert "p4/build was compiled from other sources, and no-such-compiler is not installed: run `make p4`" in end
    for module in ("tests/p4/test_p4_compiled.py", "tests/packet/test_stf.py", "tests/packet/test_coverage.py"):
        assert f"  {module}: " in end

    outcome = run(tree, "tests.packet.stf", str(test))
    assert outcome.returncode == 1
    assert "sources changed since the program was compiled: run `make p4`" in outcome.stderr

    strict = run(
        tree, "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/p4/test_p4_sources.py", GITHUB_ACTIONS="true"
    )
    assert strict.returncode == 1
    assert "test_the_compiled_programs_come_from_these_sources" in strict.stdout
