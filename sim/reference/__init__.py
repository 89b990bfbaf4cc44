# SPDX-License-Identifier: Apache-2.0
"""The engine for trust: the same network as SimPy events and plain objects, with the P4 program in its switches."""
