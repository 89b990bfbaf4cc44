# SPDX-License-Identifier: Apache-2.0
"""What is trained: parameters and computing time, layer by layer, of published networks on several GPUs."""
