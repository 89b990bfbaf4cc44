# SPDX-License-Identifier: Apache-2.0
"""The digits example in four frameworks; see README.md beside this file."""
