# SPDX-License-Identifier: Apache-2.0
"""Networks: how they are described, built, and routed."""
