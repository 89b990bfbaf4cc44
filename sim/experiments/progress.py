# SPDX-License-Identifier: Apache-2.0
"""A progress bar with the remaining time, on a terminal only."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_MEMORY_S: Final = 24 * 3600.0
"""Seconds of units that estimate the remaining time: a day, so all of them; rich's 30 s are shorter than many units."""


class ProgressBar:
    """The progress of some work, as a context manager. It writes nothing unless the stream is a terminal.

    Parameters
    ----------
    title
        The work, in a few words.
    stream
        Where to write; by default, standard error.

    Attributes
    ----------
    shown
        Whether the stream is a terminal.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self.shown = self._stream.isatty()
        self._bars: Progress | None = None
        self._bar: TaskID | None = None

    def __enter__(self) -> "ProgressBar":
        """Show the bar."""
        if self.shown:
            from rich import progress
            from rich.console import Console

            columns = (
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(20),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[note]}", markup=False),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("left"),
            )
            console = Console(file=self._stream, highlight=False)
            self._bars = progress.Progress(
                *columns, console=console, transient=True, speed_estimate_period=_MEMORY_S, refresh_per_second=4
            )
            self._bar = self._bars.add_task(self._title, total=None, note="")
            self._bars.start()
        return self

    def update(self, done: int, total: int, note: str) -> None:
        """Show that ``done`` of ``total`` units are done, 0 if their number is unknown, and a note."""
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total or None, note=note)

    def say(self, text: str) -> None:
        """Print a line, above the bar if it is shown."""
        if self._bars is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bars.console.print(text, markup=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
