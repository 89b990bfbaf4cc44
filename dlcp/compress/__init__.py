# SPDX-License-Identifier: Apache-2.0
"""Gradient compression: one small interface, and compressors from the literature. README.md has a table."""

from collections.abc import Callable, Mapping
from typing import Final

from dlcp.compress.compressor import Compressor, Encoded, Feedback, Occasion
from dlcp.compress.low_rank import Atomo, PowerSgd
from dlcp.compress.quantized import Qsgd, ScaledSigns, SignSgd, TernGrad
from dlcp.compress.sparse import RandomK, TopK
from dlcp.inputs.error_text import closest
from dlcp.policies.arms import HALF_NAMES, HALF_PRECISION

__all__ = ["COMPRESSORS", "Compressor", "Encoded", "Feedback", "Occasion", "make_compressor"]

COMPRESSORS: Final[Mapping[str, type[Compressor]]] = {
    kind.name: kind for kind in (TopK, RandomK, Qsgd, TernGrad, SignSgd, ScaledSigns, Atomo, PowerSgd)
}
RATIO: Final = 0.01
"""Default share for top-k and random-k: the starting point of Deep Gradient Compression (Lin et al., ICLR 2018)."""
_ARGUMENTS: Final[Mapping[str, tuple[str, Callable[[str], float]]]] = {
    TopK.name: ("a share of values, as in topk:0.01", float),
    RandomK.name: ("a share of values, as in randomk:0.01", float),
    Qsgd.name: ("bits per value, as in qsgd:4", int),
    Atomo.name: ("a number of atoms, as in atomo:3", int),
    PowerSgd.name: ("a rank, as in powersgd:2", int),
}


def make_compressor(text: str, *, error_feedback: bool = True, whole_below: int = 0) -> Compressor:
    """Return a compressor by name.

    Parameters
    ----------
    text
        A name of ``COMPRESSORS``, for some with an argument after a colon.
    error_feedback
        Whether values left out are sent with the next step. If not, random-k is scaled to be unbiased.
    whole_below
        Top-k and random-k send layers of fewer values whole.

    Raises
    ------
    ValueError
        Unknown name or invalid argument; the message says what is valid.
    """
    name, _, argument = text.partition(":")
    if name in HALF_NAMES:
        raise ValueError(f"compression {name} means precision {HALF_PRECISION} and takes no argument, got {text!r}")
    if name not in COMPRESSORS:
        known = [*HALF_NAMES, *COMPRESSORS]
        raise ValueError(f"compression must be one of {', '.join(known)}, got {text!r}{closest(name, known)}")
    if argument and name not in _ARGUMENTS:
        raise ValueError(f"compression {name} takes no argument, got {text!r}")
    number: float | None = None
    if argument:
        words, kind = _ARGUMENTS[name]
        try:
            number = kind(argument)
        except ValueError:
            raise ValueError(f"compression {name} takes {words}, got {text!r}") from None
    try:
        if name == TopK.name:
            return TopK(RATIO if number is None else number, whole_below)
        if name == RandomK.name:
            return RandomK(RATIO if number is None else number, whole_below, unbiased=not error_feedback)
        given = () if number is None else (number,)
        return COMPRESSORS[name](*given)
    except ValueError as error:
        raise ValueError(f"compression {text!r}: {error}") from None
