# SPDX-License-Identifier: Apache-2.0
"""Jobs that train: their steps as graphs of messages and computation."""
