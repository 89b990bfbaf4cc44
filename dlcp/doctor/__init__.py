# SPDX-License-Identifier: Apache-2.0
"""``dlcp doctor``: what works on this machine, what is in force, and what to do about the rest."""
