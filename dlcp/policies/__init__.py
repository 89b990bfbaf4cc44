# SPDX-License-Identifier: Apache-2.0
"""Rules that real and simulated ranks share: how a step is averaged, and how shards follow slow ports."""
