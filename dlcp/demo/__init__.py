# SPDX-License-Identifier: Apache-2.0
"""The demo: train a real model over a congested switch, with and without DLCP, and report."""
