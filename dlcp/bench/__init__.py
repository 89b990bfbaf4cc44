# SPDX-License-Identifier: Apache-2.0
"""Measurements: ``dlcp bench NAME`` prints one JSON document with both sides of a comparison, taken in turns."""
