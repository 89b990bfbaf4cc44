# SPDX-License-Identifier: Apache-2.0
"""Layers of a network, and how long each computes."""

from dataclasses import dataclass
from typing import Final

BACKWARD_OVER_FORWARD: Final = 2.0
"""Backward multiplies matrices twice where forward does once: for the inputs' gradients and for the weights' (Narayanan
et al., SC 2021, arXiv 2104.04473, appendix)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that are used, and whose gradients come, together.

    Parameters
    ----------
    parameters
        How many values.
    macs
        Multiplications with addition in the forward pass, for one sample (an image, a sequence, or a token).
    """

    name: str
    parameters: int
    macs: int


@dataclass(frozen=True, slots=True)
class Network:
    """A network as its authors describe it; layers from the input to the output.

    Parameters
    ----------
    sample
        What a batch counts: ``image``, ``sequence`` or ``token``.
    source
        Where the architecture is described.
    """

    name: str
    layers: tuple[Layer, ...]
    sample: str
    source: str

    @property
    def parameters(self) -> int:
        """Return how many values are trained."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Return multiplications with addition of a sample's forward pass."""
        return sum(layer.macs for layer in self.layers)


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """A layer with how long it computes in one step on one worker."""

    name: str
    parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What a worker does in one step; layers from the input to the output.

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


def timed(network: Network, batch: int, samples_per_s: float, source: str) -> StepProfile:
    """Return a step that takes ``batch / samples_per_s``.

    A third of it is forward, and layers have of each pass what they have of the multiplications. Memory-bound layers
    thereby seem faster than they are; their share of a step is small in these networks.
    """
    forward_s = batch / samples_per_s / (1 + BACKWARD_OVER_FORWARD)
    layers = []
    for layer in network.layers:
        own = forward_s * layer.macs / network.macs
        layers.append(TimedLayer(layer.name, layer.parameters, own, own * BACKWARD_OVER_FORWARD))
    return StepProfile(network.name, tuple(layers), batch, source)
