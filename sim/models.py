# SPDX-License-Identifier: Apache-2.0
"""Computing times of a worker, layer by layer.

Models are described by the parameters and multiplications of their layers, according to their papers and torchvision.
Times come from published throughput with its source, or from a file.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import yaml

from dlcp.document import Document
from dlcp.error_text import nearest


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """Parameters whose gradients become ready together.

    Parameters
    ----------
    parameters
        Number of values.
    macs
        Multiply-accumulate operations of the forward pass, for one sample (an image, a sequence, or a token).
    """

    name: str
    parameters: int
    macs: int


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A model as its authors describe it; layers from the input to the output.

    Parameters
    ----------
    sample
        Unit of the batch size: ``image``, ``sequence`` or ``token``.
    source
        Publication that describes the architecture.
    """

    name: str
    layers: tuple[ModelLayer, ...]
    sample: str
    source: str

    @property
    def parameters(self) -> int:
        """Return the number of trained values."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Return the multiply-accumulate operations of a sample's forward pass."""
        return sum(layer.macs for layer in self.layers)


@dataclass(slots=True)
class _Stack:
    """Layers so far, and the shape of their output."""

    channels: int
    height: int
    width: int
    layers: list[ModelLayer] = field(default_factory=list)

    def branch(self) -> "_Stack":
        """Return a stack that starts from here and adds to the same layers."""
        return _Stack(self.channels, self.height, self.width, self.layers)

    def conv(
        self, out: int, kernel: int | tuple[int, int], *, stride: int = 1, same: bool = True, bias: bool = False
    ) -> "_Stack":
        """Add a convolution with a bias, or with a batch norm instead (a scale and a shift per channel)."""
        high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        self._shrink(high, wide, stride, same)
        weights = self.channels * high * wide * out
        macs = weights * self.height * self.width
        self.layers.append(ModelLayer(f"conv{len(self.layers) + 1}", weights + (out if bias else 2 * out), macs))
        self.channels = out
        return self

    def pool(self, kernel: int, stride: int, *, same: bool = False) -> "_Stack":
        """Add a pooling layer, which has no parameters."""
        self._shrink(kernel, kernel, stride, same)
        return self

    def dense(self, inputs: int, out: int) -> "_Stack":
        """Add a fully connected layer with a bias."""
        self.layers.append(ModelLayer(f"fc{len(self.layers) + 1}", inputs * out + out, inputs * out))
        return self

    def _shrink(self, high: int, wide: int, stride: int, same: bool) -> None:
        pad_high, pad_wide = (high // 2, wide // 2) if same else (0, 0)
        self.height = (self.height + 2 * pad_high - high) // stride + 1
        self.width = (self.width + 2 * pad_wide - wide) // stride + 1


def resnet50() -> ModelArchitecture:
    """Return ResNet-50 with the stride in the 3x3 convolutions (v1.5, as in torchvision)."""
    stack = _Stack(3, 224, 224).conv(64, 7, stride=2).pool(3, 2, same=True)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            if not block:
                stack.branch().conv(4 * width, 1, stride=stride)
            stack.conv(width, 1).conv(width, 3, stride=stride).conv(4 * width, 1)
    stack.dense(2048, 1000)
    return ModelArchitecture("resnet50", tuple(stack.layers), "image", "He et al., CVPR 2016, arXiv 1512.03385; v1.5")


def vgg16() -> ModelArchitecture:
    """Return VGG-16 (configuration D, without batch norm)."""
    stack = _Stack(3, 224, 224)
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            stack.conv(width, 3, bias=True)
        stack.pool(2, 2)
    stack.dense(512 * 7 * 7, 4096).dense(4096, 4096).dense(4096, 1000)
    return ModelArchitecture(
        "vgg16", tuple(stack.layers), "image", "Simonyan and Zisserman, ICLR 2015, arXiv 1409.1556"
    )


def inception_v3() -> ModelArchitecture:
    """Return Inception-v3 without its auxiliary classifier."""
    stack = _Stack(3, 299, 299).conv(32, 3, stride=2, same=False).conv(32, 3, same=False).conv(64, 3)
    stack.pool(3, 2).conv(80, 1).conv(192, 3, same=False).pool(3, 2)
    for pooled in (32, 64, 64):
        _branches(
            stack,
            [(64, 1)],
            [(48, 1), (64, 5)],
            [(64, 1), (96, 3), (96, 3)],
            [(pooled, 1)],
            out=64 + 64 + 96 + pooled,
        )
    _reduction(stack, [(384, 3)], [(64, 1), (96, 3), (96, 3)], out=384 + 96 + 288)
    for inner in (128, 160, 160, 192):
        _branches(
            stack,
            [(192, 1)],
            [(inner, 1), (inner, (1, 7)), (192, (7, 1))],
            [(inner, 1), (inner, (7, 1)), (inner, (1, 7)), (inner, (7, 1)), (192, (1, 7))],
            [(192, 1)],
            out=768,
        )
    _reduction(stack, [(192, 1), (320, 3)], [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)], out=320 + 192 + 768)
    for _ in range(2):
        _branches(stack, [(320, 1)], out=stack.channels)
        for first in ([(384, 1)], [(448, 1), (384, 3)]):
            split = stack.branch()
            for out, kernel in first:
                split.conv(out, kernel)
            split.branch().conv(384, (1, 3))
            split.branch().conv(384, (3, 1))
        _branches(stack, [(192, 1)], out=2048)
    stack.dense(2048, 1000)
    source = "Szegedy et al., CVPR 2016, arXiv 1512.00567"
    return ModelArchitecture("inception_v3", tuple(stack.layers), "image", source)


