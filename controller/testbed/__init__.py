# SPDX-License-Identifier: Apache-2.0
"""A testbed on one machine: Mininet's hosts and links, with BMv2 or the built-in switch between them. It takes root."""


class TestbedError(RuntimeError):
    """Something of the testbed could not be made, reached or removed; the message says what, and what to do."""

    __test__ = False  # pytest takes what begins with Test for tests
