# SPDX-License-Identifier: Apache-2.0
"""Settings that follow from what is measured: before training (``dlcp advise``) or while it goes on (``adapt``)."""
