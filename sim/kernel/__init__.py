# SPDX-License-Identifier: Apache-2.0
"""The engine for speed: one loop, compiled by Numba, moves all packets of the network."""
