# SPDX-License-Identifier: Apache-2.0
"""How long a worker computes, layer by layer: from published throughput with its source, or from a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import yaml

from dlcp.document import Document
from dlcp.sim.models.architectures import ModelArchitecture, architecture

BACKWARD_OVER_FORWARD: Final = 2.0
"""Backward has two matrix products for each one of forward, for the gradients of inputs and of weights (Narayanan et
al., SC 2021, arXiv 2104.04473, appendix)."""


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """A layer, and how long it computes in one step on one worker."""

    name: str
    parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """How long a worker computes in one step; layers from the input to the output.

    Parameters
    ----------
    batch
        Samples of a worker in a step.
    source
        Where the times are from.
    """

    name: str
    layers: tuple[TimedLayer, ...]
    batch: int
    source: str

    @property
    def parameters(self) -> int:
        """Return how many values are trained."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Return how long a step takes one worker alone."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


def timed(described: ModelArchitecture, batch: int, samples_per_s: float, source: str) -> StepProfile:
    """Return a step that takes ``batch / samples_per_s``.

    A third of it is forward, and each layer's share of a pass is its share of the multiplications. So memory-bound
    layers seem faster than they are; their share of a step is small in these models.
    """
    forward_s = batch / samples_per_s / (1 + BACKWARD_OVER_FORWARD)
    layers = []
    for layer in described.layers:
        own = forward_s * layer.macs / described.macs
        layers.append(TimedLayer(layer.name, layer.parameters, own, own * BACKWARD_OVER_FORWARD))
    return StepProfile(described.name, tuple(layers), batch, source)


def read_profile(path: Path) -> StepProfile:
    """Return a profile, written by `write_profile` or by hand.

    Raises
    ------
    dlcp.document.DocumentError
        It cannot be read, or says something that no profile says; the message names the line.
    """
    document = Document(path)
    profile = document.convert(StepProfile)
    if not profile.layers:
        raise document.error("a profile needs at least one layer", ("layers",))
    return profile


def write_profile(profile: StepProfile, path: Path) -> None:
    """Write a profile as YAML."""
    path.write_text(
        "# SPDX-License-Identifier: Apache-2.0\n" + yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False),
        encoding="utf-8",
    )


@dataclass(frozen=True, slots=True)
class Throughput:
    """A published throughput.

    Parameters
    ----------
    precision
        ``single`` (TF32 on an A100) or ``mixed``.
    batch
        Samples per GPU and step.
    samples_per_s
        Of one GPU alone; 0 where ``flops_per_s`` is given.
    flops_per_s
        Model floating-point operations per second that were achieved (not the peak).
    """

    model: str
    gpu: str
    precision: str
    batch: int
    source: str
    samples_per_s: float = 0.0
    flops_per_s: float = 0.0


_TENSORFLOW: Final = "TensorFlow benchmarks, May 2017, DGX-1, synthetic data (tensorflow.org/performance/benchmarks)"
_LAMBDA: Final = "github.com/lambdal/lambda-tensorflow-benchmark, logs of one GPU: "
_V100: Final = _LAMBDA + "Tesla V100-SXM3-32GB"
_A100: Final = _LAMBDA + "A100-PCIE-40GB"
_EXAMPLES: Final = "github.com/NVIDIA/DeepLearningExamples, "
_MEGATRON1: Final = "Shoeybi et al., arXiv 1909.08053: 39 TFLOP/s sustained on one V100"
_MEGATRON2: Final = "Narayanan et al., arXiv 2104.04473, table 1: 137 TFLOP/s per A100 for 1.7 billion parameters"
_MEGATRON3: Final = "github.com/NVIDIA/Megatron-LM, README: 41 % of an H100's 989 TFLOP/s for the smallest GPT"

THROUGHPUTS: Final = (
    Throughput("resnet50", "p100", "single", 64, _TENSORFLOW, 219.0),
    Throughput("inception_v3", "p100", "single", 64, _TENSORFLOW, 142.0),
    Throughput("vgg16", "p100", "single", 64, _TENSORFLOW, 154.0),
    Throughput("resnet50", "v100", "single", 192, _V100, 432.16),
    Throughput("inception_v3", "v100", "single", 192, _V100, 273.17),
    Throughput("vgg16", "v100", "single", 192, _V100, 249.19),
    Throughput("resnet50", "v100", "mixed", 384, _V100, 1276.24),
    Throughput("inception_v3", "v100", "mixed", 384, _V100, 771.37),
    Throughput("vgg16", "v100", "mixed", 384, _V100, 455.93),
    Throughput("resnet50", "a100", "single", 224, _A100, 953.43),
    Throughput("inception_v3", "a100", "single", 224, _A100, 627.35),
    Throughput("vgg16", "a100", "single", 224, _A100, 503.61),
    Throughput("resnet50", "a100", "mixed", 448, _A100, 2075.05),
    Throughput("inception_v3", "a100", "mixed", 360, _A100, 1222.30),
    Throughput("vgg16", "a100", "mixed", 448, _A100, 1189.76),
    Throughput("transformer", "v100", "single", 2560, _EXAMPLES + "Transformer, DGX-1 16 GB, 1 GPU", 7635.0),
    Throughput("transformer", "v100", "mixed", 5120, _EXAMPLES + "Transformer, DGX-1 16 GB, 1 GPU", 32153.0),
    Throughput("bert_large", "v100", "single", 7, _EXAMPLES + "BERT (March 2019), DGX-2 32 GB, 1 GPU", 8.47),
    Throughput("bert_large", "v100", "mixed", 14, _EXAMPLES + "BERT (March 2019), DGX-2 32 GB, 1 GPU", 28.28),
    Throughput("gpt_2_7b", "v100", "mixed", 8, _MEGATRON1, flops_per_s=39e12),
    Throughput("transformer", "a100", "mixed", 5120, _MEGATRON2, flops_per_s=137e12),
    Throughput("bert_large", "a100", "mixed", 32, _MEGATRON2, flops_per_s=137e12),
    Throughput("gpt_2_7b", "a100", "mixed", 16, _MEGATRON2, flops_per_s=137e12),
    Throughput("transformer", "h100", "mixed", 5120, _MEGATRON3, flops_per_s=0.41 * 989e12),
    Throughput("bert_large", "h100", "mixed", 64, _MEGATRON3, flops_per_s=0.41 * 989e12),
    Throughput("gpt_2_7b", "h100", "mixed", 16, _MEGATRON3, flops_per_s=0.41 * 989e12),
)
"""On the A100 and the H100 a GPT's rate stands for other transformers too; the source names the GPT. Where FLOP/s are
given, the batch is chosen by us, as memory allows."""


def step_profile(name: str, gpu: str, precision: str = "mixed", batch: int | None = None) -> StepProfile:
    """Return a step of a model on a GPU.

    Parameters
    ----------
    batch
        Samples of a worker in a step; None takes the published one. Time is in proportion to it.

    Raises
    ------
    ValueError
        Nothing is published of that model on that GPU; the message says of which there is.
    """
    described = architecture(name)
    for entry in THROUGHPUTS:
        if (entry.model, entry.gpu, entry.precision) == (name, gpu, precision):
            rate = entry.samples_per_s or entry.flops_per_s / (2 * described.macs * (1 + BACKWARD_OVER_FORWARD))
            return timed(described, batch or entry.batch, rate, entry.source)
    known = [f"{entry.gpu} {entry.precision}" for entry in THROUGHPUTS if entry.model == name]
    raise ValueError(
        f"no throughput is known of {name} on {gpu} in {precision} precision; there are: {', '.join(known)}"
    )
