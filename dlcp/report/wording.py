# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them, and the sentences of ``sentences.jinja``, which follow them."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from dlcp.report.look import TEMPLATES, environment

NO_BREAK: Final = "\u00a0"
SHORT_NAMES: Final = {"gloo": "Gloo", "plain": "plain transport", "dlcp": "DLCP", "dlcp_priority": "DLCP with priority"}
AS_FAST_WITHIN: Final = 0.02
"""Ratios this close to 1 are called equal: runs on a shared machine differ by more."""


def duration(seconds: float | None) -> str:
    """Return a time with about three digits, in s, or in ms below one second."""
    if seconds is None:
        return "never"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}{NO_BREAK}ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f}{NO_BREAK}ms"
    digits = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:.{digits}f}{NO_BREAK}s"


def in_words(number: int) -> str:
    """Return a small number as a word, a larger one in figures."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[number] if 0 <= number < len(words) else f"{number:,}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share as per cent, without trailing zeros."""
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}{NO_BREAK}%"


def bit_rate(bps: float) -> str:
    """Return a rate in Mbit/s or Gbit/s."""
    return f"{bps / 1e6:.3g}{NO_BREAK}Mbit/s" if bps < 1e9 else f"{bps / 1e9:.3g}{NO_BREAK}Gbit/s"


def count(number: int | None) -> str:
    """Return a count with commas between thousands, a dash if it is not known."""
    return "-" if number is None else f"{number:,}"


FILTERS: Final[Mapping[str, Callable[..., str]]] = {
    each.__name__: each for each in (duration, in_words, percent, bit_rate, count)
}


def sentence(name: str, *arguments: Any, **named: Any) -> str:
    """Return the text of a macro of ``sentences.jinja``, in one line."""
    text: str = getattr(_sentences(), name)(*arguments, **named)
    return re.sub(r"[ \n]+", " ", text).strip(" ")


@cache
def _sentences() -> Any:
    plain = environment(TEMPLATES, FILTERS).overlay(autoescape=False)  # pages escape the sentences that they hold
    return plain.get_template(
        "sentences.jinja", globals={"NAMES": SHORT_NAMES, "AS_FAST_WITHIN": AS_FAST_WITHIN}
    ).module
