# SPDX-License-Identifier: Apache-2.0
"""How many more steps training needs when gradients get lost: curves as data, each with its source."""
