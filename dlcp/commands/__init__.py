# SPDX-License-Identifier: Apache-2.0
"""What a person types: one module per command of ``dlcp``."""
