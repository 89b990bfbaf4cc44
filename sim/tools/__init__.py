# SPDX-License-Identifier: Apache-2.0
"""What shows a run, and the questions from which a first experiment is made."""
