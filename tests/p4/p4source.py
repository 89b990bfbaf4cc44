# SPDX-License-Identifier: Apache-2.0
"""Contents of the P4 sources, from their text; and ``p4/compile.py`` as a module (``p4/`` must be no package)."""

import importlib.util
import re
from pathlib import Path

P4 = Path(__file__).parents[2] / "p4"
CONSTANT = re.compile(r"^const bit<(\d+)> (\w+) = ([^;]+);", re.MULTILINE)
DEFINITION = re.compile(r"^#define (\w+) (\d+)\b", re.MULTILINE)


def load_compile():
    """Import ``p4/compile.py``."""
    spec = importlib.util.spec_from_file_location("p4_compile", P4 / "compile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def constants() -> dict[str, int]:
    """Return the constants and the numeric macros of ``p4/shared/constants.p4``; each is held to fit its width."""
    text = (P4 / "shared" / "constants.p4").read_text()
    found = {name: int(value) for name, value in DEFINITION.findall(text)}
    for width, name, expression in CONSTANT.findall(text):
        one, shift, operand = expression.partition(" << ")
        found[name] = int(one) << found[operand] if shift else int(expression, 0)
        assert found[name] < 1 << int(width), f"{name} = {found[name]} does not fit bit<{width}>"
    return found


def events() -> dict[str, dict[str, int]]:
    """Return the events of each counter array, in the order in which the sources declare them: ingress, then egress."""
    named = {name: value for name, value in constants().items() if name.startswith("EVENT_") and "_INDEX_" not in name}
    named.pop("EVENT_COUNTER_SIZE")
    egress = ("EVENT_FORWARDED", "EVENT_MARKED")
    return {
        "ingress_events": {name: value for name, value in named.items() if name not in egress},
        "egress_events": {name: named[name] for name in egress},
    }
