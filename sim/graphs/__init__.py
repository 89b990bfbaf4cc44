# SPDX-License-Identifier: Apache-2.0
"""Messages and their dependencies, and collectives made of them."""
