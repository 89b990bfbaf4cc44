# SPDX-License-Identifier: Apache-2.0
"""Report experiments: one page, an SVG and a CSV file per figure, and a summary of published figures."""
