# SPDX-License-Identifier: Apache-2.0
"""Scripts of libraries that train with PyTorch, over DLCP and over Gloo."""

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
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
EXACT = {"DLCP_LOSS_BOUND": "0", "DLCP_PRECISION": "32"}
SLOW = pytest.mark.skipif(not os.environ.get("DLCP_INTEGRATIONS"), reason="slow: make test-integrations runs it")
SCRIPTS = [
    ("accelerate", ["no"]),
    ("accelerate", ["bf16"]),
    ("lightning", ["32-true", "ddp"]),
    ("lightning", ["bf16-mixed", "ddp"]),
    ("transformers", ["unchanged"]),
    pytest.param("compile", ["inside"], marks=SLOW),
    pytest.param("compile", ["outside"], marks=SLOW),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where Inductor keeps what it has compiled, for all scripts."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def run(compiled, tmp_path):
    """Train with two ranks: ``run(launcher, library, arguments)`` returns the script's results."""

    def run(launcher, library, arguments):
        file = tmp_path / "results.json"
        file.unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DLCP_", "PET_"))}
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
        module = ["-m", *launcher] if launcher else []
        done = subprocess.run(
            [sys.executable, *module, HERE / f"with_{library}.py", file, *arguments],
            cwd=HERE.parents[1],
            env={**kept, **alone, **EXACT, "PYTHONPATH": str(HERE.parents[1])},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        # Not by the exit status: where a script ends, threads of PyTorch's may abort the process, also without DLCP.
        assert file.exists(), done.stderr
        return json.loads(file.read_text())

    return run


def check_same(ours, plain):
    assert ours["ranks"] == 2
    assert ours["same"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["losses"][-1] < ours["losses"][0]


@pytest.mark.parametrize(("library", "arguments"), SCRIPTS)
def test_an_unchanged_script_trains_as_over_gloo(library, arguments, run, tmp_path):
    if library != "compile":
        pytest.importorskip(library)
    summary = tmp_path / "summary.json"
    plain = run(TORCHRUN, library, arguments)
    ours = run(["dlcp.cli", "train", "--summary", str(summary), *TORCHRUN[2:]], library, arguments)
    check_same(ours, plain)
    (model,) = json.loads(summary.read_text())["models"]
    assert model["on"]
    assert (model["steps"], model["fallback"]) == (9, None)
    assert model["delivered"] > 0


ENABLING = [
    pytest.param(TORCHRUN, "lightning", ["32-true", "ddp"], ["32-true", "dlcp"], id="lightning"),
    pytest.param(TORCHRUN, "transformers", ["unchanged"], ["callback"], id="transformers"),
    pytest.param(None, "notebook", ["gloo"], ["dlcp"], id="notebook", marks=SLOW),
    pytest.param(None, "ray", ["gloo"], ["dlcp"], id="ray"),
]


@pytest.mark.parametrize(("launcher", "library", "without", "enabling"), ENABLING)
def test_a_script_with_another_launcher_enables_dlcp(launcher, library, without, enabling, run):
    if library != "notebook":
        pytest.importorskip(library)
    plain = run(launcher, library, without)
    ours = run(launcher, library, enabling)
    check_same(ours, plain)
    assert "steps" not in plain
    assert ours["steps"] == len(ours["losses"]) or library == "lightning"  # which has a loss for each part of a step
    assert ours["delivered"] > 0


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_deepspeed_trains_over_the_backend(stage, run):
    pytest.importorskip("deepspeed")
    plain = run(TORCHRUN, "deepspeed", [stage])
    ours = run(["dlcp.cli", "train", "--backend", *TORCHRUN[2:]], "deepspeed", [stage])
    check_same(ours, plain)
    assert "delivered" not in plain
    assert ours["delivered"] > 0
