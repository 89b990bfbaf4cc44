# SPDX-License-Identifier: Apache-2.0
"""Topologies, routes, and the queues of switches."""