_Branch = list[tuple[int, int | tuple[int, int]]]


def _branches(stack: _Stack, *branches: _Branch, out: int) -> None:
    """Add branches that are concatenated to ``out`` channels."""
    for branch in branches:
        one = stack.branch()
        for channels, kernel in branch:
            one.conv(channels, kernel)
    stack.channels = out


def _reduction(stack: _Stack, *branches: _Branch, out: int) -> None:
    """Add branches whose last convolution halves the image, beside a pooling layer that halves it too."""
    one = stack
    for branch in branches:
        one = stack.branch()
        for channels, kernel in branch[:-1]:
            one.conv(channels, kernel)
        one.conv(*branch[-1], stride=2, same=False)
    stack.channels, stack.height, stack.width = out, one.height, one.width


def _attention(name: str, width: int, context: int) -> ModelLayer:
    """Return an attention layer for one token: four projections with biases, a layer norm, and ``context`` tokens."""
    return ModelLayer(name, 4 * (width * width + width) + 2 * width, 4 * width * width + 2 * context * width)


def _feed_forward(name: str, width: int, inner: int) -> ModelLayer:
    """Return a feed-forward layer for one token: two dense layers with biases, and a layer norm."""
    return ModelLayer(name, 2 * width * inner + inner + width + 2 * width, 2 * width * inner)


def transformer() -> ModelArchitecture:
    """Return the big Transformer with a shared vocabulary of 33,708, post-norm; a sample is a token."""
    width, inner, length = 1024, 4096, 32  # about the mean length of a WMT sentence
    layers = [ModelLayer("embedding", 33_708 * width, 0)]
    for block in range(6):
        layers += [_attention(f"encoder{block}.self", width, length), _feed_forward(f"encoder{block}.ff", width, inner)]
    for block in range(6):
        layers += [
            _attention(f"decoder{block}.self", width, length),
            _attention(f"decoder{block}.cross", width, length),
            _feed_forward(f"decoder{block}.ff", width, inner),
        ]
    layers.append(ModelLayer("output", 0, 33_708 * width))  # shares the embedding's weights
    return ModelArchitecture("transformer", tuple(layers), "token", "Vaswani et al., NIPS 2017, arXiv 1706.03762: big")


def bert_large() -> ModelArchitecture:
    """Return BERT-large, encoder and pooler; a sample is a sequence of 512 tokens."""
    width, inner, length = 1024, 4096, 512
    layers = [ModelLayer("embedding", (30_522 + 512 + 2) * width + 2 * width, 0)]
    for block in range(24):
        layers += [
            _per_sequence(_attention(f"layer{block}.attention", width, length), length),
            _per_sequence(_feed_forward(f"layer{block}.ff", width, inner), length),
        ]
    layers.append(ModelLayer("pooler", width * width + width, width * width))
    return ModelArchitecture("bert_large", tuple(layers), "sequence", "Devlin et al., NAACL 2019, arXiv 1810.04805")


