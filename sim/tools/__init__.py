# SPDX-License-Identifier: Apache-2.0
"""Tables and pages of runs, and the questions for a first experiment."""
