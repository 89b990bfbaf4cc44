# SPDX-License-Identifier: Apache-2.0
"""Turns a P4 program into running code, in these steps.

``model`` reads p4c's output and lays out the state. ``analysis`` finds what each part reads and writes. ``codegen``
writes the program as Python text; ``hashes`` writes its hash functions. ``program`` runs that text, plain or under
Numba, over the tables, action profiles, registers, counters and meters in ``state``.
"""
