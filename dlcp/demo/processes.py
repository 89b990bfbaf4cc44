# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: functions in forks, which report facts to the process that started them."""

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
"""What a process reports: plain values, that JSON can hold. ``error`` and ``report`` are kept, others passed on."""


def send_fact(channel: Connection, fact: Fact) -> None:
    """Report a fact to the process that started this one.

    It travels as JSON: a pickle may hold what takes PyTorch to read (its version is a class of its own), and loading
    that holds up the reader of all reports for seconds on a busy machine.
    """
    channel.send_bytes(json.dumps(fact).encode())


class DemoProcess(Fork):
    """A process of a run. ``ready`` is set once it has reported for the first time.

    Parameters
    ----------
    name
        For messages.
    function, arguments, namespace, environment
        As of :class:`dlcp.processes.Fork`.
    on_fact
        Called with everything it reports, in a thread of its own.
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
        """Let the run begin for it, at a time of the monotonic clock."""
        self.channel.send(start_s)

    def errors(self) -> str:
        """Return what it reported as wrong."""
        return self._errors[-2000:].strip()

    def finish(self, timeout_s: float) -> Any:
        """Wait for its end and return its report; None if there is none."""
        self.join(timeout_s)
        self._thread.join(_STOP_DEADLINE_S)
        return self._report

    def stop(self) -> Any:
        """Let it end, and return what it reports."""
        self.terminate()
        return self.finish(_STOP_DEADLINE_S)

    def close(self) -> None:
        """Let it end; kill it if it does not."""
        self.stop()
        super().close()


def command(channel: Connection, argv: Sequence[str]) -> None:
    """Run what a person would type after ``dlcp``; what it prints is a fact, and what it complains of an error."""
    # By name: the command line stands above the demo, which here uses it as any other program would.
    main = importlib.import_module("dlcp.cli").main
    with contextlib.redirect_stdout(_Facts(channel, "said")), contextlib.redirect_stderr(_Facts(channel, "error")):
        raise SystemExit(main(argv))


def _reporting(channel: Connection, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function, and report what goes wrong."""
    try:
        function(channel, *arguments)
    except Exception:
        send_fact(channel, {"error": traceback.format_exc()})
        raise SystemExit(1) from None


class _Facts(io.TextIOBase):
    """A stream whose text becomes facts of one name."""

    def __init__(self, channel: Connection, name: str) -> None:
        self._channel, self._name = channel, name

    def write(self, text: str) -> int:
        send_fact(self._channel, {self._name: text})
        return len(text)
