# SPDX-License-Identifier: Apache-2.0
"""Choice of settings from the ranks' measurements."""
