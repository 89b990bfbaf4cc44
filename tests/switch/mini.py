# SPDX-License-Identifier: Apache-2.0
"""Writes BMv2 JSON by hand, in the shape that p4c gives it, for features that the DLCP program does not use."""

import json

STANDARD = {
    "ingress_port": 9,
    "egress_spec": 9,
    "egress_port": 9,
    "instance_type": 32,
    "packet_length": 32,
    "enq_timestamp": 32,
    "enq_qdepth": 19,
    "deq_timedelta": 32,
    "deq_qdepth": 19,
    "ingress_global_timestamp": 48,
    "egress_global_timestamp": 48,
    "mcast_grp": 16,
    "checksum_error": 1,
    "parser_error": 32,
    "priority": 3,
}
ALIASES = {
    "queueing_metadata": ("enq_timestamp", "enq_qdepth", "deq_timedelta", "deq_qdepth"),
    "intrinsic_metadata": ("ingress_global_timestamp", "egress_global_timestamp", "mcast_grp", "priority"),
}


def f(name):
    """``header.field``."""
    return {"type": "field", "value": name.rsplit(".", 1)}


def c(value):
    return {"type": "hexstr", "value": hex(value)}


def arg(index):
    return {"type": "runtime_data", "value": index}


def valid(header):
    return op("d2b", None, f(f"{header}.$valid$"))


def op(name, left, right, cond=None):
    value = {"op": name, "left": left, "right": right}
    if cond is not None:
        value["cond"] = cond
    return {"type": "expression", "value": value}


def call(name, *parameters):
    wrapped = [{"type": "expression", "value": p} if p["type"] == "expression" else p for p in parameters]
    return {"op": name, "parameters": wrapped}


def assign(target, value):
    return call("assign", f(target), value)


def ref(kind, name):
    return {"type": kind, "value": name}


class Mini:
    """A program under construction; ``save`` writes it."""

    def __init__(self, headers, locals_):
        self.headers = headers
        types = [{"name": "scalars_0", "fields": [[n, w, False] for n, w in locals_.items()]}]
        types.append({"name": "standard_metadata", "fields": [[n, w, False] for n, w in STANDARD.items()]})
        types += [{"name": f"{n}_t", "fields": [[*p, False] for p in fs.items()]} for n, fs in headers.items()]
        instances = [
            {"name": "scalars", "header_type": "scalars_0", "metadata": True},
            {"name": "standard_metadata", "header_type": "standard_metadata", "metadata": True},
            *({"name": n, "header_type": f"{n}_t", "metadata": False} for n in headers),
        ]
        for number, item in enumerate(types):
            item["id"] = number
        self.states, self.actions = [], []
        self.pipelines = {
            name: {"name": name, "init_table": None, "tables": [], "action_profiles": [], "conditionals": []}
            for name in ("ingress", "egress")
        }
        self.document = {
            "__meta__": {"version": [2, 23]},
            "header_types": types,
            "headers": instances,
            "errors": [["NoError", 0], ["PacketTooShort", 1], ["Odd", 9]],
            "parsers": [{"name": "parser", "init_state": "start", "parse_states": self.states}],
            "deparsers": [{"name": "deparser", "order": list(headers), "primitives": []}],
            "meter_arrays": [],
            "counter_arrays": [],
            "register_arrays": [],
            "calculations": [],
            "checksums": [],
            "actions": self.actions,
            "pipelines": list(self.pipelines.values()),
            "field_aliases": [
                [f"{group}.{name}", ["standard_metadata", name]] for group, names in ALIASES.items() for name in names
            ],
        }

    def state(self, name, ops, keys=(), cases=(), default=None):
        """Cases are (value, mask or None, next)."""
        operations = [
            item if isinstance(item, dict) else {"op": "extract", "parameters": [{"type": "regular", "value": item}]}
            for item in ops
        ]
        transitions = [
            {"type": "hexstr", "value": hex(v), "mask": None if m is None else hex(m), "next_state": n}
            for v, m, n in cases
        ]
        transitions.append({"type": "default", "value": None, "mask": None, "next_state": default})
        self.states.append(
            {"name": name, "parser_ops": operations, "transition_key": [f(k) for k in keys], "transitions": transitions}
        )

    def action(self, name, body, params=()):
        data = [{"name": n, "bitwidth": w} for n, w in params]
        self.actions.append({"name": name, "id": len(self.actions), "runtime_data": data, "primitives": list(body)})

    def table(self, pipeline, name, actions, following, keys=(), match="exact", default=None, const=False, **more):
        """Keys are (match, field, name) with an optional mask; following as next_tables."""
        numbers = {item["name"]: item["id"] for item in self.actions}
        item = {
            "name": name,
            "key": [
                {"match_type": k[0], "target": k[1].rsplit(".", 1), "name": k[2], "mask": k[3] if len(k) > 3 else None}
                for k in keys
            ],
            "match_type": match,
            "type": "simple",
            "max_size": 16,
            "with_counters": False,
            "support_timeout": False,
            "direct_meters": None,
            "action_ids": [numbers[a] for a in actions],
            "actions": list(actions),
            "base_default_next": None,
            "next_tables": following,
        }
        if default is not None:
            item["default_entry"] = {
                "action_id": numbers[default[0]],
                "action_const": const,
                "action_data": [hex(value) for value in default[1:]],
                "action_entry_const": const,
            }
        item.update(more)
        self.pipelines[pipeline]["tables"].append(item)

    def do(self, pipeline, name, following, *body):
        """Statements outside tables, as p4c wraps them."""
        self.action(f"act_{name}", body)
        self.table(pipeline, name, [f"act_{name}"], {f"act_{name}": following}, default=(f"act_{name}",), const=True)

    def when(self, pipeline, name, condition, then, otherwise):
        wrapped = {"type": "expression", "value": condition["value"]}
        self.pipelines[pipeline]["conditionals"].append(
            {"name": name, "expression": wrapped, "true_next": then, "false_next": otherwise}
        )

    def save(self, path):
        for pipeline in self.pipelines.values():
            nodes = pipeline["conditionals"] + pipeline["tables"]
            if pipeline["init_table"] is None and nodes:
                pipeline["init_table"] = nodes[0]["name"]
        path.write_text(json.dumps(self.document))
        return path
