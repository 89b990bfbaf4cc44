# SPDX-License-Identifier: Apache-2.0
"""Measurements of DLCP and its peers: ``python -m tests.bench NAME [options]`` prints one JSON document."""
