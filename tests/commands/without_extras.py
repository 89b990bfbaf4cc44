# SPDX-License-Identifier: Apache-2.0
"""Run command lines, given as JSON, as if DLCP were installed without any extra; print the output of each."""

import contextlib
import io
import json
import re
import sys
import traceback
from importlib.metadata import packages_distributions, requires


def hide():
    """Make all packages unavailable that DLCP's installation without extras does not bring."""
    kept, waiting = {"dlcp"}, ["dlcp"]
    while waiting:
        for line in requires(waiting.pop()) or []:
            name = _normal(re.match(r"[\w.-]+", line)[0])
            if "extra ==" not in line and name not in kept:
                kept.add(name)
                waiting.append(name)
    for package, distributions in packages_distributions().items():
        if not kept & set(map(_normal, distributions)):
            sys.modules[package] = None


def _normal(name):
    return name.lower().replace("_", "-")


def said(words):
    """Return the exit status of a command line, its output and its errors."""
    from dlcp import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(words)
        except SystemExit as ended:
            status = ended.code
        except Exception:
            status = None
            traceback.print_exc()
    return status, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    hide()
    json.dump([said(words) for words in json.loads(sys.argv[1])], sys.stdout)
