# SPDX-License-Identifier: Apache-2.0
"""The approximate engine: messages are fluid, and share links at max-min rates. It counts no packets, so it scales."""
