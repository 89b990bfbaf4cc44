# SPDX-License-Identifier: Apache-2.0
"""Training scripts as people write them, which know nothing of DLCP: see README.md beside this file."""
