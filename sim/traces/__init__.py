# SPDX-License-Identifier: Apache-2.0
"""Jobs that repeat a trace, and traces of jobs."""
