# SPDX-License-Identifier: Apache-2.0
"""Parameters are those of the published architectures, and times add up to the published throughput."""

import math

import pytest

from dlcp.sim.jobs.models import (
    MODELS,
    THROUGHPUTS,
    ModelInput,
    ProfileError,
    architecture,
    load_factory,
    measure,
    measured_profile,
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
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "mixtral_8x7b": 46_702_792_704,
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


def test_a_size_that_is_none_is_told_how_sizes_are_written() -> None:
    with pytest.raises(ValueError, match=r"no model '1Gb'.*; a size is written as 350MB or 16MiB"):
        architecture("1Gb")


def test_unknown_names_are_reported_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="did you mean vgg16"):
        architecture("vgg17")
    with pytest.raises(ValueError, match=r"resnet50 on h100 .* choose from: p100 single"):
        step_profile("resnet50", "h100")


def test_a_pytorch_model_is_measured(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    from dlcp.sim.jobs.models import measure

    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10))
    profile = measure(model, ModelInput(64, (512,)), name="own", rounds=3)
    assert [layer.parameters for layer in profile.layers] == [512 * 2048 + 2048, 2048 * 10 + 10]
    assert all(layer.forward_s > 0 for layer in profile.layers)
    assert profile.layers[0].backward_s > 0
    write_profile(profile, tmp_path / "own.yaml")
    assert read_profile(tmp_path / "own.yaml") == profile
    with pytest.raises(ProfileError, match="no parameters to train"):
        measure(torch.nn.ReLU(), ModelInput(1, (4,)), name="none")


OWN_MODELS = """
import torch
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, tokens, mask=None):
        values = self.table(tokens) if mask is None else self.table(tokens) * mask
        return {"logits": self.out(values), "cache": None}

class Wrapped(Tokens):
    def forward(self, numbers):
        return super().forward((numbers.abs() * 100).long() % 10)

class Reshaped(nn.Linear):
    def forward(self, values):
        return super().forward(values).view(3, 7)

def masked(count):
    return {"tokens": torch.randint(10, (count, 3)), "mask": torch.ones(count, 3, 1)}

def in_place():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))

def reshaped(): return Reshaped(4, 4)
def broken(): return {}["missing"]
def large(): return nn.Linear(1 << 20, 1 << 20)
def untrained(): return nn.Identity()

class Functional(nn.Linear):
    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)

class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small, self.out = nn.Embedding(90, 4), nn.Embedding(5, 4), nn.Linear(4, 10)

    def forward(self, tokens):
        return self.out(self.large(tokens) + self.small(tokens))

class Shifted(Tokens):
    def forward(self, numbers):
        return super().forward(numbers + 10)

class OneHot(nn.Linear):
    def forward(self, numbers):
        return super().forward(nn.functional.one_hot(numbers, num_classes=4).float())

class Tied(Tokens):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.table.weight

def functional(): return Functional(4, 9)
def one_hot(): return OneHot(4, 2)
def scripted(): return torch.jit.script(nn.Linear(4, 4))
def many(count): return torch.full((count, 3), 50)
def nothing(count): pass
def always_four(count): return torch.zeros(4, 5, dtype=torch.long)
def named_four(count): return {"more": [torch.zeros(4, dtype=torch.long)], "flag": True}
def sequences_first(count): return torch.zeros(5, count, dtype=torch.long)
"""


@pytest.fixture(scope="module")
def own_models(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("models")
    (folder / "own_models.py").write_text(OWN_MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder


@pytest.mark.parametrize(
    ("function", "given", "layers"),
    [
        ("Tokens", ModelInput(2, (5,)), 2),
        ("Tokens", ModelInput(2, (5,), vocabulary=7), 2),
        ("Tokens", ModelInput(2, batch_from="own_models:masked"), 2),
        ("Tokens", ModelInput(3, batch_from="own_models:sequences_first"), 2),
        ("Wrapped", ModelInput(2, (5,)), 2),
        ("in_place", ModelInput(3, (4,)), 3),
        ("functional", ModelInput(2, (5,)), 1),
        ("TwoTables", ModelInput(200, (5,)), 3),
        ("TwoTables", ModelInput(200, (5,), vocabulary=50), 3),
        ("one_hot", ModelInput(2, (5,)), 1),
    ],
)
def test_models_of_the_working_folder_are_measured(own_models, function: str, given: ModelInput, layers: int) -> None:
    profile = measured_profile(f"own_models:{function}", given)
    assert len(profile.layers) == layers
    assert profile.batch == given.batch
    assert profile.compute_s > 0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("reshaped", r"raised RuntimeError: shape .* \(.*own_models.py, line 20\)$"),
        ("broken", r"raised KeyError: 'missing' \(.*own_models.py, line 29\)$"),
        ("masked", "missing 1 required positional argument: 'count'"),
        ("large", r"a step of 1,099,512,676,352 parameters .* takes about 8796\.\d GB on cpu"),
        ("untrained", "no parameters to train"),
        ("Shifted", "--tokens: an embedding takes whole numbers from 0 to 9, and got others; change these tokens"),
        ("scripted", "scripted raised RuntimeError: .* not supported on ScriptModules"),
        ("brokn", "did you mean broken"),
    ],
)
def test_what_is_wrong_with_a_model_is_one_sentence(own_models, function: str, reason: str) -> None:
    with pytest.raises(ProfileError, match=reason):
        measured_profile(f"own_models:{function}", ModelInput(2, (4,)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("many", "own_models:many: an embedding takes whole numbers from 0 to 4, and got others"),
        ("nothing", "own_models:nothing returned nothing; it must return a tensor, a tuple"),
        (
            "always_four",
            r"always_four was asked for 2 samples, and returned a tensor of shape \(4, 5\): return as many",
        ),
        ("named_four", r"named_four was asked for 2 samples, and returned a tensor of shape \(4,\): return as many"),
    ],
)
def test_what_is_wrong_with_a_models_input_is_one_sentence(own_models, function: str, reason: str) -> None:
    with pytest.raises(ProfileError, match=reason):
        measured_profile("own_models:TwoTables", ModelInput(2, batch_from=f"own_models:{function}"))


def test_an_input_that_no_tensor_can_hold_is_one_sentence(own_models) -> None:
    with pytest.raises(ProfileError, match="own_models:in_place raised RuntimeError"):
        measured_profile("own_models:in_place", ModelInput(2, (1 << 31, 1 << 31)))


def test_shared_parameters_count_once_in_the_layer_whose_gradient_comes_last(own_models) -> None:
    profile = measured_profile("own_models:Tied", ModelInput(2, (5,)))
    assert [(layer.name, layer.parameters) for layer in profile.layers] == [("table", 40), ("out", 0)]


def test_a_module_that_is_not_there_is_named(own_models) -> None:
    with pytest.raises(ProfileError, match="there is no module 'own_model' here"):
        load_factory("own_model:Tokens")


def test_an_embedding_that_is_called_by_keyword_gets_tokens():
    torch = pytest.importorskip("torch")

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 2)

        def forward(self, numbers):
            return self.out(self.table(input=numbers))

    profile = measure(Named(), ModelInput(2, (3,)), name="named", rounds=1)
    assert [layer.parameters for layer in profile.layers] == [40, 10]
