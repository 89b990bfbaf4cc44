# SPDX-License-Identifier: Apache-2.0
"""Models: the parameters and multiplications of their layers, as their papers and torchvision have them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dlcp.suggestion import nearest


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """Parameters whose gradients become ready together.

    Parameters
    ----------
    parameters
        How many values it has.
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
        What a batch counts: ``image``, ``sequence`` or ``token``.
    source
        Where the architecture is described.
    """

    name: str
    layers: tuple[ModelLayer, ...]
    sample: str
    source: str

    @property
    def parameters(self) -> int:
        """Return how many values are trained."""
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
        """Return a stack that branches off here and adds to the same layers."""
        return _Stack(self.channels, self.height, self.width, self.layers)

    def conv(
        self, out: int, kernel: int | tuple[int, int], *, stride: int = 1, same: bool = True, bias: bool = False
    ) -> "_Stack":
        """Add a convolution, with a bias or else with a batch norm (a scale and a shift per channel)."""
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
    """Return ResNet-50 with the stride in the 3x3 convolutions (v1.5, as torchvision has it)."""
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
    """Add branches whose last convolution halves the image, beside a pooling that does."""
    one = stack
    for branch in branches:
        one = stack.branch()
        for channels, kernel in branch[:-1]:
            one.conv(channels, kernel)
        one.conv(*branch[-1], stride=2, same=False)
    stack.channels, stack.height, stack.width = out, one.height, one.width


def _attention(name: str, width: int, context: int) -> ModelLayer:
    """Return four projections with biases, and a layer norm; scores and sums over ``context`` tokens; for one token."""
    return ModelLayer(name, 4 * (width * width + width) + 2 * width, 4 * width * width + 2 * context * width)


def _feed_forward(name: str, width: int, inner: int) -> ModelLayer:
    """Return two dense layers with biases, and a layer norm; for one token."""
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
        There is no model of that name.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}{nearest(name, MODELS)}")
    return MODELS[name]()
