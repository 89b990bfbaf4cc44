# SPDX-License-Identifier: Apache-2.0
"""``dlcp doctor``: examine this machine, the options in force and the paths to others, and suggest fixes."""
