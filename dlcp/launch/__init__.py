# SPDX-License-Identifier: Apache-2.0
"""``dlcp launch``: starts a script once per rank, without any framework."""
