# SPDX-License-Identifier: Apache-2.0
"""Whether a page's plots can be read on a phone."""

import re

LEAST_TEXT_PX = 11
PHONE_COLUMN_PX = 358
"""Width of a page's text on a phone that is 390 px wide."""


def readable_px(page, plots):
    """Return the page width in px, below which at least one of the ``plots`` plots scrolls.

    Fails if text is smaller than `LEAST_TEXT_PX` at any width.
    """
    rules = dict(re.findall(r"^(\.plot(?: svg)?) {([^}]*)}", page.replace("} .plot", "}\n.plot"), re.MULTILINE))
    assert "overflow-x: auto" in rules[".plot"]
    assert "min-width: var(--readable)" in rules[".plot svg"]
    drawn = [svg for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "<text" in svg]
    boxes = re.findall(r'<div class="plot" style="--readable: (\d+)px">\s*(<svg.*?</svg>)\s*</div>', page, re.DOTALL)
    assert [svg for _, svg in boxes] == drawn
    assert len(drawn) == plots
    for readable, svg in boxes:
        _, _, width, _ = map(float, re.search(r'viewBox="([^"]*)"', svg)[1].split())
        sizes = [float(size) for size in re.findall(r"<text[^>]*font(?:-size)?:[^;\"]*?([\d.]+)px", svg)]
        assert len(sizes) == svg.count("<text")
        assert min(sizes) * int(readable) / width >= LEAST_TEXT_PX
    return max(int(readable) for readable, _ in boxes)
