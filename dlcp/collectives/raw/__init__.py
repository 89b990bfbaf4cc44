# SPDX-License-Identifier: Apache-2.0
"""Collectives over bytes for ``torch.distributed``."""
