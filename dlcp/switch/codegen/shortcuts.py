# SPDX-License-Identifier: Apache-2.0
"""Shorter ways through a control: a condition on what has just been set to a constant is decided beforehand.

p4c writes ``t.apply().hit && c`` as two tables that set a variable to true and to false and a condition on it.
"""

from collections.abc import Mapping
from dataclasses import replace

from dlcp.switch.codegen.analysis import Usage, followers_first
from dlcp.switch.model import Assign, Conditional, Const, Expr, Field, Node, Op, Pipeline, TableDef


def shorten(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with such conditions skipped, and without the nodes that nobody reaches."""
    nodes = dict(pipeline.nodes)
    for name in followers_first(pipeline):
        node = nodes[name]
        if isinstance(node, TableDef) and node.hidden:
            nodes[name] = _threaded(node, nodes)
    shorter = replace(pipeline, nodes=nodes)
    reached = set(followers_first(shorter))
    return replace(shorter, nodes={name: node for name, node in nodes.items() if name in reached})


def _threaded(table: TableDef, nodes: Mapping[str, Node]) -> TableDef:
    action = Usage.default_action(table)
    if action.exits or not all(isinstance(statement, Assign) for statement in action.body):
        return table
    known: dict[Field, int] = {}
    for statement in action.body:
        assert isinstance(statement, Assign)
        if isinstance(value := constant(statement.value, known), int):
            known[statement.target] = value & ((1 << statement.target.width) - 1)
        else:
            known.pop(statement.target, None)
    following = table.next_of(action.id, hit=False)
    while following is not None:
        node = nodes[following]
        decided = constant(node.condition, known) if isinstance(node, Conditional) else None
        if decided is None:
            break
        assert isinstance(node, Conditional)
        following = node.then if decided else node.otherwise
    return replace(table, next={action.id: following}, on_hit=(False, None), on_miss=(False, None))


def constant(expression: Expr, known: Mapping[Field, int]) -> int | None:
    """Return the value of an expression over constants and ``known`` fields, or None if it takes more than that."""
    if isinstance(expression, Const):
        return expression.value
    if isinstance(expression, Field):
        return known.get(expression)
    if isinstance(expression, Op):
        values = [constant(arg, known) for arg in expression.args]
        if expression.op in ("d2b", "b2d") and values[0] is not None:
            return int(values[0] != 0)
        if expression.op == "not" and values[0] is not None:
            return int(values[0] == 0)
        if expression.op == "==" and values[0] is not None and values[1] is not None:
            return int(values[0] == values[1])
    return None
