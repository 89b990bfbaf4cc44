# SPDX-License-Identifier: Apache-2.0
"""Training on machines that are not alike."""
