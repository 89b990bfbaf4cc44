# SPDX-License-Identifier: Apache-2.0
"""One program with everything that the DLCP program does not use, its entries, and packets for it."""

import numpy as np

from dlcp.switch import Action, MemberRef, MeterConfig
from tests.switch.mini import Mini, arg, assign, c, call, f, op, ref, valid

HEADERS = {
    "a": {"kind": 3, "odd": 13, "wide": 48, "low": 8},
    "b": {"x": 4, "y": 12, "sum": 16, "z": 32},
    "t": {"p": 8, "q": 24, "r": 30, "s": 2},
}
LOCALS = {
    "n1": 32, "n2": 32, "h16": 16, "h32": 32, "id": 40, "xor": 16, "cs": 16, "color": 2, "flag": 1, "tern": 8,
    "sat": 8, "shift": 16, "reg": 24, "path": 8, "_pad": 7,
}  # fmt: skip
METER = MeterConfig(cir=1000, cburst=2, pir=3000, pburst=4)


def build(path):
    """Write the program. ``t`` follows ``a`` directly or behind ``b``: its place differs from packet to packet."""
    mini = Mini(HEADERS, LOCALS)
    mini.state("start", ["a", {"op": "set", "parameters": [f("scalars.path"), c(1)]}], ["a.kind", "a.odd"], [
        (0x010000, 0x070000, "with_b"),
        (0x020003, None, "tail"),
        (0x030000, 0x070000, "checked"),
    ])  # fmt: skip
    mini.state("with_b", ["b"], ["b.x"], [(1, 1, "tail")])
    mini.state("tail", ["t", {"op": "set", "parameters": [f("scalars.path"), f("t.p")]}])
    odd = {"op": "verify", "parameters": [op("!=", f("a.low"), c(7)), {"type": "hexstr", "value": "0x9"}]}
    mini.state("checked", [odd], default="tail")
    document = mini.document
    document["register_arrays"] = [{"name": "regs", "size": 10, "bitwidth": 24}]
    document["counter_arrays"] = [{"name": "cnt", "size": 5, "is_direct": False}]
    document["meter_arrays"] = [{"name": "mtr", "size": 3, "rate_count": 2, "type": "packets", "is_direct": False}]

    def calculation(name, algo, *inputs):
        items = [f(item) if isinstance(item, str) else item for item in inputs]
        document["calculations"].append({"name": name, "algo": algo, "input": items})

    calculation("c16", "crc16", "a.odd", "t.q", "t.s", "scalars.n1")
    calculation("c32", "crc32", "b.x", "b.z", "a.kind", {"type": "hexstr", "value": "0x5", "bitwidth": 3})
    calculation("cid", "identity", "a.kind", "a.odd", "a.low")
    calculation("cxor", "xor16", "a.kind", "b.y", "a.wide", "t.r")
    calculation("ccs", "csum16", "a.odd", "a.low", "t.q")
    # Not the header's own bytes in order, so it is summed over fields.
    calculation("cb", "csum16", "b.z", "b.x", "b.y", "a.low")
    condition = {"type": "expression", "value": op("not", None, op("==", f("b.x"), c(15)))["value"]}
    document["checksums"] = [
        {"name": name, "target": ["b", "sum"], "type": "generic", "calculation": "cb", "if_cond": condition,
         "verify": name == "v", "update": name == "u"}
        for name in ("v", "u")
    ]  # fmt: skip

    def hashed(target, name, base, size):
        return call("modify_field_with_hash_based_offset", f(target), c(base), ref("calculation", name), c(size))

    mini.do("ingress", "start_", "is_t",
        assign("scalars.n1", op("&", op("-", f("a.odd"), f("a.wide")), c(0xFFFFFFFF))),
        hashed("scalars.h16", "c16", 0, 0x10000), hashed("scalars.h32", "c32", 3, 1000),
        hashed("scalars.id", "cid", 0, 1 << 40), hashed("scalars.xor", "cxor", 0, 0),
        hashed("scalars.cs", "ccs", 5, 0x10000),
        assign("scalars.tern", op("?", f("a.low"), op("&", op("~", None, f("a.low")), c(0xFF)),
                                  cond=op("<", f("a.low"), c(100)))),
        assign("scalars.sat", op("usat_cast", op("-", f("a.low"), c(0x30)), c(8))),
        assign("scalars.shift", op("&", op(">>", f("a.wide"), f("a.low")), c(0xFFFF))),
        call("count", ref("counter_array", "cnt"), op("&", f("a.odd"), c(7))),
        call("register_read", f("scalars.reg"), ref("register_array", "regs"), op("&", f("a.low"), c(15))),
        call("register_write", ref("register_array", "regs"), op("&", f("a.low"), c(15)),
             op("+", op("*", f("scalars.reg"), c(3)), f("a.kind"))),
        call("execute_meter", ref("meter_array", "mtr"), op("&", f("a.low"), c(3)), f("scalars.color")),
        assign("scalars.flag", op("b2d", None, op("and", valid("t"), op(">=", f("t.p"), c(9))))),
    )  # fmt: skip
    mini.when("ingress", "is_t", op("or", valid("t"), op("d2b", None, f("scalars.flag"))), "ranges", "mixed")
    mini.action("none", [])
    mini.action("send", [assign("standard_metadata.egress_spec", arg(0))], [("port", 9)])
    mini.action("edit", [
        assign("t.q", op("&", op("+", f("t.q"), arg(0)), c(0xFFFFFF))), assign("t.s", c(2)),
        assign("t.r", f("scalars.n1")), assign("b.y", arg(1)), assign("a.kind", c(5)),
    ], [("add", 24), ("y", 12)])  # fmt: skip
    mini.action("leave", [
        assign("standard_metadata.egress_spec", c(7)), call("exit"),
        assign("standard_metadata.priority", c(6)),
    ])  # fmt: skip
    mini.action("drop", [call("mark_to_drop", ref("header", "standard_metadata"))])
    mini.table("ingress", "ranges", ["edit", "leave", "none"], {"edit": "mixed", "leave": "mixed", "none": "keyless"},
        [("range", "t.p", "p"), ("ternary", "t.r", "r"), ("exact", "t.$valid$", "has_t"), ("range", "a.low", "low")],
        "range", ("none",))  # fmt: skip
    mini.table("ingress", "mixed", ["send", "none"], {"__HIT__": "keyless", "__MISS__": "fixed"},
        [("lpm", "a.wide", "wide"), ("exact", "a.kind", "kind")], "lpm", ("none",))  # fmt: skip
    entries = [
        {"match_key": [{"match_type": "ternary", "key": "0x01", "mask": "0x01"}], "priority": 2,
         "action_entry": {"action_id": 2, "action_data": ["0x11"]}},
        {"match_key": [{"match_type": "ternary", "key": "0x03", "mask": "0x03"}], "priority": 1,
         "action_entry": {"action_id": 2, "action_data": ["0x12"]}},
    ]  # fmt: skip
    assert mini.actions[2]["name"] == "send"
    mini.table("ingress", "fixed", ["send", "drop"], {"send": "keyless", "drop": "keyless"},
        [("ternary", "a.odd", "odd")], "ternary", ("drop",), entries=entries)  # fmt: skip
    mini.table("ingress", "keyless", ["send", "none"], {"send": "profile", "none": "profile"}, default=("none",))
    mini.pipelines["ingress"]["action_profiles"] = [{"name": "prof", "max_size": 8}]
    mini.table("ingress", "profile", ["send", "none"], {"send": None, "none": None},
        [("exact", "a.low", "low", "0x3f")], type="indirect", action_profile="prof")  # fmt: skip
    mini.do("egress", "marks", "drops",
        assign("a.low", f("standard_metadata.deq_qdepth")),
        assign("t.p", op("&", op("+", f("standard_metadata.packet_length"), f("scalars.path")), c(0xFF))),
        assign("a.odd", op("&", op("^", f("scalars.h16"), op("^", f("scalars.h32"), f("scalars.id"))), c(0x1FFF))),
        assign("a.wide", op("+", op("<<", f("scalars.xor"), c(32)), op("|", op("<<", f("scalars.cs"), c(16)),
               op("|", op("<<", f("scalars.tern"), c(8)), f("scalars.sat"))))),
        assign("b.z", op("|", op("<<", f("scalars.color"), c(30)), op("|", op("<<", f("scalars.shift"), c(8)),
               op("+", f("standard_metadata.parser_error"), op("<<", f("standard_metadata.checksum_error"), c(6)))))),
    )  # fmt: skip
    mini.when("egress", "drops", op("==", f("standard_metadata.enq_qdepth"), c(13)), "gone", None)
    mini.do("egress", "gone", None, call("mark_to_drop", ref("header", "standard_metadata")))
    return mini.save(path)


