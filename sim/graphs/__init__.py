# SPDX-License-Identifier: Apache-2.0
"""What is sent: messages and their dependencies, and collectives made of them."""
