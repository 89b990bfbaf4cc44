# SPDX-License-Identifier: Apache-2.0
"""Experiments: their files, their runs, and results."""
