# SPDX-License-Identifier: Apache-2.0
"""The process that holds a testbed while it is up: Mininet's namespaces live as long as the shells it keeps in them.

``python -m dlcp.controller.testbed.keeper`` reads a layout from standard input, builds it, prints that it is ready,
restarts each switch that exits, and removes everything on SIGTERM, SIGINT or SIGHUP.
"""

import dataclasses
import os
import signal
import sys
import threading
from typing import Final

import msgspec

from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.layout import KEEPER_READY, Layout, ProcessId, StateFile, TestbedState
from dlcp.controller.testbed.network import Network
from dlcp.netlab import NamespaceError

SUPERVISE_S: Final = 0.2
"""Interval at which it checks that all switches run: short beside the time that a restart takes."""


def keep(layout: Layout) -> None:
    """Build a testbed and hold it until a signal.

    Raises
    ------
    TestbedError, NamespaceError
        A part could not be created.
    """
    files = StateFile(layout.name)
    files.write(TestbedState(layout, ProcessId.of(os.getpid()), tuple(layout.namespaces)))
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    network = Network(layout, files)
    try:
        network.start()
        made = files.read()
        assert made is not None
        files.write(dataclasses.replace(made, ready=True))
        print(KEEPER_READY, flush=True)
        while not stopped.wait(SUPERVISE_S):
            network.supervise()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        network.stop()


def main() -> int:
    """Hold the testbed whose layout is on standard input; return the exit status."""
    try:
        keep(msgspec.json.decode(sys.stdin.buffer.read(), type=Layout))
    except (TestbedError, NamespaceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
