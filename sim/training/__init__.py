# SPDX-License-Identifier: Apache-2.0
"""Training jobs: what each worker computes, when gradients are ready, and in which pieces and order they travel."""
