# SPDX-License-Identifier: Apache-2.0
"""Pages and plots, for the demo, the testbed and the simulator alike."""
