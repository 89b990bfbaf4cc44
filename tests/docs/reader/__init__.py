# SPDX-License-Identifier: Apache-2.0
"""Files that a reader of the pages has: tests/docs/following.py puts them into the copy of the checkout."""
