# SPDX-License-Identifier: Apache-2.0
"""Five small models and a larger one, on data from installed packages, and how to train them.

Every task is a classification, so that accuracies can be compared in points: the share of test samples, or of
characters, that the model gets right. ``python -m tests.bench convergence`` trains them. So do jobs of the simulator
with ``learn``, except the larger one. The demo trains the first.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_sample_images
from torch import nn


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Inputs and the classes that they belong to, for training and for testing; the first axis counts samples."""

    train_inputs: torch.Tensor
    train_labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor


TEST_EVERY: Final = 4
"""Steps from one test of a small model to the next."""


@dataclass(frozen=True, slots=True)
class LearningTask:
    """A learning task.

    Parameters
    ----------
    words
        Description of the model and its data.
    data
        Returns the data for a seed.
    network
        Returns the model, initialised from a seed. It maps inputs to one score for each class, along the last axis.
    steps, batch
        How many steps to train for, and how many samples each rank has in one.
    rates
        Learning rates by optimizer, the best of a few. Other optimizers are not used.
    test_every
        Steps from one test to the next.
    """

    words: str
    data: Callable[[int], LabelledData]
    network: Callable[[int], nn.Module]
    steps: int
    batch: int
    rates: Mapping[str, float]
    test_every: int = TEST_EVERY


# Digits ---------------------------------------------------------------------------------------------------------------


_TEST_DIGITS: Final = 360


def _digits(seed: int) -> LabelledData:
    """Return scikit-learn's 1,797 digits, shape (n, 1, 8, 8), normalised; the seed chooses those for testing."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    images = torch.tensor(data.images[order], dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(data.target[order])
    return LabelledData(images[_TEST_DIGITS:], labels[_TEST_DIGITS:], images[:_TEST_DIGITS], labels[:_TEST_DIGITS])


def _convolutional_network(seed: int) -> nn.Sequential:
    """Return a network of 514,314 parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    inputs = 1
    for number, outputs in enumerate((32, 64, 128, 192), 1):
        model.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, 3, padding=1))
        model.add_module(f"norm{number}", nn.GroupNorm(8, outputs))
        model.add_module(f"relu{number}", nn.ReLU())
        if number % 2 == 0:
            model.add_module(f"pool{number}", nn.MaxPool2d(2))
        inputs = outputs
    model.add_module("flatten", nn.Flatten())
    model.add_module("fc1", nn.Linear(768, 256))
    model.add_module("relu5", nn.ReLU())
    model.add_module("fc2", nn.Linear(256, 10))
    return model


# Patches of photographs -----------------------------------------------------------------------------------------------

_PATCH: Final = 12
"""Pixels along each side."""
_ROWS, _COLUMNS = 2, 3
"""Number of parts into which each photograph is divided."""
_TEST_PATCHES: Final = 1200


def _patches(seed: int) -> LabelledData:
    """Return all 3,710 patches of two photographs; the class is the photograph, and the part of it.

    Patches do not overlap. The seed chooses those for testing.
    """
    photographs = torch.tensor(np.stack(load_sample_images().images), dtype=torch.float32)
    photographs = (photographs - photographs.mean((0, 1, 2))) / photographs.std((0, 1, 2))
    count, height, width, colours = photographs.shape
    rows, columns = height // _PATCH, width // _PATCH
    cut = photographs[:, : rows * _PATCH, : columns * _PATCH].reshape(count, rows, _PATCH, columns, _PATCH, colours)
    patches = cut.permute(0, 1, 3, 5, 2, 4).reshape(-1, colours, _PATCH, _PATCH)
    number, row, column = np.indices((count, rows, columns)).reshape(3, -1)
    part = (number * _ROWS + row * _ROWS // rows) * _COLUMNS + column * _COLUMNS // columns
    order = np.random.default_rng(seed).permutation(len(patches))
    inputs, labels = patches[order], torch.from_numpy(part[order])
    return LabelledData(inputs[_TEST_PATCHES:], labels[_TEST_PATCHES:], inputs[:_TEST_PATCHES], labels[:_TEST_PATCHES])


class _ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation around a shortcut (He et al., CVPR 2016)."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = out // channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self.body(inputs) + self.shortcut(inputs)
        return torch.relu(summed)


def _residual_network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    blocks = (_ResidualBlock(16, 16), _ResidualBlock(16, 32), _ResidualBlock(32, 64))
    stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12))


# Text -----------------------------------------------------------------------------------------------------------------

