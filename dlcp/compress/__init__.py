# SPDX-License-Identifier: Apache-2.0
"""Compression of gradients: one small interface, and what the literature has behind it. README.md has a table."""

from dlcp.compress.choice import COMPRESSORS, make_compressor
from dlcp.compress.compressor import Compressor, Encoded, Feedback, Occasion

__all__ = ["COMPRESSORS", "Compressor", "Encoded", "Feedback", "Occasion", "make_compressor"]
