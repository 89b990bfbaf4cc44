# SPDX-License-Identifier: Apache-2.0
"""Turns a P4 program into running code, in these steps.

``bmv2_json`` reads p4c's output into a ``model``, which lays out the state. ``analysis`` finds what each part reads and
writes. ``codegen`` writes the program as Python text, with its ``expressions`` and ``hashes``. ``program`` runs that
text, plain or under Numba, over the tables and action profiles in ``tables`` and the registers, counters and meters in
``cells``.
"""
