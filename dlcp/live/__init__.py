# SPDX-License-Identifier: Apache-2.0
"""Live view of a training: a page and Prometheus metrics, made from the snapshots that ranks write."""
