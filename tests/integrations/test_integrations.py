# SPDX-License-Identifier: Apache-2.0
"""Scripts of libraries that train with DistributedDataParallel, unchanged under ``dlcp train``, against Gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(220)
HERE = Path(__file__).parent
LIMIT_S = 100
TORCHRUN = ["torch.distributed.run", "--standalone"]
SCRIPTS = [
    ("accelerate", ["no"]),
    ("accelerate", ["bf16"]),
    ("lightning", ["32-true", "ddp"]),
    ("lightning", ["bf16-mixed", "ddp"]),
]


def run(launcher, library, file, arguments):
    """Train with two ranks; return the script's results."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DLCP_", "PET_"))}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "--nproc-per-node", "2", HERE / f"with_{library}.py", file, *arguments],
        cwd=HERE.parents[1],
        env={**kept, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    # Not by the exit status: where a script ends, threads of PyTorch's may abort the process, with and without DLCP.
    assert file.exists(), done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize(("library", "arguments"), SCRIPTS)
def test_an_unchanged_script_trains_as_over_gloo(library, arguments, tmp_path):
    summary = tmp_path / "summary.json"
    plain = run(TORCHRUN, library, tmp_path / "gloo.json", arguments)
    ours = run(["dlcp.cli", "train", "--summary", str(summary)], library, tmp_path / "dlcp.json", arguments)
    assert ours["ranks"] == 2
    assert ours["same"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["losses"][-1] < ours["losses"][0]
    (model,) = json.loads(summary.read_text())["models"]
    assert model["on"]
    assert (model["steps"], model["fallback"]) == (9, None)
    assert model["delivered"] > 0


def test_lightning_has_a_strategy(tmp_path):
    plain = run(TORCHRUN, "lightning", tmp_path / "gloo.json", ["32-true", "ddp"])
    ours = run(TORCHRUN, "lightning", tmp_path / "dlcp.json", ["32-true", "dlcp"])
    assert ours["same"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert "steps" not in plain
    assert ours["steps"] == 9
    assert ours["delivered"] > 0
