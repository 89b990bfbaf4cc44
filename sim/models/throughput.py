# SPDX-License-Identifier: Apache-2.0
"""How fast GPUs train these networks, as published; each figure with its source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dlcp.sim.models.attention import bert_large, gpt_2_7b, transformer
from dlcp.sim.models.convolutional import inception_v3, resnet50, vgg16
from dlcp.sim.models.profile import BACKWARD_OVER_FORWARD, Network, StepProfile, timed

from dlcp.suggestion import nearest

NETWORKS: Final[dict[str, Callable[[], Network]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "inception_v3": inception_v3,
    "transformer": transformer,
    "bert_large": bert_large,
    "gpt_2_7b": gpt_2_7b,
}


@dataclass(frozen=True, slots=True)
class Throughput:
    """A published figure.

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
"""Where a GPT's rate stands for another transformer (A100 and H100), its source says so by naming the GPT. Batches of
figures in FLOP/s are chosen by us, as memory allows."""


def network(name: str) -> Network:
    """Return a network by name.

    Raises
    ------
    ValueError
        There is none of that name.
    """
    if name not in NETWORKS:
        raise ValueError(f"there is no model {name!r}{nearest(name, NETWORKS)}")
    return NETWORKS[name]()


def step_profile(model: str, gpu: str, precision: str = "mixed", batch: int | None = None) -> StepProfile:
    """Return a step of a model on a GPU.

    Parameters
    ----------
    batch
        Samples of a worker in a step; the published one if None. Another batch takes time in proportion.

    Raises
    ------
    ValueError
        Nothing is published of that model on that GPU; the message says of which there is.
    """
    described = network(model)
    for entry in THROUGHPUTS:
        if (entry.model, entry.gpu, entry.precision) == (model, gpu, precision):
            rate = entry.samples_per_s or entry.flops_per_s / (2 * described.macs * (1 + BACKWARD_OVER_FORWARD))
            return timed(described, batch or entry.batch, rate, entry.source)
    known = [f"{entry.gpu} {entry.precision}" for entry in THROUGHPUTS if entry.model == model]
    raise ValueError(
        f"no throughput is known of {model} on {gpu} in {precision} precision; there are: {', '.join(known)}"
    )
