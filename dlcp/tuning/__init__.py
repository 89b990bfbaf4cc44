# SPDX-License-Identifier: Apache-2.0
"""Settings that follow from what ranks measure."""
