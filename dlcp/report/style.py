# SPDX-License-Identifier: Apache-2.0
"""The style of every page: colours, light and dark, numbers as people read them, and rendering from templates."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jinja2

TEMPLATES: Final = Path(__file__).parent
"""Folder of the frame of all pages."""
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "paper": ("#ffffff", "#14181d"),
    "raised": ("#f6f7f9", "#1d2229"),
    "ink": ("#1c2128", "#e8ebee"),
    "soft": ("#59636e", "#a3adb8"),
    "grid": ("#dde1e6", "#343b44"),
    "grey": ("#4c545c", "#9ca4ac"),
    "orange": ("#8c1d1d", "#da7300"),
    "ochre": ("#816f04", "#f2ec98"),
    "blue": ("#00305b", "#58b6f6"),
    "green": ("#147e4f", "#a7f7e7"),
    "purple": ("#af71cd", "#6c50e9"),
    "pink": ("#d567a2", "#d74d67"),
}
"""Colours in light and in dark mode. The hues differ in lightness too, so that readers with colour blindness can
distinguish them: found by a random search for the largest distance; tests/report/test_colours.py computes it."""
STYLE: Final = (
    ":root { color-scheme: light dark; "
    + " ".join(f"--{name}: {light};" for name, (light, _) in COLOURS.items())
    + " }\n@media (prefers-color-scheme: dark) { :root { "
    + " ".join(f"--{name}: {dark};" for name, (_, dark) in COLOURS.items())
    + " } }\n"
    'svg text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }\n'
    "svg path, svg use { stroke-linejoin: round; stroke-linecap: butt; }\n"
)
"""Style sheet for the plots of a page, and of a file with a single plot."""
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


def environment(folder: Path) -> jinja2.Environment:
    """Return the environment for the templates in a folder, which may use those of :data:`TEMPLATES`."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {each.__name__: each for each in (duration, in_words, percent, bit_rate, count)}
    return made


def render(template: Path, filters: Mapping[str, Callable[..., Any]] = MappingProxyType({}), /, **values: Any) -> str:
    """Return a page made from a template that extends ``frame.html``, with more ``filters``."""
    made = environment(template.parent)
    made.filters |= filters
    return made.get_template(template.name).render(style=STYLE, **values)


def sentence(name: str, *arguments: Any, **named: Any) -> str:
    """Return the text of a macro of ``sentences.jinja``, in one line."""
    text: str = getattr(_sentences(), name)(*arguments, **named)
    return re.sub(r"[ \n]+", " ", text).strip(" ")


@cache
def _sentences() -> Any:
    plain = environment(TEMPLATES).overlay(autoescape=False)  # pages escape the sentences that they hold
    return plain.get_template(
        "sentences.jinja", globals={"NAMES": SHORT_NAMES, "AS_FAST_WITHIN": AS_FAST_WITHIN}
    ).module
