# SPDX-License-Identifier: Apache-2.0
"""What an operator says about a fabric, and the switch state that follows from it."""
