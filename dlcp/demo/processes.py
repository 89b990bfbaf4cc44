# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: forks that report facts to their parent process."""

import contextlib
import importlib
import io
import json
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from dlcp.processes import Fork

_STOP_DEADLINE_S: Final = 5.0

Fact = dict[str, Any]
"""A report to the parent, as JSON. The parent keeps the keys ``error`` and ``report``, and passes every fact on."""


def send_fact(channel: Connection, fact: Fact) -> None:
    """Report a fact to the parent process, as JSON.

    A pickle could make the parent import PyTorch (whose version is a class of its own). On a busy machine that import
    blocks the thread that reads the reports for seconds.
    """
    channel.send_bytes(json.dumps(fact).encode())


class DemoProcess(Fork):
    """A process of a run. Its first report sets ``ready``.

    Parameters
    ----------
    name
        Its name in messages.
    function, arguments, namespace, environment
        As for :class:`dlcp.processes.Fork`.
    on_fact
        Called with each fact that it reports, on a reader thread.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        arguments: Sequence[Any],
        *,
        namespace: str | None = None,
        environment: Mapping[str, str] | None = None,
        on_fact: Callable[[Fact], None] | None = None,
    ) -> None:
        super().__init__(name, _reporting, (function, *arguments), namespace=namespace, environment=environment)
        self.ready = threading.Event()
        self._report: Any = None
        self._errors = ""
        self._on_fact = on_fact
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                fact: Fact = json.loads(self.channel.recv_bytes())
                self._errors += fact.get("error", "")
                self._report = fact.get("report", self._report)
                self.ready.set()
                if self._on_fact:
                    self._on_fact(fact)

    def start_at(self, start_s: float) -> None:
        """Send it the start time of the run, by the monotonic clock."""
        self.channel.send(start_s)

    def errors(self) -> str:
        """Return the errors it reported; the last 2000 characters."""
        return self._errors[-2000:].strip()

    def finish(self, timeout_s: float) -> Any:
        """Wait for the process to end; return its report, or None."""
        self.join(timeout_s)
        self._thread.join(_STOP_DEADLINE_S)
        return self._report

    def stop(self) -> Any:
        """Terminate it, and return its report or None."""
        self.terminate()
        return self.finish(_STOP_DEADLINE_S)

    def close(self) -> None:
        """Terminate it; kill it if it does not end."""
        self.stop()
        super().close()


def command(channel: Connection, argv: Sequence[str]) -> None:
    """Run a ``dlcp`` command line; report its standard output as ``said`` facts and its standard error as errors."""
    # Imported by name: the command line is a higher layer than the demo.
    main = importlib.import_module("dlcp.cli").main
    with contextlib.redirect_stdout(_Facts(channel, "said")), contextlib.redirect_stderr(_Facts(channel, "error")):
        raise SystemExit(main(argv))


def _reporting(channel: Connection, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function; report its exception as an error, and exit with status 1."""
    try:
        function(channel, *arguments)
    except Exception:
        send_fact(channel, {"error": traceback.format_exc()})
        raise SystemExit(1) from None


class _Facts(io.TextIOBase):
    """A stream that reports its text as facts of one name."""

    def __init__(self, channel: Connection, name: str) -> None:
        self._channel, self._name = channel, name

    def write(self, text: str) -> int:
        send_fact(self._channel, {self._name: text})
        return len(text)
