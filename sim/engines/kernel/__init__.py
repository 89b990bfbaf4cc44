# SPDX-License-Identifier: Apache-2.0
"""The fast engine: one loop, compiled by Numba, moves all packets of the network."""
