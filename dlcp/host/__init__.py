# SPDX-License-Identifier: Apache-2.0
"""The machine at hand: processes, network interfaces, emulated networks, clean-up at the end, and timelines."""
