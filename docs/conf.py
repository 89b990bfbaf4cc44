# SPDX-License-Identifier: Apache-2.0
"""The settings with which Sphinx builds the documentation for `make docs`.

Sources are the Markdown pages of the whole repository. Each is in the folder that it describes, and its links also work
on a code host. ``reference.py`` generates parts of them from the code.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from sphinx.application import Sphinx

sys.path.append(str(Path(__file__).parent))
from reference import MISSING

_FIELD = type(NamedTuple("_Tuple", [("field", int)]).field)

project = "DLCP"
html_title = "DLCP"
author = copyright = "the authors of DLCP"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/notebooks/*.ipynb",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "controller/**README.md",
    "dlcp/**README.md",
    "p4/**README.md",
    "sim/**README.md",
    "sim/experiments/RESULTS.md",
]
exclude_patterns = ["dlcp/controller", "dlcp/sim", "dlcp/switch/p4"]  # links to what is listed

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks keep their outputs
highlight_language = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
autodoc_mock_imports = MISSING

# The theme takes its fonts from the reader's system. No page loads anything from elsewhere.
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["."]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_use_index = False


def setup(app: Sphinx) -> None:
    """Skip the fields of named tuples, which the docstrings of their classes describe."""
    app.connect("autodoc-skip-member", lambda *about: isinstance(about[3], _FIELD) or None)
