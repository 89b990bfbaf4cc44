# SPDX-License-Identifier: Apache-2.0
"""The parallel support vector machine is scikit-learn's, whatever the number of ranks and whatever it eliminates."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")
from sklearn.svm import SVC

import dlcp.session
from dlcp.examples import svm
from tests.train.preloaded import Preloaded

pytestmark = pytest.mark.timeout(120)
OPTIONS = {"loss_bound": 0.0, "precision": "32", "combine": "sum", "fallback": False}


@pytest.mark.parametrize("name", ["cancer", "digits"])
@pytest.mark.parametrize("elimination", svm.ELIMINATION)
def test_it_is_scikit_learns(name, elimination):
    samples, labels, test_samples, test_labels = svm.load(name, 1, svm.MADE_UP_TEXTS)
    cost, gamma = svm.COSTS[name]
    theirs = SVC(C=cost, gamma=gamma).fit(samples, labels)
    with dlcp.session.join(dlcp.session.Options(**OPTIONS), rank=0, size=1) as group:
        ours = svm.train(group, name, 1, elimination)
    assert ours["accuracy"] == (theirs.predict(test_samples) == test_labels).mean()
    assert ours["threshold"] == pytest.approx(-theirs.intercept_[0], abs=2 * svm.TOLERANCE)
    assert ours["support_vectors"] == pytest.approx(theirs.n_support_.sum(), abs=2)


def test_elimination_saves_work_and_is_undone():
    found = {}
    for elimination in ("none", "early"):
        with dlcp.session.join(dlcp.session.Options(**OPTIONS), rank=0, size=1) as group:
            found[elimination] = svm.train(group, "digits", 1, elimination)
    assert found["early"]["kernel_evaluations"] < 0.8 * found["none"]["kernel_evaluations"]
    assert found["early"]["reconstructions"] > found["none"]["reconstructions"] == 0


def test_four_ranks_find_what_one_finds(monkeypatch, capsys):
    launcher = [sys.executable, "-m", "dlcp.cli", "launch", "-n", "4", "--"]
    with Preloaded() as python:
        done = subprocess.run(
            [*launcher, *python, "-m", "dlcp.examples.svm", "--data", "digits"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    four = json.loads(done.stdout.splitlines()[-1])
    monkeypatch.setattr("sys.argv", ["svm", "--data", "digits"])
    svm.main()
    one = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (one["ranks"], four["ranks"]) == (1, 4)
    for name in ("accuracy", "rounds", "support_vectors", "reconstructions"):
        assert one[name] == four[name]
    assert one["threshold"] == pytest.approx(four["threshold"], abs=1e-9)


def test_rows_arrive_as_they_were_sent():
    samples, labels, *_ = svm.load("text", 1, svm.MADE_UP_TEXTS)
    width = int(np.diff(samples.indptr).max())
    assert 2 * width < samples.shape[1] / 50, "sparse rows save most of the bytes"
    chosen = np.array([3, 14, 159])
    with dlcp.session.join(dlcp.session.Options(**OPTIONS), rank=0, size=1) as group:
        solver = svm.Solver(group, samples, labels, 100, 1.0, 0.5, width)
        solver.weights[chosen] = [0.25, 0.5, 1.0]
        rows = solver.exchange(chosen)
    assert (rows.samples != samples[chosen]).nnz == 0
    assert rows.numbers.tolist() == [103, 114, 259]
    assert rows.weights.tolist() == [0.25, 0.5, 1.0]
    assert (rows.labels == labels[chosen]).all()
    assert (rows.gradients == -labels[chosen]).all()
