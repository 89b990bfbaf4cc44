# SPDX-License-Identifier: Apache-2.0
"""The command line: one module per command of ``dlcp``."""
