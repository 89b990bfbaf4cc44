# SPDX-License-Identifier: Apache-2.0
"""Gradient compression: one small interface, and compressors from the literature. README.md has a table."""

from typing import TYPE_CHECKING

from dlcp import on_demand
from dlcp.compress.compressor import Compressor, Encoded, Feedback, Occasion

if TYPE_CHECKING:
    from dlcp.compress.registry import COMPRESSORS, make_compressor

__all__ = ["COMPRESSORS", "Compressor", "Encoded", "Feedback", "Occasion", "make_compressor"]
__getattr__ = on_demand(__name__, {"COMPRESSORS": "registry", "make_compressor": "registry"})