def gpt_2_7b() -> ModelArchitecture:
    """Return the GPT-3 of 2.7 billion parameters; a sample is a sequence of 2,048 tokens."""
    width, length, vocabulary = 2560, 2048, 50_257
    layers = [ModelLayer("embedding", (vocabulary + length) * width, 0)]
    for block in range(32):
        layers += [
            _per_sequence(_attention(f"layer{block}.attention", width, length), length),
            _per_sequence(_feed_forward(f"layer{block}.ff", width, 4 * width), length),
        ]
    layers += [
        ModelLayer("norm", 2 * width, 0),
        ModelLayer("output", 0, vocabulary * width * length),  # shares the embedding's weights
    ]
    source = "Brown et al., NeurIPS 2020, arXiv 2005.14165, table 2.1"
    return ModelArchitecture("gpt_2_7b", tuple(layers), "sequence", source)


def _per_sequence(layer: ModelLayer, length: int) -> ModelLayer:
    return ModelLayer(layer.name, layer.parameters, layer.macs * length)


MODELS: Final[dict[str, Callable[[], ModelArchitecture]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "inception_v3": inception_v3,
    "transformer": transformer,
    "bert_large": bert_large,
    "gpt_2_7b": gpt_2_7b,
}


def architecture(name: str) -> ModelArchitecture:
    """Return a model by name.

    Raises
    ------
    ValueError
        The model is unknown.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}{nearest(name, MODELS)}")
    return MODELS[name]()


BACKWARD_OVER_FORWARD: Final = 2.0
"""The backward pass has two matrix products for each one of the forward pass: for the gradients of the inputs and of
the weights (Narayanan et al., SC 2021, arXiv 2104.04473, appendix)."""


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """A layer with its computing times in one step on one worker."""

    name: str
    parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Computing times of a worker in one step; layers from the input to the output.

    Parameters
    ----------
    batch
        Samples per worker and step.
    source
        Source of the times.
    """

    name: str
    layers: tuple[TimedLayer, ...]
    batch: int
    source: str

    @property
    def parameters(self) -> int:
        """Return the number of trained values."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Return the computing time of a step on one worker."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


def timed(described: ModelArchitecture, batch: int, samples_per_s: float, source: str) -> StepProfile:
    """Return the profile of a step that takes ``batch / samples_per_s``.

    The forward pass takes a third of it. A layer's share of a pass is its share of the multiplications, which
    underestimates memory-bound layers; these take little of a step in these models.
    """
    forward_s = batch / samples_per_s / (1 + BACKWARD_OVER_FORWARD)
    layers = []
    for layer in described.layers:
        own = forward_s * layer.macs / described.macs
        layers.append(TimedLayer(layer.name, layer.parameters, own, own * BACKWARD_OVER_FORWARD))
    return StepProfile(described.name, tuple(layers), batch, source)


def read_profile(path: Path) -> StepProfile:
    """Read a profile, written by `write_profile` or by hand.

    Raises
    ------
    dlcp.document.DocumentError
        The file cannot be read or is not a valid profile; the message names the line.
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
        Throughput of a single GPU; 0 if ``flops_per_s`` is given.
    flops_per_s
        Achieved model floating-point operations per second (not the peak).
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
"""On the A100 and the H100, a GPT's rate is used for other transformers too; the source names the GPT. Where FLOP/s are
given, the batch is not published but sized to fit in memory."""


def step_profile(name: str, gpu: str, precision: str = "mixed", batch: int | None = None) -> StepProfile:
    """Return the step profile of a model on a GPU.

    Parameters
    ----------
    batch
        Samples per worker and step; None takes the published batch. Time is proportional to it.

    Raises
    ------
    ValueError
        No throughput is published for that model on that GPU; the message lists the known ones.
    """
    described = architecture(name)
    for entry in THROUGHPUTS:
        if (entry.model, entry.gpu, entry.precision) == (name, gpu, precision):
            rate = entry.samples_per_s or entry.flops_per_s / (2 * described.macs * (1 + BACKWARD_OVER_FORWARD))
            return timed(described, batch or entry.batch, rate, entry.source)
    known = [f"{entry.gpu} {entry.precision}" for entry in THROUGHPUTS if entry.model == name]
    raise ValueError(
        f"no published throughput of {name} on {gpu} in {precision} precision; choose from: {', '.join(known)}"
    )
