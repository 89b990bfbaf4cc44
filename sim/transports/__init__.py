# SPDX-License-Identifier: Apache-2.0
"""How hosts send: windows, timers, and the completion of messages."""
