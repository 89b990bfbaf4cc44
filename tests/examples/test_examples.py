# SPDX-License-Identifier: Apache-2.0
"""Scripts that know nothing of DLCP train the same with it: under torchrun, and under ``dlcp train``, unchanged."""

import ast
import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch

from tests.torch.workers import launch, values
from tests.train import forked
from tests.transport.free_ports import free_ports

pytestmark = pytest.mark.timeout(240)
EXAMPLES = Path(__file__).parents[2] / "dlcp" / "examples"
KNOWING = ("__init__.py", "elastic.py", "learning_tasks.py", "mixed_speeds.py", "pipeline.py", "svm.py")
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name not in KNOWING)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_scripts_know_nothing_of_dlcp(script):
    names = {
        name
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert "torch.distributed" in names
    assert not any(name.startswith("dlcp") for name in names)


def image_classifier(checkpoint):
    return ["--nproc-per-node", "2", "--", str(EXAMPLES / "image_classifier.py"), "--epochs", "3", "--save", checkpoint]


def torchrun(checkpoint):
    """Not forked: PyTorch's own threads then sometimes keep a rank from ending."""
    words = [*forked.TORCHRUN, *image_classifier(checkpoint)]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=110, check=False)


def test_the_image_classifier_learns_the_same_with_torchrun_and_with_dlcp_train(tmp_path):
    told = {"torchrun": torchrun(tmp_path / "torchrun.pt")}
    # On a busy machine PyTorch's own threads sometimes abort a rank that ends, whether or not there is DLCP.
    if "terminate called without an active exception" in told["torchrun"].stderr:
        told["torchrun"] = torchrun(tmp_path / "torchrun.pt")
    told["dlcp"] = forked.run(["train", "--option", "loss_bound=0", *image_classifier(tmp_path / "dlcp.pt")])
    for done in told.values():
        assert done.returncode == 0, done.stderr
    accuracies = {name: re.findall(r"accuracy (\d+)/360", done.stdout) for name, done in told.items()}
    assert len(accuracies["torchrun"]) == 3
    assert accuracies["dlcp"] == accuracies["torchrun"]
    assert int(accuracies["dlcp"][-1]) > 0.8 * 360
    plain, ours = (torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"] for name in told)
    assert all(torch.equal(plain[name], ours[name]) for name in plain), "two ranks without loss: the same bits"
    assert "DLCP  Net, 66 steps, 2 ranks" in told["dlcp"].stderr


def train_both_ways(worker, folder):
    """Run the language model as torchrun does, then as ``dlcp train`` does; return what it printed."""
    import torch.distributed as dist

    from dlcp.train.launcher import WorkerTask
    from dlcp.train.worker import ScriptSession

    os.environ.update({"RANK": str(worker.rank), "WORLD_SIZE": str(worker.count), "DLCP_BIND": ""})
    dist.barrier()  # nobody leaves while another still connects
    dist.destroy_process_group()
    script = str(EXAMPLES / "language_model.py")
    found = {}
    for name in ("plain", "dlcp"):
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (Path(folder) / name).read_text()})
        sys.argv = [script, "--epochs", "2", "--steps", "12", "--log-interval", "4", "--width", "64"]
        session = ScriptSession(WorkerTask())
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()):
            if name == "dlcp":
                with session:
                    runpy.run_path(script, run_name="__main__")
            else:
                runpy.run_path(script, run_name="__main__")
        found[name] = printed.getvalue()
    found["models"] = [model.report() for model in session.models]
    return found


def losses(text):
    return [float(loss) for loss in re.findall(r"valid loss ([0-9.]+)", text)]


def test_the_language_model_learns_the_same_with_dlcp_at_its_defaults(tmp_path):
    for name, port in zip(("plain", "dlcp"), free_ports(2), strict=True):
        (tmp_path / name).write_text(str(port))
    first, second = values(launch(2, train_both_ways, str(tmp_path)))
    plain, ours = losses(first["plain"]), losses(first["dlcp"])
    assert len(plain) == 2
    assert plain[-1] < 7.5, "it has to learn something: guessing among 3000 words is 8.0"
    assert ours == pytest.approx(plain, rel=0.05)
    assert losses(second["dlcp"]) == [], "rank 0 speaks"
    for rank in (first, second):
        (model,) = rank["models"]
        assert (model["model"], model["on"], model["steps"]) == ("RNNModel", True, 24)
        assert model["ledger"]["violations"] == 0


def test_the_image_classifier_goes_on_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    script, file = str(EXAMPLES / "image_classifier.py"), str(tmp_path / "model.pt")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for arguments in (["--epochs", "1", "--save", file], ["--epochs", "2", "--resume", file]):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")
    told = capsys.readouterr().out
    assert told.count("epoch 1, batch 0/") == 1
    assert told.count("epoch 2, batch 0/") == 1
    first, second = map(int, re.findall(r"accuracy (\d+)/360", told))
    assert second > first