_CONTEXT: Final = 48
_TEST_WINDOWS: Final = 300
_LONGER_CONTEXT: Final = 64
_TEST_CHARACTERS: Final = 12_000
"""A test takes about as long as six steps of training."""


@cache
def _alphabet() -> Mapping[str, int]:
    """Return the characters of the text, and a number for each."""
    return {character: number for number, character in enumerate(sorted(set(_help())))}


def _windows(text: str, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the windows of a text, shape (windows, context), and for each position the next character."""
    numbers = torch.tensor([_alphabet()[character] for character in text])
    end = (len(text) - 1) // context * context
    return numbers[:end].view(-1, context), numbers[1 : end + 1].view(-1, context)


def text_digest() -> str:
    """Return a hash of the text, which differs by version of Python."""
    return hashlib.sha256(_help().encode()).hexdigest()[:16]


def _help() -> str:
    """Return the text of ``help()`` on Python's keywords: 465,000 characters in Python 3.11."""
    return "".join(topics[name] for name in sorted(topics))


def _characters(seed: int) -> LabelledData:
    """Return windows of the text, and for each position the next character; the seed chooses those for testing."""
    inputs, labels = _windows(_help(), _CONTEXT)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(inputs)))
    inputs, labels = inputs[order], labels[order]
    return LabelledData(inputs[_TEST_WINDOWS:], labels[_TEST_WINDOWS:], inputs[:_TEST_WINDOWS], labels[:_TEST_WINDOWS])


def _paragraphs(seed: int) -> LabelledData:
    """Return windows of the text's paragraphs in an order drawn by the seed; the first paragraphs are for testing.

    The help repeats a fifth of its paragraphs under several keywords. Here each occurs once, so none is in both parts.
    """
    paragraphs = np.array(list(dict.fromkeys(_help().split("\n\n"))), dtype=object)
    order = np.random.default_rng(seed).permutation(len(paragraphs))
    ends = np.cumsum([len(each) for each in paragraphs[order]])
    test, train = np.split(paragraphs[order], [np.searchsorted(ends, _TEST_CHARACTERS)])
    parts = [_windows("\n\n".join(part), _LONGER_CONTEXT) for part in (train, test)]
    return LabelledData(*parts[0], *parts[1])


