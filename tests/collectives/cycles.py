# SPDX-License-Identifier: Apache-2.0
"""Objects of DLCP that keep each other alive: only Python's collector frees them and all the memory that they hold."""

import gc
from contextlib import contextmanager


@contextmanager
def cycles():
    """Yield a set that holds, after the ``with`` block, the types of such objects that were left behind."""
    found = set()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found |= {type(item).__qualname__ for item in gc.garbage if type(item).__module__.startswith("dlcp")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
