# SPDX-License-Identifier: Apache-2.0
"""Imports of the project's own modules inside functions say what they save: they hide dependencies from a reader."""

import ast

from tests.architecture.walk import ROOT

LAZY_BY_DESIGN = ROOT / "dlcp" / "commands"
"""Its package says why."""


def modules():
    for top in ("dlcp", "controller", "sim"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if not path.is_relative_to(LAZY_BY_DESIGN):
                yield path


def imported(statement):
    if isinstance(statement, ast.ImportFrom):
        return [statement.module or ""]
    return [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []


def unexplained(path):
    """Return the lines of imports of ``dlcp`` in functions without a comment on the line, above it or in its group."""
    text = path.read_text()
    lines, explained = ["", *text.splitlines()], -1
    inner = {
        statement.lineno: statement
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in ast.walk(function)
        if any(name.split(".")[0] == "dlcp" for name in imported(statement))
    }
    for number, statement in sorted(inner.items()):
        has_comment = "#" in lines[statement.end_lineno] or lines[number - 1].strip().startswith("#")
        if has_comment or number == explained + 1:
            explained = statement.end_lineno
        else:
            yield f"{path.relative_to(ROOT)}:{number}: {lines[number].strip()}"


def test_imports_inside_functions_say_what_they_save():
    found = [line for path in modules() for line in unexplained(path)]
    assert found == []


def test_an_import_without_a_comment_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.architecture.test_imports.ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(
        "def f():\n    # saves a second\n    from dlcp.a import b\n    from dlcp import c\n\n    from dlcp import d\n"
    )
    assert list(unexplained(path)) == ["module.py:6: from dlcp import d"]
