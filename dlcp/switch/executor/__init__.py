# SPDX-License-Identifier: Apache-2.0
"""A P4 program made executable, in the order in which it happens.

``bmv2_json`` reads what p4c compiled into ``model``; ``analysis`` finds what is read and written where and ``layout``
places the state; ``source`` writes the program as Python text, with ``parsing`` for the parser, ``control`` for the
controls, ``text`` for expressions and ``hashes`` for hashes; ``program`` runs that text, plain or under Numba, over
``tables``, ``profiles`` and ``cells``.
"""
