# SPDX-License-Identifier: Apache-2.0
"""Watching a training while it runs: a page, and metrics for Prometheus, of the snapshots that ranks leave."""
