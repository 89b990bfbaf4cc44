# SPDX-License-Identifier: Apache-2.0
def steps(root): return []
