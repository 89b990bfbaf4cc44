# SPDX-License-Identifier: Apache-2.0
"""What came out of experiments, for readers: one page, a figure and a CSV file each, a summary of published figures."""
