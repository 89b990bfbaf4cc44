# SPDX-License-Identifier: Apache-2.0
"""Executes the notebooks of the documentation: ``python -m tests.docs.notebooks`` renews the outputs in their files."""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
CELL_S = 120
_FIGURE = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>\s*", re.DOTALL)


def execute(path, folder, programs=()):
    """Return a notebook with the outputs of all its cells, run in a folder; raise if one fails.

    Folders in ``programs`` come first in its ``PATH``.
    """
    notebook = nbformat.read(path, as_version=4)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DLCP_")}
    path_variable = [*map(str, programs), str(Path(sys.executable).parent), kept["PATH"]]
    kept |= {"PATH": ":".join(path_variable), "PYTHONPATH": str(ROOT)}
    client = NotebookClient(
        notebook,
        timeout=CELL_S,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=kept)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/svg+xml" in data:  # without the date and Matplotlib's version
                data["image/svg+xml"] = _FIGURE.sub("", data["image/svg+xml"])
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": "ipython3"}
    return notebook


def printed(notebook):
    """Return the text that each code cell printed or showed."""
    return [
        "".join(output.get("text") or output["data"]["text/plain"] for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def main():
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, folder), path)


if __name__ == "__main__":
    main()
