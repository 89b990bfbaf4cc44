# SPDX-License-Identifier: Apache-2.0
"""The work of commands that import many packages of an extra; their options, in the modules above, need none."""
