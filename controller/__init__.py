# SPDX-License-Identifier: Apache-2.0
"""An operator's description of a fabric, and the switch state derived from it."""
