# SPDX-License-Identifier: Apache-2.0
"""Values on the wire: number formats, magnitudes, planes of digits, and the tags of packets."""