RANGES = [  # (p range, r, low range, priority, action, arguments)
    ((0, 99), (0, 0), (0, 255), 1, "edit", [0xFFFFF0, 0xABC]),
    ((50, 255), (1, 1), (10, 200), 2, "leave", []),
    ((100, 160), (0, 0), (0, 255), 1, "edit", [1, 0x001]),
]
MIXED = [(0x000000000000, 0, 1, 3), (0x123400000000, 16, 1, 4), (0x123456000000, 24, 1, 5), (0x123400000000, 17, 2, 6)]
CONST = [(1, 1, 2, 0x11), (3, 3, 1, 0x12)]


def populate(program):
    for p, r, low, priority, action, values in RANGES:
        match = {"p": p, "r": r, "has_t": 1, "low": low}
        parameters = dict(zip(("add", "y"), values, strict=False))
        program.tables["ranges"].insert(match, Action(action, parameters), priority)
    for wide, length, kind, port in MIXED:
        program.tables["mixed"].insert({"wide": (wide, length), "kind": kind}, Action("send", {"port": port}))
    program.profiles["prof"].add_member(4, Action("send", {"port": 99}))
    program.tables["profile"].insert({"low": 0x11}, MemberRef(4))
    program.meters["mtr"][1] = METER
    program.meters["mtr"][2] = METER


