# SPDX-License-Identifier: Apache-2.0
"""The names and widths of a compiled program, and BMv2's Thrift modules, which write its entries."""

import importlib
import json
import shutil
import site
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


class UnknownNameError(RuntimeError):
    """No part of the program, or more than one, has this name."""


class Layout:
    """Widths and names of a compiled program, read from its JSON."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text(encoding="utf-8"))
        types = {kind["name"]: dict(field[:2] for field in kind["fields"]) for kind in document["header_types"]}
        fields = {header["name"]: types[header["header_type"]] for header in document["headers"]}
        self.tables: dict[str, dict[str, Any]] = {}
        for pipeline in document["pipelines"]:
            for table in pipeline["tables"]:
                for key in table["key"]:
                    header, field = key["target"]
                    key["width"] = fields[header][field]
                self.tables[table["name"]] = table
        self.profiles = [
            profile["name"] for pipeline in document["pipelines"] for profile in pipeline["action_profiles"]
        ]
        self.actions = {
            action["name"]: [(item["name"], item["bitwidth"]) for item in action["runtime_data"]]
            for action in document["actions"]
        }
        self.registers = {item["name"]: item["size"] for item in document["register_arrays"]}
        self.counters = {item["name"]: item["size"] for item in document["counter_arrays"] if not item["is_direct"]}

    @staticmethod
    def full(name: str, known: Iterable[str]) -> str:
        """Return the one full name that ends with ``name``."""
        found = [full for full in known if full == name or full.endswith("." + name)]
        if len(found) != 1:
            raise UnknownNameError(f"{name} names {len(found)} things of the program")
        return found[0]


def thrift_modules() -> dict[str, Any]:
    """Import what BMv2 installs next to simple_switch, for whichever Python it was installed."""
    names = {
        "Standard": "bm_runtime.standard.Standard",
        "types": "bm_runtime.standard.ttypes",
        "SimpleSwitch": "sswitch_runtime.SimpleSwitch",
        "TSocket": "thrift.transport.TSocket",
        "TTransport": "thrift.transport.TTransport",
        "TBinaryProtocol": "thrift.protocol.TBinaryProtocol",
        "TMultiplexedProtocol": "thrift.protocol.TMultiplexedProtocol",
    }
    with suppress(ImportError):
        return {name: importlib.import_module(module) for name, module in names.items()}
    installed = Path(shutil.which("simple_switch") or "/usr/bin/simple_switch").resolve().parent.parent / "lib"
    for folder in sorted([*installed.glob("python3*/site-packages"), *installed.glob("python3*/dist-packages")]):
        site.addsitedir(str(folder))
    return {name: importlib.import_module(module) for name, module in names.items()}
