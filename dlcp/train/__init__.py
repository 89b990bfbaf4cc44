# SPDX-License-Identifier: Apache-2.0
"""``dlcp train``: run an unchanged training script as torchrun would, with DLCP switched on."""
