# SPDX-License-Identifier: Apache-2.0
"""The look of every page, light and dark, and how a page is made from its template."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jinja2

TEMPLATES: Final = Path(__file__).parent
"""Where the frame of all pages is."""
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "paper": ("#ffffff", "#14181d"),
    "raised": ("#f6f7f9", "#1d2229"),
    "ink": ("#1c2128", "#e8ebee"),
    "soft": ("#59636e", "#a3adb8"),
    "grid": ("#dde1e6", "#343b44"),
    "grey": ("#8b949e", "#7d8894"),
    "orange": ("#c04a00", "#ff8f4d"),
    "ochre": ("#8a6d00", "#e3c04b"),
    "blue": ("#0067b0", "#5cb6f2"),
    "green": ("#00805b", "#3fcf9f"),
    "purple": ("#8250a8", "#c79af0"),
    "pink": ("#a3345f", "#f285ab"),
}
"""Light and dark. Hues after Okabe and Ito, whom readers with colour blindness tell apart."""
STYLE: Final = (
    ":root { color-scheme: light dark; "
    + " ".join(f"--{name}: {light};" for name, (light, _) in COLOURS.items())
    + " }\n@media (prefers-color-scheme: dark) { :root { "
    + " ".join(f"--{name}: {dark};" for name, (_, dark) in COLOURS.items())
    + " } }\n"
    'svg text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }\n'
    "svg path, svg use { stroke-linejoin: round; stroke-linecap: butt; }\n"
)
"""What a page, or a file with a single plot, has to define for the plots."""


def environment(folder: Path, filters: Mapping[str, Callable[..., Any]]) -> jinja2.Environment:
    """Return the environment for the templates in a folder, which may use those of :data:`TEMPLATES`."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= filters
    return made


def render(template: Path, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Return a page made from a template that extends ``frame.html``."""
    return environment(template.parent, filters).get_template(template.name).render(style=STYLE, **values)
