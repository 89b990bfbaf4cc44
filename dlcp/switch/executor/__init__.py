# SPDX-License-Identifier: Apache-2.0
"""Turns a P4 program into running code, in these steps.

``bmv2_json`` reads p4c's output into ``model``, which also lays out the state. ``analysis`` finds what each part reads
and writes. ``source`` writes the program as Python text, with ``parsing`` for the parser, ``control`` for the controls,
``text`` for expressions and ``hashes`` for hashes. ``program`` runs that text, plain or under Numba, over ``tables``,
``profiles`` and ``cells``.
"""
