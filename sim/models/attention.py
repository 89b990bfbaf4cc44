# SPDX-License-Identifier: Apache-2.0
"""Transformers: the translation model, BERT-large and a GPT of 2.7 billion parameters."""

from dlcp.sim.models.profile import Layer, Network


def _attention(name: str, width: int, context: int) -> Layer:
    """Return four projections with biases, and a layer norm; scores and sums over ``context`` tokens; for one token."""
    return Layer(name, 4 * (width * width + width) + 2 * width, 4 * width * width + 2 * context * width)


def _feed_forward(name: str, width: int, inner: int) -> Layer:
    """Return two dense layers with biases, and a layer norm; for one token."""
    return Layer(name, 2 * width * inner + inner + width + 2 * width, 2 * width * inner)


def transformer() -> Network:
    """Return the big Transformer with a shared vocabulary of 33,708, post-norm; a sample is a token."""
    width, inner, length = 1024, 4096, 32  # about the mean length of a WMT sentence
    layers = [Layer("embedding", 33_708 * width, 0)]
    for block in range(6):
        layers += [_attention(f"encoder{block}.self", width, length), _feed_forward(f"encoder{block}.ff", width, inner)]
    for block in range(6):
        layers += [
            _attention(f"decoder{block}.self", width, length),
            _attention(f"decoder{block}.cross", width, length),
            _feed_forward(f"decoder{block}.ff", width, inner),
        ]
    layers.append(Layer("output", 0, 33_708 * width))  # shares the embedding's weights
    return Network("transformer", tuple(layers), "token", "Vaswani et al., NIPS 2017, arXiv 1706.03762: big")


def bert_large() -> Network:
    """Return BERT-large, encoder and pooler; a sample is a sequence of 512 tokens."""
    width, inner, length = 1024, 4096, 512
    layers = [Layer("embedding", (30_522 + 512 + 2) * width + 2 * width, 0)]
    for block in range(24):
        layers += [
            _per_sequence(_attention(f"layer{block}.attention", width, length), length),
            _per_sequence(_feed_forward(f"layer{block}.ff", width, inner), length),
        ]
    layers.append(Layer("pooler", width * width + width, width * width))
    return Network("bert_large", tuple(layers), "sequence", "Devlin et al., NAACL 2019, arXiv 1810.04805")


def gpt_2_7b() -> Network:
    """Return the GPT-3 of 2.7 billion parameters; a sample is a sequence of 2,048 tokens."""
    width, length, vocabulary = 2560, 2048, 50_257
    layers = [Layer("embedding", (vocabulary + length) * width, 0)]
    for block in range(32):
        layers += [
            _per_sequence(_attention(f"layer{block}.attention", width, length), length),
            _per_sequence(_feed_forward(f"layer{block}.ff", width, 4 * width), length),
        ]
    layers += [
        Layer("norm", 2 * width, 0),
        Layer("output", 0, vocabulary * width * length),  # shares the embedding's weights
    ]
    return Network("gpt_2_7b", tuple(layers), "sequence", "Brown et al., NeurIPS 2020, arXiv 2005.14165, table 2.1")


def _per_sequence(layer: Layer, length: int) -> Layer:
    return Layer(layer.name, layer.parameters, layer.macs * length)
