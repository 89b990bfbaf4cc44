# SPDX-License-Identifier: Apache-2.0
"""The benchmark of convergence: runs repeat, nothing is lost for good that should not be, and a sweep goes on."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from dlcp.bench import BenchError
from dlcp.convergence import read, write
from dlcp.examples import learning_tasks
from dlcp.examples.learning_tasks import SMALL_TASKS, TASKS, batches_of
from dlcp.values.planes import CODED_BITS, PlaneLayout
from dlcp.values.tags import Layer, Segment
from tests.bench import convergence, emulated_training
from tests.bench.__main__ import main
from tests.bench.convergence import LossCurve, measure
from tests.bench.emulated_training import EMULATED_RANKS, EmulatedRanks, Shortfall, TrainingRun, train

SHORT = 48
SIZES = {"conv.weight": 90_000, "conv.bias": 100, "embedding": 150_000, "fc.weight": 20_345}


@pytest.fixture
def short(monkeypatch):
    """A task of a few steps, named like the usual one."""
    monkeypatch.setitem(TASKS, "table", dataclasses.replace(TASKS["table"], steps=SHORT))


def ranks_of(shortfall, seed=1):
    stops = np.cumsum(list(SIZES.values())).tolist()
    segments = [
        Segment(Layer(name, 80 * number), stop - size, stop)
        for number, ((name, size), stop) in enumerate(zip(SIZES.items(), stops, strict=True))
    ]
    return EmulatedRanks(segments, shortfall, seed)


def steps_of(shortfall, steps):
    """Let ranks average made-up gradients; return them, all gradients, and all averages."""
    ranks, random = ranks_of(shortfall), np.random.default_rng(1)
    size = sum(SIZES.values())
    scale = np.repeat(random.lognormal(0, 1, -(-size // 360)), 360)[:size]
    given, averages = [], []
    for _ in range(steps):
        gradients = [(random.standard_normal(size) * scale).astype(np.float32) for _ in range(EMULATED_RANKS)]
        given.append([each.copy() for each in gradients])
        averages.append(ranks.average(gradients))
    return ranks, given, averages


def owed(ranks):
    """The residual of all ranks together."""
    values = np.zeros(sum(SIZES.values()))
    start = 0
    for name, size in SIZES.items():
        for residual in ranks.residuals:
            part = residual.of(name)
            values[start : start + size] += 0 if part is None else part
        start += size
    return values


@pytest.mark.parametrize(
    "shortfall",
    [
        Shortfall(lost=0.1),
        Shortfall(lost=0.3),
        Shortfall(bits=8),
        Shortfall(bits=8, lost=0.2),
        Shortfall(bits=3),
    ],
    ids=lambda each: each.name,
)
def test_what_does_not_come_is_owed(shortfall):
    ranks, given, averages = steps_of(shortfall, 4)
    sent = np.sum(averages, axis=0, dtype=np.float64) * EMULATED_RANKS
    assert np.abs(owed(ranks)).max() > 0
    np.testing.assert_allclose(sent + owed(ranks), np.sum(given, axis=(0, 1), dtype=np.float64), atol=2e-2)


def test_what_is_lost_for_good_is_owed_by_nobody():
    ranks, *_ = steps_of(Shortfall(lost=0.3, at_random=True, feedback=False), 4)
    assert not any(residual.size for residual in ranks.residuals)


@pytest.mark.parametrize("bits", CODED_BITS)
def test_from_the_second_step_on_averages_are_encoded(bits):
    _, given, (first, *later) = steps_of(Shortfall(bits=bits), 3)
    np.testing.assert_array_equal(first, sum(given[0]) / np.float32(EMULATED_RANKS))
    for start, stop in ranks_of(Shortfall())._bounds.values():
        layout = PlaneLayout(stop - start, bits, 1440)
        code, decoded = np.empty(layout.bytes, np.uint8), np.empty(stop - start, np.float32)
        for average in later:
            layout.encode(average[start:stop], code)
            layout.decode(code, decoded)
            np.testing.assert_array_equal(decoded, average[start:stop], "what is encoded stays as it is")


def test_of_lost_lower_digits_contributions_keep_the_upper_ones():
    def error(shortfall):
        _, given, averages = steps_of(shortfall, 2)
        return np.abs(averages[1] - np.mean(given[1], axis=0)).mean()

    assert error(Shortfall(bits=8)) < error(Shortfall(bits=8, lost=0.2)) < error(Shortfall(bits=4))


def test_four_bits_are_rounded_as_they_are_encoded():
    random = np.random.default_rng(5)
    values = (random.standard_normal(10_007) * 10.0 ** random.integers(-9, 3, 10_007)).astype(np.float32)
    values[:96] = [3.75, 3.74, -3.76] * 32  # halves and their neighbours
    values[96:128] = 0
    layout = PlaneLayout(len(values), 4, 1440)
    code, decoded = np.empty(layout.bytes, np.uint8), np.empty_like(values)
    layout.encode(values, code)
    layout.decode(code, decoded)
    np.testing.assert_array_equal(emulated_training.rounded(values, 4), decoded)


def test_the_hook_casts_and_owes_nothing():
    ranks = ranks_of(Shortfall(bf16_hook=True))
    values = np.random.default_rng(1).standard_normal(sum(SIZES.values())).astype(np.float32)
    average = ranks.average([values.copy() for _ in range(EMULATED_RANKS)])
    np.testing.assert_array_equal(average, torch.from_numpy(values).bfloat16().float().numpy())
    assert not any(residual.size for residual in ranks.residuals)


def test_a_shortfall_has_a_name():
    names = {
        "whole": Shortfall(),
        "bits8": Shortfall(bits=8),
        "bits8.lost0.2": Shortfall(bits=8, lost=0.2),
        "bf16.hook": Shortfall(bf16_hook=True),
        "lost0.1.random.gone": Shortfall(lost=0.1, at_random=True, feedback=False),
    }
    assert {name: each.name for name, each in names.items()} == {name: name for name in names}
    assert Shortfall(bits=8).share == 0.75


def test_without_shortfall_it_is_plain_training_bit_by_bit(short):
    task, seed = TASKS["table"], 3
    data, model = task.data(seed), task.network(seed)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rates["sgd"], momentum=0.9)
    rates = [min(1, (step + 1) / 10) * 0.5 * (1 + np.cos(np.pi * step / SHORT)) for step in range(SHORT)]
    for rate, batches in zip(
        rates, batches_of(SHORT, task.batch, len(data.train_labels), seed, EMULATED_RANKS), strict=True
    ):
        optimizer.zero_grad()
        for batch in batches:  # gradients add up in the order of ranks
            nn.functional.cross_entropy(model(data.train_inputs[batch]), data.train_labels[batch]).backward()
        for parameter in model.parameters():
            parameter.grad /= EMULATED_RANKS
        optimizer.param_groups[0]["lr"] = task.rates["sgd"] * rate
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data.test_inputs), data.test_labels).item()
    assert train("table", "sgd", Shortfall(), seed).losses[-1] == loss


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_seed_gives_one_run_and_a_loss_of_zero_the_whole_one(short, optimizer):
    shortfall = Shortfall(lost=0.3, at_random=True)
    run = train("table", optimizer, shortfall, 1)
    assert run == train("table", optimizer, shortfall, 1)
    assert run.losses != train("table", optimizer, shortfall, 2).losses
    whole = train("table", optimizer, Shortfall(), 1)
    assert train("table", optimizer, Shortfall(lost=0.0), 1) == whole
    assert run.losses != whole.losses


@pytest.mark.parametrize("name", TASKS)
def test_data_and_models_fit_each_other(name):
    task = TASKS[name]
    data, model = task.data(1), task.network(1)
    again, other = task.data(1), task.data(2)
    torch.testing.assert_close(data.train_inputs, again.train_inputs, rtol=0, atol=0)
    assert not torch.equal(data.test_labels, other.test_labels)
    assert data.test_labels.numel() >= 280
    assert task.steps % task.test_every == 0, "the last step is tested"
    assert len(data.train_labels) >= EMULATED_RANKS * task.batch
    scores = model(data.train_inputs[: task.batch])
    assert scores.shape[:-1] == data.train_labels[: task.batch].shape
    assert int(data.train_labels.max()) < scores.shape[-1]
    assert sum(parameter.numel() for parameter in model.parameters()) > 100 * 360, "enough packets to choose from"
    torch.testing.assert_close(next(model.parameters()), next(task.network(1).parameters()), rtol=0, atol=0)


def test_no_paragraph_is_both_for_training_and_for_testing():
    data = TASKS["gpt"].data(1)
    newline = learning_tasks._alphabet()["\n"]
    train, test = (
        set("".join(map(chr, each.flatten().tolist())).split(2 * chr(newline)))
        for each in (data.train_inputs, data.test_inputs)
    )
    assert len(train) > 1500
    assert len(test) > 40
    assert not train & test


def test_the_larger_model_has_more_than_ten_million_parameters():
    assert sum(parameter.numel() for parameter in TASKS["gpt"].network(1).parameters()) > 10e6


def run_of(losses, accuracy=0.9, shortfall="whole"):
    return TrainingRun("", "table", "sgd", shortfall, 0, 1, accuracy, losses)


def test_steps_to_a_loss_are_interpolated():
    curve = LossCurve([float(loss) for loss in range(12, 0, -1)])
    assert curve.steps == 48
    assert (curve.target, curve.last) == (10, 2)  # the mean of 11, 10 and 9, at step 16 of 48
    assert curve.steps_to(10) == 16
    assert curve.steps_to(9.75) == 17
    assert curve.steps_to(20) == 12
    assert curve.steps_to(1) is None
    assert LossCurve([3.0, 3.0, 3.0, 0.0], 30).steps_to(2.5) == 105


def test_a_run_is_compared_with_the_whole_one_of_its_seed():
    whole = run_of([float(loss) for loss in range(12, 0, -1)])
    slower = run_of([12, 12, 12, 11.5, 11, 10.5, 10, 9.5, 9, 8.5, 8, 7.5], 0.88, "lost0.5")
    never = run_of([12.0] * 12, 0.5, "lost0.5")
    nan = run_of([float("nan")] * 12, 0.1, "lost0.5")
    found = convergence.PairedRuns([slower, never, nan], [whole] * 3)
    assert found.factors() == [2, 3, 3]
    assert found.points() == pytest.approx([-2, -40, -80])
    details = found.result().details
    assert (details["reached_target"], details["loss_mean"], details["perplexity_ratio"]) == (1, None, None)
    json.dumps(details, allow_nan=False)


def test_a_curve_says_up_to_where_every_run_gets_there():
    whole = run_of([float(loss) for loss in range(12, 0, -1)])
    slower = run_of([12, 12, 12, 11.5, 11, 10.5, 10, 9.5, 9, 8.5, 8, 7.5], 0.88)
    never = run_of([12.0] * 12, 0.5)
    shares = {share: Shortfall(lost=share) for share in (0.25, 0.5, 0.75)}

    def curve(runs):
        pairs = {shares[share]: [convergence.PairedRuns(made, [whole] * 2)] for share, made in runs.items()}
        return convergence._curve("loss", "sgd", pairs)

    good, bad = [slower, slower], [slower, never]
    assert curve({0.25: good, 0.5: good})["reached"] == 0.5
    assert curve({0.25: good, 0.5: bad, 0.75: good})["reached"] == 0.25
    assert curve({0.25: bad, 0.5: good})["reached"] == 0
    assert curve({0.25: good, 0.5: bad})["points"] == [[0, 1], [0.25, 2], [0.5, 2.5]]


@pytest.mark.parametrize(("late", "accuracy", "good"), [(1, 0.9, True), (3, 0.9, False), (1, 0.89, False)])
def test_lower_precision_is_compared_with_the_hook(late, accuracy, good):
    losses = [float(loss) for loss in range(80, 0, -1)]
    whole = run_of(losses)
    hook = run_of([80.0, *losses[:-1]], shortfall="bf16.hook")
    ours = run_of([80.0] * late + losses[:-late], accuracy, "bits8")
    pairs = [(convergence.PairedRuns([each] * 2, [whole] * 2)) for each in (ours, hook)]
    found = convergence.beside_hook([tuple(pairs)] * 2)
    assert found.name == "convergence.bits8"
    assert found.details["as_good"] is good
    usual = LossCurve(losses).steps_to(LossCurve(losses).target)
    more = pytest.approx([4 * (late - 1) / usual, 0], abs=1e-3)
    assert found.details["additional_steps"] == more
    assert found.details["additional_steps_worst"] == {"table": more}
    assert found.details["points_above"] == pytest.approx([100 * (accuracy - 0.9), 0], abs=1e-3)


def test_a_sweep_goes_on_where_it_was_interrupted(short, tmp_path, monkeypatch):
    runs, curves, said = tmp_path / "deep" / "runs.jsonl", tmp_path / "curves.json", []
    sweep = {"runs": runs, "tasks": ["table"], "seeds": 2, "losses": [0.1], "bits": [8]}
    sweep["curves"] = curves
    other = {"name": "other", "measured": True, "source": "here", "points": [[0.0, 1.0]]}
    write(curves, [other, other | {"name": "loss_sgd"}])
    made = []
    monkeypatch.setattr(convergence, "train", lambda *what: made.append(what) or train(*what))
    with pytest.raises(ZeroDivisionError):
        measure(**sweep, progress=lambda words: said.append(words) or (len(said) == 3 and 1 / 0))
    first = measure(**sweep)
    assert len(made) == 2 * 2 * 6
    assert measure(**sweep) == first
    assert len(made) == 24, "nothing is repeated"
    assert said[1].startswith("table, sgd, lost0.1, seed 0: ")
    names = [
        "whole",
        "lost0.1",
        "lost0.1.random.gone",
        "bits8",
        "bits8.lost0.2",
        "bf16.hook",
    ]
    assert [each.name for each in first] == [
        *(f"convergence.table.{by}.{name}" for by in ("sgd", "adamw") for name in names),
        *("convergence.bits8", "convergence.bits8.lost0.2"),
    ]
    assert first[0].ratio == first[0].details["steps_factor"] == 1
    written = read(curves)
    families = ("loss", "loss_for_good", "precision")
    names = [f"{family}_{by}" for family in families for by in ("sgd", "adamw")]
    assert list(written) == ["other", *names], "other curves are kept"
    assert all("seeds 0 to 1" in written[name].source for name in names)
    assert written["precision_sgd"].reaches == 0.75
    assert written["loss_sgd"].steps_factor(0.1) == pytest.approx(first[1].details["steps_factor"])
    monkeypatch.setattr(convergence, "sources_digest", lambda: "other")
    measure(**sweep | {"seeds": 1, "curves": None})
    assert len(made) == 36, "what depends on other sources is"


def test_the_larger_task_is_compared_by_perplexity(tmp_path, monkeypatch):
    assert convergence.BENCHMARK.options["--tasks"]["default"] == list(SMALL_TASKS)
    assert "gpt" not in SMALL_TASKS
    small = dataclasses.replace(
        TASKS["gpt"],
        network=lambda seed: learning_tasks._Transformer(seed, learning_tasks._LONGER_CONTEXT, width=16, layers=1),
        steps=27,
        rates={"adamw": 0.03},
        test_every=3,
    )
    monkeypatch.setitem(TASKS, "gpt", small)
    runs, curves = tmp_path / "runs.jsonl", tmp_path / "curves.json"
    whole, lossy, _ = measure(runs=runs, tasks=["gpt"], seeds=1, losses=[0.1], curves=curves)
    assert [whole.name, lossy.name] == ["convergence.gpt.adamw.whole", "convergence.gpt.adamw.lost0.1"]
    losses = [json.loads(line)["losses"][-1] for line in runs.read_text().splitlines()]
    assert losses[0] < 4.2, "below ln 103: the number of characters"
    assert whole.details["perplexity_mean"] == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert lossy.details["perplexity_ratio"] == pytest.approx(math.exp(losses[1] - losses[0]), abs=1e-4)
    assert list(read(curves)) == ["loss_adamw", "loss_for_good_adamw"]


def test_nonsense_is_refused(tmp_path, capsys):
    usual = {"runs": tmp_path / "runs", "tasks": ["table"], "seeds": 1, "losses": [0.1]}
    for wrong, words in (
        ({"tasks": ["tabel"]}, "table"),
        ({"seeds": 0}, "seeds"),
        ({"losses": [1.0]}, "below 1"),
        ({"bits": [32]}, "from 2 to 31"),
    ):
        with pytest.raises(BenchError, match=words):
            measure(**usual | wrong)
    assert main(["convergence", "--tasks", "tabel", "--runs", str(tmp_path / "runs")]) == 1
    assert "did you mean table" in capsys.readouterr().err
