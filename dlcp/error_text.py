# SPDX-License-Identifier: Apache-2.0
"""The words of an error, for messages and for other ranks: never none, as an assertion has by itself."""

import traceback


def describe(error: BaseException) -> str:
    """Return an error's message; if that is empty, its type and the line that raised it."""
    text = str(error)
    if text.strip():
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return repr(error)
    last = frames[-1]
    return f"{error!r} in {last.name} ({last.filename}, line {last.lineno})"
