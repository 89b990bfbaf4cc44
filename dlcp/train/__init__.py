# SPDX-License-Identifier: Apache-2.0
"""``dlcp train``: an unchanged training script, run as torchrun would, with DLCP switched on."""
