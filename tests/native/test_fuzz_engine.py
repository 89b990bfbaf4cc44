# SPDX-License-Identifier: Apache-2.0
"""The engine in C bears what networks and hostile peers do to it, as libFuzzer makes it up: here for some seconds."""

import shutil
import subprocess

import pytest

from dlcp import native
from tests.native.fuzz import available, build, write_inputs

LIMIT_S = 300
INPUTS = 100
RUNS = 200
"""A run takes ten milliseconds."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    if not (native.FOLDER / "ring.c").exists() or not available():
        pytest.skip("needs DLCP's C sources, and clang with libFuzzer")
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, INPUTS)
    return folder


def fuzz(program, inputs):
    # What libFuzzer takes for the peak of its memory is that of whoever started it, if that is larger: pytest's may be.
    limits = ["-rss_limit_mb=0", "-malloc_limit_mb=1024"]
    arguments = ["-seed=1", f"-runs={RUNS}", "-max_len=2048", f"-artifact_prefix={program}-", str(inputs)]
    command = [str(program), *limits, *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S)


def test_nothing_is_found(inputs, tmp_path):
    build(tmp_path / "engine")
    done = fuzz(tmp_path / "engine", inputs)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done" in done.stderr


def test_a_check_that_is_missing_is_found(inputs, tmp_path):
    folder = shutil.copytree(native.FOLDER, tmp_path / "native", ignore=shutil.ignore_patterns("*.so", "*.py*"))
    source, check = folder / "rx.c", " && index < self->packets"
    assert check in source.read_text()
    source.write_text(source.read_text().replace(check, ""))
    build(tmp_path / "engine", folder)
    done = fuzz(tmp_path / "engine", inputs)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
