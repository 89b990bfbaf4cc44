# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a testbed."""


class TestbedError(RuntimeError):
    """Something of the testbed could not be made, reached or removed; the message says what, and what to do."""

    __test__ = False  # pytest takes what begins with Test for tests
