# SPDX-License-Identifier: Apache-2.0
"""A small switch's entries, for the program and for the oracle alike, and packets of every kind."""

import struct

import numpy as np

from dlcp.switch import Action, GroupRef, MemberRef, MeterConfig

PORTS = 6
ROUTES = [(0x0A000000 + i, 32, "member", i) for i in range(1, 5)] + [(0x0A010000, 16, "group", 1), (0, 0, "group", 2)]
NETWORK = 0x20010DB8 << 96
IPV6_ROUTES = [(NETWORK + i, 128, "member", i) for i in range(1, 5)] + [
    (NETWORK + (1 << 64), 64, "group", 1),
    (NETWORK, 32, "group", 2),
    (0xFC << 120, 7, "member", 5),
]
MEMBERS = {i: (i, 0x020000000000 + i) for i in range(1, 7)}
GROUPS = {1: [5, 1, 3], 2: [6, 2]}
METER = MeterConfig(cir=20_000, cburst=150, pir=50_000, pburst=260)
TRIMMED_JOBS = (2, 4)
BUDGET_PARTS = [((2, 0xFFFF), 1, 2), ((0, 0), 0, 1)]  # job, halvings, priority
CLASSIFY = [  # job, type, queue, drop_class, priority, result
    ((3, 0xFFFF), None, None, None, 5, (2, 6)),
    (None, None, (4, 7), None, 3, (4, 1)),
    (None, (2, 3), None, (0, 1), 4, (7, 0)),
    ((2, 0xFFFE), None, None, None, 4, (5, 5)),
]


def populate(program):
    tables, profile = program.tables, program.profiles["route_selector"]
    for port in (1, 2, 3, 5):
        tables["port_trust"].insert({"ig_port": port}, Action("trust"))
    for number, (port, mac) in MEMBERS.items():
        profile.add_member(number, Action("to_next_hop", {"port": port, "mac": mac}))
    for number, members in GROUPS.items():
        profile.add_group(number, members)
    for value, length, kind, number in ROUTES:
        target = MemberRef(number) if kind == "member" else GroupRef(number)
        tables["ipv4_route"].insert({"ipv4_dst": (value, length)}, target)
    for value, length, kind, number in IPV6_ROUTES:
        target = MemberRef(number) if kind == "member" else GroupRef(number)
        tables["ipv6_route"].insert({"ipv6_dst": (value, length)}, target)
    for job in TRIMMED_JOBS:
        tables["trimming"].insert({"job": job}, Action("trim"))
    for job, halvings, priority in BUDGET_PARTS:
        tables["budget_part"].insert({"job": job}, Action("part_of_budget", {"halvings": halvings}), priority)
    for port in range(1, PORTS + 1):
        tables["ethernet_route"].insert({"ethernet_dst": 0x020000000000 + port}, Action("to_port", {"port": port}))
    for *fields, priority, (queue, drop_class) in CLASSIFY:
        match = dict(zip(("job", "type", "queue", "drop_class"), fields, strict=True))
        match = {name: value for name, value in match.items() if value is not None}
        tables["classify"].insert(match, Action("set_class", {"queue": queue, "drop_class": drop_class}), priority)
    for job in (1, 2, 3):
        for port in range(1, PORTS + 1):
            match = {"job": job, "control": 0, "eg_port": port}
            tables["job_share"].insert(match, Action("metered" if job < 3 else "unlimited"))
            if port % 2:
                tables["job_share"].set_meter(match, METER)
    for queue in range(8):
        if queue != 5:
            tables["ecn_threshold"].insert({"queue": queue}, Action("mark_above", {"depth": 30}))
        for drop_class in range(1, 8):
            limit = Action("drop_above", {"depth": 40 - 4 * drop_class})
            tables["drop_threshold"].insert({"queue": queue, "drop_class": drop_class}, limit)


