# SPDX-License-Identifier: Apache-2.0
"""The digits example for Keras and for JAX; see README.md beside this file."""
