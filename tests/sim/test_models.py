# SPDX-License-Identifier: Apache-2.0
"""Parameters are those of the published architectures, and times add up to the published throughput."""

import math

import pytest

from dlcp.sim.models import (
    MODELS,
    THROUGHPUTS,
    ProfileError,
    architecture,
    measure,
    read_profile,
    step_profile,
    write_profile,
)

PUBLISHED = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "inception_v3": 23_834_568,
    "bert_large": 335_141_888,
}
"""As torchvision and Hugging Face count them (Inception without its auxiliary classifier, BERT with its pooler)."""
GIGA_MACS = {"resnet50": 4.09, "resnet101": 7.80, "vgg16": 15.47, "inception_v3": 5.71}
"""As torchvision's documentation of weights gives them."""


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters(name: str, parameters: int) -> None:
    assert architecture(name).parameters == parameters


@pytest.mark.parametrize(("name", "giga"), GIGA_MACS.items())
def test_multiplications(name: str, giga: float) -> None:
    assert architecture(name).macs / 1e9 == pytest.approx(giga, abs=0.01)


def test_the_transformer_is_pytorchs() -> None:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = torch.nn.Transformer(1024, 16, 6, 6, 4096)
    # PyTorch ends encoder and decoder with one more layer norm each.
    count = sum(parameter.numel() for parameter in model.parameters()) - 2 * 2 * 1024
    described = architecture("transformer")
    assert described.parameters == count + 33_708 * 1024


def test_the_gpt_has_its_2_7_billion() -> None:
    assert architecture("gpt_2_7b").parameters == pytest.approx(2.65e9, rel=0.01)


@pytest.mark.parametrize("entry", THROUGHPUTS, ids=lambda entry: f"{entry.model}-{entry.gpu}-{entry.precision}")
def test_times_add_up(entry) -> None:
    profile = step_profile(entry.model, entry.gpu, entry.precision)
    if entry.samples_per_s:
        assert profile.batch / profile.compute_s == pytest.approx(entry.samples_per_s)
    forward = math.fsum(layer.forward_s for layer in profile.layers)
    assert math.fsum(layer.backward_s for layer in profile.layers) == pytest.approx(2 * forward)
    half = step_profile(entry.model, entry.gpu, entry.precision, 2 * profile.batch)
    assert half.compute_s == pytest.approx(2 * profile.compute_s)


def test_every_model_has_two_gpus() -> None:
    for name in MODELS:
        assert len({entry.gpu for entry in THROUGHPUTS if entry.model == name}) >= 2


def test_unknown_names_are_reported_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="did you mean vgg16"):
        architecture("vgg17")
    with pytest.raises(ValueError, match=r"resnet50 on h100 .* choose from: p100 single"):
        step_profile("resnet50", "h100")


def test_a_pytorch_model_is_measured(tmp_path) -> None:
    torch = pytest.importorskip("torch")

    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10))
    profile = measure(model, (512,), batch=64, name="own", rounds=3)
    assert [layer.parameters for layer in profile.layers] == [512 * 2048 + 2048, 2048 * 10 + 10]
    assert all(layer.forward_s > 0 for layer in profile.layers)
    assert profile.layers[0].backward_s > 0
    write_profile(profile, tmp_path / "own.yaml")
    assert read_profile(tmp_path / "own.yaml") == profile
    with pytest.raises(ProfileError, match="no parameters to train"):
        measure(torch.nn.ReLU(), (4,), batch=1, name="none")


@pytest.mark.parametrize(("shape", "batch"), [((7,), 2), ((4,), 1 << 40)])
def test_an_input_on_which_a_model_fails_is_refused(shape, batch) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ProfileError, match=r"own does not run on \d+ samples of shape \(\d,\): .*; check --input"):
        measure(torch.nn.Linear(4, 2), shape, batch=batch, name="own")
