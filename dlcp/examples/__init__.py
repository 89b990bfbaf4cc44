# SPDX-License-Identifier: Apache-2.0
"""Ordinary training scripts, most of them without DLCP: see README.md next to this file."""