class _Transformer(nn.Module):
    """A transformer that predicts the next character; normalisation comes first, as in GPT-2."""

    def __init__(self, seed: int, context: int = _CONTEXT, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        alphabet = len(_alphabet())
        self.character = nn.Embedding(alphabet, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.character(inputs) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[-1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


def _larger_transformer(seed: int) -> nn.Module:
    """Return a model of 10.7 million parameters: the sizes of the "baby GPT" in nanoGPT, except for its context."""
    return _Transformer(seed, _LONGER_CONTEXT, width=384, layers=6, heads=6)


# Recommendations ------------------------------------------------------------------------------------------------------

_USERS, _ITEMS = 3000, 1500
_TASTES: Final = 2
"""Number of traits in which the users of the ground truth differ."""
_SEEN: Final = 60_000


def _ratings(seed: int) -> LabelledData:
    """Return pairs of a user and an item, and whether the user likes it.

    Few items and few users make up most pairs, by Zipf's law with an exponent of 0.8. Some users like more items, some
    items are better, and tastes differ; that is drawn once for all seeds. A tenth of the answers are wrong.
    """
    truth, random = np.random.default_rng(1), np.random.default_rng(seed)
    users = truth.standard_normal((_USERS, _TASTES + 1))
    items = truth.standard_normal((_ITEMS, _TASTES + 1))
    count = _SEEN + _SEEN // 10
    pairs = np.stack([random.choice(size, count, p=_popularity(size, truth)) for size in (_USERS, _ITEMS)], axis=1)
    user, item = users[pairs[:, 0]], items[pairs[:, 1]]
    likes = user[:, 0] + item[:, 0] + (user[:, 1:] * item[:, 1:]).sum(1) > 0
    likes ^= random.random(count) < 0.1
    inputs, labels = torch.from_numpy(pairs), torch.from_numpy(likes.astype(np.int64))
    return LabelledData(inputs[:_SEEN], labels[:_SEEN], inputs[_SEEN:], labels[_SEEN:])


def _popularity(count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return how often each user or item occurs, in random order."""
    weights: NDArray[np.float64] = random.permutation(np.arange(1, count + 1) ** -0.8)
    weights /= weights.sum()
    return weights


class _Recommender(nn.Module):
    """Embeddings of users and items, and a small network that judges a pair: neural collaborative filtering."""

    def __init__(self, seed: int, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.Embedding(_USERS, width)
        self.items = nn.Embedding(_ITEMS, width)
        for embedding in (self.users, self.items):
            nn.init.normal_(embedding.weight, std=0.1)
        self.judge = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        user, item = self.users(inputs[:, 0]), self.items(inputs[:, 1])
        scores: torch.Tensor = self.judge(torch.cat([user, item, user * item], dim=1))
        return scores


# A table --------------------------------------------------------------------------------------------------------------


def _table(seed: int) -> LabelledData:
    """Return measurements of 569 tumours, and which were benign; half of them are for testing."""
    data = load_breast_cancer()
    order = np.random.default_rng(seed).permutation(len(data.target))
    values = torch.tensor(data.data[order], dtype=torch.float32)
    values = (values - values.mean(0)) / values.std(0)
    labels, half = torch.tensor(data.target[order]), len(order) // 2
    return LabelledData(values[:half], labels[:half], values[half:], labels[half:])


def _perceptron(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(30, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


SMALL_TASKS: Final[dict[str, LearningTask]] = {
    "digits": LearningTask(
        "the demo's convolutional network on scikit-learn's handwritten digits",
        _digits,
        _convolutional_network,
        108,
        12,
        {"sgd": 0.02, "adamw": 0.002},
    ),
    "patches": LearningTask(
        "a residual network with batch normalisation that tells which part of two photographs a patch is from",
        _patches,
        _residual_network,
        168,
        24,
        {"sgd": 0.03, "adamw": 0.003},
    ),
    "text": LearningTask(
        "a transformer that predicts the next character of the help of Python's interpreter",
        _characters,
        _Transformer,
        168,
        6,
        {"sgd": 0.3, "adamw": 0.015},
    ),
    "ratings": LearningTask(
        "embeddings and a small network that predict what a user likes; synthetic, popularity by Zipf's law",
        _ratings,
        _Recommender,
        204,
        256,
        {"sgd": 2.5, "adamw": 0.01},
    ),
    "table": LearningTask(
        "three hidden layers on scikit-learn's breast cancer table",
        _table,
        _perceptron,
        108,
        16,
        {"sgd": 0.015, "adamw": 0.0005},
    ),
}
TASKS: Final = SMALL_TASKS | {
    "gpt": LearningTask(
        "a transformer of 10.7 million parameters on the help of Python's interpreter, each paragraph once",
        _paragraphs,
        _larger_transformer,
        300,
        1,
        {"adamw": 0.001},
        test_every=30,
    )
}


# Training -------------------------------------------------------------------------------------------------------------

OPTIMIZER_MAKERS: Final[dict[str, Callable[[Sequence[nn.Parameter], float], torch.optim.Optimizer]]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
}
RATE_WARM_UP_STEPS: Final = 10
"""Steps until the learning rate is reached; from then on it falls as a cosine."""


def schedule_of(
    optimizer: torch.optim.Optimizer, steps: int, warm_up: int = RATE_WARM_UP_STEPS
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning-rate schedule of a run of ``steps`` steps: linear warm-up, then cosine decay."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )


def batches_of(steps: int, batch: int, samples: int, seed: int, ranks: int) -> Iterator[torch.Tensor]:
    """Yield the samples of each step by rank, shape (ranks, batch); none occurs twice in an epoch.

    If a step takes more samples than there are, all occur about equally often in it.
    """
    random, size = np.random.default_rng([seed, 1]), ranks * batch
    left = np.zeros(0, np.int64)
    for _ in range(steps):
        if len(left) < size:
            left = np.concatenate([random.permutation(samples) for _ in range(-(-size // samples))])
        yield torch.from_numpy(left[:size].reshape(ranks, batch))
        left = left[size:]


def assign(parameters: Sequence[nn.Parameter], values: NDArray[np.float32]) -> None:
    """Give parameters their gradients, which lie one after another in ``values``."""
    parts = torch.from_numpy(values).split_with_sizes([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of scores, whose last axis counts classes."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def evaluate(model: nn.Module, data: LabelledData) -> tuple[float, float]:
    """Return the share of test samples that a model gets right, and its loss on them."""
    model.eval()
    with torch.no_grad():
        scores = model(data.test_inputs)
    model.train()
    right = (scores.argmax(-1) == data.test_labels).float().mean()
    return right.item(), loss_of(scores, data.test_labels).item()
