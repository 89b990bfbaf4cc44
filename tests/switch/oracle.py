# SPDX-License-Identifier: Apache-2.0
"""BMv2's simple_switch, slowly: walks the JSON with numbers of any size, as its C++ does.

Nothing is shared with dlcp.switch but the hash algorithms over bytes, which have known answers of their own.
"""

import json
from dataclasses import dataclass, field

from dlcp.switch.executor import hashes


@dataclass
class Oracle:
    """One switch. Entries are lists of (matches(key values) -> bool, order, action name or member, arguments)."""

    path: str
    tables: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    members: dict = field(default_factory=dict)
    meters: dict = field(default_factory=dict)

    def __post_init__(self):
        with open(self.path) as file:
            self.json = json.load(file)
        types = {item["name"]: item["fields"] for item in self.json["header_types"]}
        self.fields = {item["name"]: {f[0]: f[1] for f in types[item["header_type"]]} for item in self.json["headers"]}
        self.metadata = {item["name"] for item in self.json["headers"] if item["metadata"]}
        self.actions = {item["id"]: item for item in self.json["actions"]}
        self.calculations = {item["name"]: item for item in self.json["calculations"]}
        self.registers = {item["name"]: [0] * item["size"] for item in self.json["register_arrays"]}
        self.register_widths = {item["name"]: item["bitwidth"] for item in self.json["register_arrays"]}
        self.counters = {item["name"]: [[0, 0] for _ in range(item["size"])] for item in self.json["counter_arrays"]}
        self.meter_defs = {item["name"]: item for item in self.json["meter_arrays"]}
        self.alias = {name: tuple(target) for name, target in self.json["field_aliases"]}
        self.pipelines = {item["name"]: item for item in self.json["pipelines"]}

    # ------------------------------------------------------------------------------------------------------ values

    def set(self, header, name, value):
        self.phv[header, name] = value & ((1 << self.fields[header][name]) - 1)

    def is_valid(self, header):
        return header in self.metadata or header in self.valid

    def get(self, header, name):
        if name == "$valid$":
            return int(self.is_valid(header))
        return self.phv.get((header, name), 0)

    def eval(self, item, data=()):
        kind, value = item["type"], item["value"]
        if kind == "expression":
            return self.eval(value, data) if "type" in value else self.operate(value, data)
        if kind == "field":
            return self.get(*value)
        if kind == "hexstr":
            return int(value, 16)
        if kind == "bool":
            return bool(value)
        if kind in ("runtime_data", "local"):
            return data[value]
        if kind == "header":
            return value
        raise AssertionError(kind)

    def operate(self, value, data):
        op = value["op"]
        if op == "?":
            return self.eval(value["left" if self.eval(value["cond"], data) else "right"], data)
        right = self.eval(value["right"], data)
        unary = {
            "valid": lambda: self.is_valid(right),
            "d2b": lambda: right != 0,
            "b2d": lambda: int(right),
            "not": lambda: not right,
            "~": lambda: ~right,
        }
        if op in unary:
            return unary[op]()
        left = self.eval(value["left"], data)
        return {
            "+": lambda: left + right,
            "-": lambda: left - right,
            "*": lambda: left * right,
            "/": lambda: left // right,
            "%": lambda: left % right,
            "<<": lambda: left << right,
            ">>": lambda: left >> right,
            "&": lambda: left & right,
            "|": lambda: left | right,
            "^": lambda: left ^ right,
            "==": lambda: left == right,
            "!=": lambda: left != right,
            "<": lambda: left < right,
            ">": lambda: left > right,
            "<=": lambda: left <= right,
            ">=": lambda: left >= right,
            "and": lambda: left and right,
            "or": lambda: left or right,
            "usat_cast": lambda: min(max(left, 0), (1 << right) - 1),
        }[op]()

    def hash(self, algorithm, inputs):
        values, widths = [], []
        for item in inputs:
            if item["type"] == "header":
                if self.is_valid(item["value"]):
                    for name, width in self.fields[item["value"]].items():
                        values.append(self.get(item["value"], name))
                        widths.append(width)
            elif item["type"] == "hexstr":
                values.append(int(item["value"], 16))
                widths.append(item["bitwidth"])
            elif self.is_valid(item["value"][0]):
                values.append(self.get(*item["value"]))
                widths.append(self.fields[item["value"][0]][item["value"][1]])
        return hashes.OVER_BYTES[algorithm](hashes.pack(values, widths))

    # ------------------------------------------------------------------------------------------------------ parser

    def parse(self, packet):
        self.valid, self.offset = [], 0
        parser = self.json["parsers"][0]
        states = {item["name"]: item for item in parser["parse_states"]}
        errors = dict(map(tuple, self.json["errors"]))
        name, error = parser["init_state"], errors["NoError"]
        while name is not None:
            state = states[name]
            for op in state["parser_ops"]:
                given = op["parameters"]
                if op["op"] == "extract":
                    header = given[0]["value"]
                    bits = sum(self.fields[header].values())
                    if len(packet) - self.offset < bits // 8:
                        error, name = errors["PacketTooShort"], None
                        break
                    number = int.from_bytes(packet[self.offset : self.offset + bits // 8], "big")
                    for f, width in self.fields[header].items():
                        bits -= width
                        self.set(header, f, number >> bits)
                    self.offset += sum(self.fields[header].values()) // 8
                    self.valid.append(header)
                elif op["op"] == "set":
                    self.set(*given[0]["value"], self.eval(given[1]))
                elif not self.eval(given[0]):
                    error, name = self.eval(given[1]), None
                    break
            if name is None:
                break
            name = self.transition(state)
        self.payload = packet[self.offset :]
        self.set("standard_metadata", "parser_error", error)
        wrong = False
        for item in self.json["checksums"]:
            if item["verify"] and self.is_valid(item["target"][0]) and self.eval(item["if_cond"]):
                calculation = self.calculations[item["calculation"]]
                wrong |= self.hash(calculation["algo"], calculation["input"]) != self.get(*item["target"])
        self.set("standard_metadata", "checksum_error", int(wrong))

    def transition(self, state):
        key = b"".join(
            self.get(*item["value"]).to_bytes((self.fields[item["value"][0]][item["value"][1]] + 7) // 8, "big")
            for item in state["transition_key"]
        )
        number, default = int.from_bytes(key, "big"), None
        for item in state["transitions"]:
            if item["value"] in (None, "default"):
                default = item["next_state"]
                continue
            mask = -1 if item["mask"] is None else int(item["mask"], 16)
            if number & mask == int(item["value"], 16) & mask:
                return item["next_state"]
        return default

    # ---------------------------------------------------------------------------------------------------- controls

    def run(self, pipeline, length, now):
        self.length, self.now, self.exit = length, now, False
        nodes = {item["name"]: item for item in (*pipeline["tables"], *pipeline["conditionals"])}
        name = pipeline["init_table"]
        while name is not None and not self.exit:
            node = nodes[name]
            if "expression" in node:
                name = node["true_next"] if self.eval(node["expression"]) else node["false_next"]
            else:
                name = self.table(node)

    def table(self, node):
        keys = []
        for key in node["key"]:
            header, name = key["target"]
            keys.append(self.get(header, name) if self.is_valid(header) or name == "$valid$" else 0)
        found = None
        for entry in self.tables.get(node["name"], []):
            if entry[0](keys) and (found is None or entry[1] < found[1]):
                found = entry
        action, data = None, []
        if found is not None:
            if node["direct_meters"]:
                meter = self.meter_defs[node["direct_meters"]]
                self.set(*meter["result_target"], self.meter(found[4], meter["type"]))
            if node["type"] == "simple":
                action, data = found[2], found[3]
            else:
                action, data = self.members[self.choose(node["action_profile"], found)]
        elif node.get("default_entry"):
            default = node["default_entry"]
            action = self.actions[default["action_id"]]["name"]
            data = [int(value, 16) for value in default["action_data"]]
        if action is not None:
            number = next(i for i in node["action_ids"] if self.actions[i]["name"] == action)
            self.act(self.actions[number], data)
        following = node["next_tables"]
        ask = "__HIT__" if found is not None else "__MISS__"
        return following[ask] if ask in following else following.get(action, node["base_default_next"])

    def choose(self, profile, found):
        if found[2] == "member":
            return found[3]
        profiles = [item for pipeline in self.json["pipelines"] for item in pipeline["action_profiles"]]
        selector = next(item["selector"] for item in profiles if item["name"] == profile)
        choices = sorted(self.groups[found[3]])
        return choices[self.hash(selector["algo"], selector["input"]) % len(choices)]

    def meter(self, state, kind):
        """State: two buckets [rate a us, burst, tokens, gained], peak first; None is green."""
        if state is None:
            return 0
        amount = self.length if kind == "bytes" else 1
        for colour, bucket in ((2, state[0]), (1, state[1])):
            gained = int(float(self.now) * bucket[0])
            bucket[2] = min(bucket[2] + gained - bucket[3], bucket[1])
            bucket[3] = gained
            if bucket[2] < amount:
                return colour
            bucket[2] -= amount
        return 0

    def act(self, action, data):
        for call in action["primitives"]:
            given = call["parameters"]
            op = call["op"]
            if op == "assign":
                self.set(*given[0]["value"], self.eval(given[1], data))
            elif op == "mark_to_drop":
                self.set("standard_metadata", "egress_spec", 511)
            elif op == "exit":
                self.exit = True
            elif op == "truncate":
                self.limit = min(self.limit, self.eval(given[0], data))
            elif op == "count":
                index = self.eval(given[1], data)
                if index < len(self.counters[given[0]["value"]]):
                    cell = self.counters[given[0]["value"]][index]
                    cell[0] += 1
                    cell[1] += self.length
            elif op == "register_read":
                index = self.eval(given[2], data)
                if index < len(self.registers[given[1]["value"]]):
                    self.set(*given[0]["value"], self.registers[given[1]["value"]][index])
            elif op == "register_write":
                name, index = given[0]["value"], self.eval(given[1], data)
                if index < len(self.registers[name]):
                    self.registers[name][index] = self.eval(given[2], data) & ((1 << self.register_widths[name]) - 1)
            elif op == "execute_meter":
                name, index = given[0]["value"], self.eval(given[1], data)
                state = self.meters.get((name, index))
                self.set(*given[2]["value"], self.meter(state, self.meter_defs[name]["type"]))
            elif op == "modify_field_with_hash_based_offset":
                calculation = self.calculations[given[2]["value"]]
                value = self.hash(calculation["algo"], calculation["input"]) % (self.eval(given[3]) or 1)
                self.set(*given[0]["value"], value + self.eval(given[1], data))
            else:
                raise AssertionError(op)

    # ------------------------------------------------------------------------------------------------------ packets

    def ingress(self, packet, port, now):
        self.phv = {}
        self.set("standard_metadata", "ingress_port", port)
        self.set("standard_metadata", "packet_length", len(packet))
        self.set_alias("intrinsic_metadata.ingress_global_timestamp", now)
        self.parse(packet)
        self.run(self.pipelines["ingress"], len(packet), now)
        priority = self.alias.get("intrinsic_metadata.priority")
        carry = (dict(self.phv), list(self.valid), self.payload, len(packet))
        return self.get("standard_metadata", "egress_spec"), self.get(*priority) if priority else 0, carry

    def set_alias(self, alias, value):
        if alias in self.alias:
            self.set(*self.alias[alias], value)

    def egress(self, carry, port, enq_us, deq_delta_us, enq_depth, deq_depth, now):
        phv, valid, payload, length = carry
        self.phv, self.valid = dict(phv), list(valid)
        for alias, value in {
            "intrinsic_metadata.egress_global_timestamp": now,
            "queueing_metadata.enq_timestamp": enq_us,
            "queueing_metadata.enq_qdepth": enq_depth,
            "queueing_metadata.deq_timedelta": deq_delta_us,
            "queueing_metadata.deq_qdepth": deq_depth,
        }.items():
            self.set_alias(alias, value)
        self.set("standard_metadata", "instance_type", 0)
        self.set("standard_metadata", "egress_port", port)
        self.set("standard_metadata", "egress_spec", 512)
        self.set("standard_metadata", "packet_length", length)
        self.limit = length
        self.run(self.pipelines["egress"], length, now)
        if self.get("standard_metadata", "egress_spec") == 511:
            return None
        for item in self.json["checksums"]:
            if item["update"] and self.eval(item["if_cond"]):
                calculation = self.calculations[item["calculation"]]
                self.set(*item["target"], self.hash(calculation["algo"], calculation["input"]))
        out = b""
        for header in self.json["deparsers"][0]["order"]:
            if header in self.valid:
                names = self.fields[header]
                out += hashes.pack([self.get(header, name) for name in names], list(names.values()))
        return (out + payload)[: self.limit]
