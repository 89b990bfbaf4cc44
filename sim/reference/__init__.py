# SPDX-License-Identifier: Apache-2.0
"""The engine for trust: the same network as SimPy events and plain objects."""
