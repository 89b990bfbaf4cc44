# SPDX-License-Identifier: Apache-2.0
"""Engines that carry packets or flows: compiled, in plain SimPy, or approximate."""
