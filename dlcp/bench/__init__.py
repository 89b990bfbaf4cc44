# SPDX-License-Identifier: Apache-2.0
"""``dlcp bench allreduce``, and the form of its results. All other measurements are in ``tests/bench``."""
