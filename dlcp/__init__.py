# SPDX-License-Identifier: Apache-2.0
"""DLCP: a communication optimizer for distributed deep-learning training."""

__version__ = "0.1.0"
