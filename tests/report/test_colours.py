# SPDX-License-Identifier: Apache-2.0
"""Lines of a plot can be told apart, also with colour blindness, and seen against the page, light and dark."""

import itertools

import numpy as np
import pytest

from dlcp.report.style import COLOURS

SIGHT = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
"""Linear RGB as people with colour blindness see it: Machado, Oliveira and Fernandes, IEEE TVCG 2009, severity 1."""
HUES = ("grey", "orange", "ochre", "blue", "green", "purple", "pink")
DISTANCE_MIN = 15
"""Smallest distance in CIELAB of two lines; some 2.3 are just noticeable."""
CONTRAST_MIN = 3.0
"""Least contrast of graphics against their background: WCAG 2.2, 1.4.11."""


def linear(colour: str):
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    ratios = xyz / [0.9505, 1.0, 1.089]
    x, y, z = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_lines_can_be_told_apart(sight, mode):
    seen = {name: lab(np.clip(np.array(SIGHT[sight]) @ linear(COLOURS[name][mode]), 0, 1)) for name in HUES}
    distances = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in itertools.combinations(HUES, 2)}
    assert min(distances.values()) >= DISTANCE_MIN, min(distances, key=distances.get)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_lines_can_be_seen(mode):
    page = luminance(COLOURS["paper"][mode])
    for name in HUES:
        darker, lighter = sorted((page, luminance(COLOURS[name][mode])))
        assert (lighter + 0.05) / (darker + 0.05) >= CONTRAST_MIN, name
