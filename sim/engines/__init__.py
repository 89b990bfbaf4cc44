# SPDX-License-Identifier: Apache-2.0
"""What carries packets or flows: compiled, in plain SimPy, or approximately."""
