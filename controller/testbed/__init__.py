# SPDX-License-Identifier: Apache-2.0
"""A testbed on one machine: Mininet's hosts and links, with BMv2 or the built-in switch between them. It takes root."""
