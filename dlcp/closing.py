# SPDX-License-Identifier: Apache-2.0
"""What has to be closed in the end: objects in with-statements, and processes."""

import subprocess
from abc import ABC, abstractmethod
from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """Something to be used in a with-statement, and closed at its end."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """End a process and reap it: politely, and by force if it still runs after ``patience_s`` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