def populate_oracle(oracle):
    tables = (table for pipeline in oracle.json["pipelines"] for table in pipeline["tables"])
    names, actions = (
        {item["name"].rpartition(".")[2]: item["name"] for item in items} for items in (tables, oracle.json["actions"])
    )

    def add(table, matches, order, action, data, meter=None):
        oracle.tables.setdefault(names[table], []).append((matches, order, actions.get(action, action), data, meter))

    def equals(*values):
        return lambda keys: list(values) == keys

    def prefix(value, length, width=32):
        return lambda keys: keys[0] >> (width - length) == value >> (width - length)

    def ternary(fields):
        return lambda keys: all(f is None or key & f[1] == f[0] for key, f in zip(keys, fields, strict=True))

    for port in (1, 2, 3, 5):
        add("port_trust", equals(port), 0, "trust", [])
    # Handles are given out in the order in which members are added: the same as the ids here.
    oracle.members = {number: (actions["to_next_hop"], list(data)) for number, data in MEMBERS.items()}
    oracle.groups = GROUPS
    for value, length, kind, number in ROUTES:
        add("ipv4_route", prefix(value, length), -length, kind, number)
    for value, length, kind, number in IPV6_ROUTES:
        add("ipv6_route", prefix(value, length, 128), -length, kind, number)
    for job in TRIMMED_JOBS:
        add("trimming", equals(job), 0, "trim", [])
    for job, halvings, priority in BUDGET_PARTS:
        add("budget_part", ternary([job]), -priority, "part_of_budget", [halvings])
    for port in range(1, PORTS + 1):
        add("ethernet_route", equals(0x020000000000 + port), 0, "to_port", [port])
    for *fields, priority, result in CLASSIFY:
        add("classify", ternary(fields), -priority, "set_class", list(result))
    for job in (1, 2, 3):
        for port in range(1, PORTS + 1):
            peak = [METER.pir / 1e6, METER.pburst, METER.pburst, 0]
            committed = [METER.cir / 1e6, METER.cburst, METER.cburst, 0]
            meter = [peak, committed] if port % 2 else None
            action, data = "metered" if job < 3 else "unlimited", []
            add("job_share", equals(job, 0, port), 0, action, data, meter)
    for queue in range(8):
        if queue != 5:
            add("ecn_threshold", equals(queue), 0, "mark_above", [30])
        for drop_class in range(1, 8):
            add("drop_threshold", equals(queue, drop_class), 0, "drop_above", [40 - 4 * drop_class])


def checksum(data):
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def packets(count, seed):
    """Make packets of all kinds, most of them DLCP data, some cut short, some with wrong fields."""
    random = np.random.default_rng(seed)

    def pick(*values):
        return int(values[int(random.integers(len(values)))])

    def number(bits):
        return int(random.integers(1 << bits))

    made = []
    for _ in range(count):
        version = pick(4, 4, 4, 4, 4, 4, 4, 6)
        ihl = pick(5, 5, 5, 5, 5, 5, 5, 6)
        protocol = pick(17, 17, 17, 17, 17, 6, 1)
        fragment = pick(0, 0, 0, 0, 0, 0, 0x4000, 0x2001)
        destination = pick(*(0x0A000000 + i for i in range(1, 8)), 0x0A010000 + number(16), number(32))
        version_of_ipv6 = pick(6, 6, 6, 6, 6, 6, 6, 4)
        destination_of_ipv6 = pick(
            *(NETWORK + i for i in range(1, 8)),
            NETWORK + (1 << 64) + number(40),
            NETWORK + number(60),
            0xFD << 120,
            number(62) << 66,
        )
        port = pick(53696, 53697, 53703, 53696, 53696, 53704, number(16))
        dlcp = struct.pack(
            ">BBBBHHIHHIIQ",
            pick(0x11, 0x11, 0x11, 0x11, 0x12, 0x15, 0x21, number(8)),
            pick(0, 0, 0, 0x80, 0x40, number(8)),
            number(8),
            number(8),
            pick(1, 2, 3, 4, number(16)),
            pick(0, 1, 2, 5, 0xFFFF),
            pick(1, 1, 2, 0xFFFFFFFF),
            pick(7, 8),
            pick(0, 1),
            number(32),
            number(32),
            number(32) << 31,
        )
        udp = struct.pack(">HHHH", number(16), port, pick(40, 48, 1400, 39, number(16)), pick(0, number(16), 0xFFFF))
        head = struct.pack(
            ">BBHHHBBHII",
            version << 4 | ihl,
            number(8),
            number(16),
            number(16),
            fragment,
            pick(64, 2, 1, 0, number(8)),
            protocol,
            0,
            pick(0x0A000001, 0x0A000002, number(32)),
            destination,
        )
        value = checksum(head)
        if random.random() < 0.05:
            value = pick(0, 0xFFFF, number(16))
        head = head[:10] + value.to_bytes(2, "big") + head[12:]
        ether_type = pick(*([0x0800] * 9), 0x0806)
        if random.random() < 0.4:
            ether_type = 0x86DD
            next_header, hops = pick(17, 17, 17, 17, 17, 6, 58, 44), pick(64, 2, 1, 0, number(8))
            head = struct.pack(">IHBB", version_of_ipv6 << 28 | number(28), number(16), next_header, hops)
            for address in (NETWORK + number(2), destination_of_ipv6):
                head += address.to_bytes(16, "big")
        tag = struct.pack(">HH", 0x8100, number(16)) if random.random() < 0.2 else b""
        destination_mac = pick(0x020000000000 + number(3), number(48))
        packet = destination_mac.to_bytes(6, "big") + number(48).to_bytes(6, "big") + ether_type.to_bytes(2, "big")
        packet = packet[:12] + tag + packet[12:] + head + udp + dlcp + random.bytes(number(6))
        if random.random() < 0.15:
            packet = packet[: int(random.integers(len(packet)))]
        made.append(packet)
    return made