def populate_oracle(oracle):
    def inside(value, bounds):
        return bounds[0] <= value <= bounds[1]

    oracle.tables["ranges"] = [
        (
            lambda k, p=p, r=r, low=low: inside(k[0], p) and k[1] & r[1] == r[0] and k[2] == 1 and inside(k[3], low),
            -priority,
            action,
            values,
        )
        for p, r, low, priority, action, values in RANGES
    ]
    oracle.tables["mixed"] = [
        (lambda k, w=w, n=n, kind=kind: k[0] >> (48 - n) == w >> (48 - n) and k[1] == kind, -n, "send", [port])
        for w, n, kind, port in MIXED
    ]
    oracle.tables["fixed"] = [(lambda k, v=v, m=m: k[0] & m == v, rank, "send", [port]) for v, m, rank, port in CONST]
    oracle.members = {4: ("send", [99])}
    oracle.tables["profile"] = [(lambda k: k[0] & 0x3F == 0x11, 0, "member", 4)]
    for cell in (1, 2):
        peak = [METER.pir / 1e6, METER.pburst, METER.pburst, 0]
        oracle.meters["mtr", cell] = [peak, [METER.cir / 1e6, METER.cburst, METER.cburst, 0]]


def packets(count, seed):
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        kind, odd = int(random.integers(5)), int(random.choice([0, 3, 3, 1, int(random.integers(1 << 13))]))
        wide = int(random.choice([0x123456789ABC, 0x1234FFFFFFFF, 0x12347FFFFFFF, int(random.integers(1 << 48))]))
        low = int(random.choice([7, 0x11, 0x51, *random.integers(0, 256, 5)]))
        data = (kind << 13 | odd).to_bytes(2, "big") + wide.to_bytes(6, "big") + bytes([low]) + random.bytes(24)
        if random.random() < 0.4:  # a right checksum in b
            b = bytearray(data[9:17])
            b[0] &= 0x7F
            words = [int.from_bytes(b[4:6], "big"), int.from_bytes(b[6:8], "big"), b[0] << 8 | b[1], low << 8]
            total = sum(words)
            total = (total & 0xFFFF) + (total >> 16)
            b[2:4] = (0xFFFF ^ ((total & 0xFFFF) + (total >> 16))).to_bytes(2, "big")
            data = data[:9] + bytes(b) + data[17:]
        cut = int(random.integers(len(data))) if random.random() < 0.2 else len(data)
        made.append(data[:cut])
    return made
