# SPDX-License-Identifier: Apache-2.0
"""A host's gain from forging its packets: none, on a port or in a job that is policed.

A victim sends over a port of 10 Mbit/s through the built-in switch, its real queues and a clock that the test moves.
Then somebody floods the same port at twice its rate. Goodput and delay of the victim are compared.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from dlcp.switch import PortQueueing, Program, Switch
from dlcp.wire import dscp
from tests.packet import stf
from tests.switch.fake_program import FakePorts

PROGRAM = Path(__file__).resolve().parents[2] / "p4" / "build" / "dlcp.json"
VICTIM_PORT, TENANT_PORT, STRANGER_PORT, OUT_PORT = 1, 2, 9, 3
RATE_BPS = 10_000_000
TICK_US = 200
DURATION_US = 400_000
FRAME_BYTES = 1000
FRAME_US = FRAME_BYTES * 8 * 1_000_000 // RATE_BPS
VICTIM_EVERY_US, CONTROL_EVERY_US, FLOOD_EVERY_US = 2_000, 10_000, 400
"""4 Mbit/s of gradients, a control packet now and then, and 20 Mbit/s of flood."""
DRAIN_US = 100_000

ENTRIES = f"""
add port_trust ig_port:{VICTIM_PORT} trust()
add port_trust ig_port:{TENANT_PORT} trust()
member route_selector 3 to_next_hop(port:{OUT_PORT}, mac:02:00:00:00:00:03)
add ipv4_route ipv4_dst:10.0.0.3/32 member 3
# Job 8 has a tenth of the port for its data and a hundredth for its control packets.
add job_share job:8 control:0 eg_port:{OUT_PORT} metered()
meter_set_rates job_share job:8 control:0 eg_port:{OUT_PORT} 125000:4000 125000:4000
add job_share job:8 control:1 eg_port:{OUT_PORT} metered()
meter_set_rates job_share job:8 control:1 eg_port:{OUT_PORT} 12500:2000 12500:2000
"""
THRESHOLDS = "".join(f"add drop_threshold queue:5 drop_class:{n} drop_above(depth:{40 - 4 * n})\n" for n in range(1, 8))
KNOWN_JOBS = """
add classify 1 set_class(queue:0, drop_class:0)
add classify 2 job:7 as_tagged()
add classify 2 job:8 as_tagged()
"""


def packet(source: int, fields: str, *, udp: str = "", size: int = FRAME_BYTES) -> bytes:
    payload = "00" * (size - 74)
    return stf.frame(f"ethernet() ipv4(src=10.0.0.{source}, dst=10.0.0.3) udp({udp}) dlcp({fields}) {payload}").value


@dataclass
class Service:
    """The victim's goodput and delay."""

    sent: int
    arrived: int
    delay_mean_us: float
    delay_max_us: int
    control_delay_max_us: int
    flood_arrived: int


def serve(flood: bytes | None = None, port: int = STRANGER_PORT, more: str = "") -> Service:
    """Send the victim's packets, and a flood if there is one; return what arrived when."""
    program = Program.load(PROGRAM)
    for statement in stf.parse(f"{ENTRIES}{THRESHOLDS}{more}packet 0 00\n").statements[:-1]:
        getattr(stf.BuiltIn(program), statement.method)(*statement.arguments)
    now = [10**12]
    ports = FakePorts(VICTIM_PORT, TENANT_PORT, STRANGER_PORT, OUT_PORT)
    switch = Switch(program, [ports], {OUT_PORT: PortQueueing(rate_bps=RATE_BPS)}, clock=lambda: now[0])
    sent: dict[bytes, int] = {}
    delays: dict[bytes, int] = {}
    flood_arrived = 0
    try:
        for time_us in range(0, DURATION_US + DRAIN_US, TICK_US):
            now[0] += TICK_US * 1000
            if time_us < DURATION_US:
                if flood is not None and time_us % FLOOD_EVERY_US == 0:
                    ports.come_in(port, [bytearray(flood)])
                for every_us, fields, size in (
                    (VICTIM_EVERY_US, "job=7, queue=5, drop_class=3, budget=20", FRAME_BYTES),
                    (CONTROL_EVERY_US, "type=5, job=7, queue=7", 100),
                ):
                    if time_us % every_us == 0:
                        data = packet(1, f"{fields}, step={time_us}, index={time_us}", size=size)
                        sent[data[46:]] = time_us  # what no switch changes
                        ports.come_in(VICTIM_PORT, [bytearray(data)])
            switch.turn(0)
            for out_port, data in ports.sent:
                assert out_port == OUT_PORT
                if data[46:] in sent:
                    delays[data[46:]] = time_us - sent[data[46:]]
                else:
                    flood_arrived += 1
            ports.sent.clear()
    finally:
        switch.close()
    control = [delay for data, delay in delays.items() if len(data) < 100]
    data_delays = [delay for data, delay in delays.items() if len(data) >= 100]
    total = sum(len(data) >= 100 for data in sent)
    mean_us = sum(data_delays) / len(data_delays) if data_delays else float("inf")
    never = DURATION_US
    return Service(
        total, len(data_delays), mean_us, max(data_delays, default=never), max(control, default=never), flood_arrived
    )


@pytest.fixture(scope="module")
def before() -> Service:
    alone = serve()
    assert alone.arrived == alone.sent == DURATION_US // VICTIM_EVERY_US
    return alone


def unharmed(service: Service, before: Service) -> None:
    """The victim lost nothing, and waited for one packet more at most: the one that was on the line already."""
    assert service.arrived == before.arrived
    assert service.delay_max_us <= before.delay_max_us + FRAME_US + TICK_US
    assert service.control_delay_max_us <= before.control_delay_max_us + FRAME_US + TICK_US


def test_a_flood_that_is_believed_starves_the_victim(before):
    """The tests below could fail: this is what happens without police."""
    service = serve(packet(2, "queue=7, protected=1, job=99"), TENANT_PORT)
    assert service.arrived < 0.2 * before.arrived or service.delay_max_us > 20 * before.delay_max_us


@pytest.mark.parametrize(
    ("fields", "udp"),
    [
        ("queue=7, protected=1, job=7", ""),
        ("queue=7, type=5, job=7", ""),
        ("queue=7, retransmission=1, job=8", ""),
        ("queue=5, drop_class=7, budget=0, job=7", ""),
        ("queue=5, drop_class=7, budget=65535, job=7", ""),
        ("queue=7, version=2, protected=1, job=7", ""),
        ("queue=7, version=0, job=7", ""),
        ("queue=7, protected=1, job=7", "length=39, checksum=0"),
        ("queue=7, protected=1, job=7", "dst=53704"),
    ],
)
def test_a_port_that_is_not_trusted_starves_nobody(fields, udp, before):
    service = serve(packet(9, fields, udp=udp), STRANGER_PORT)
    unharmed(service, before)
    assert service.flood_arrived > 0, "what is left of the port is for everybody"


@pytest.mark.parametrize(
    "fields",
    [
        "queue=7, protected=1, job=8",
        "queue=7, retransmission=1, job=8",
        "queue=7, type=5, job=8",
        "queue=6, drop_class=0, job=8",
        "queue=6, drop_class=7, budget=0, job=8",
    ],
)
def test_a_job_over_its_share_starves_nobody(fields, before):
    service = serve(packet(2, fields), TENANT_PORT)
    assert service.arrived == before.arrived
    # Its share is its own, bursts included; beyond it nothing comes before the victim.
    burst_us = 4 * FRAME_US
    assert service.delay_max_us <= before.delay_max_us + burst_us + FRAME_US + TICK_US
    assert service.delay_mean_us <= before.delay_mean_us + 1.2 * FRAME_US


@pytest.mark.parametrize("version", [0, 2, 15])
def test_another_version_is_ordinary_traffic_even_from_a_trusted_port(version, before):
    unharmed(serve(packet(2, f"queue=7, protected=1, version={version}, job=8"), TENANT_PORT), before)


@pytest.mark.parametrize("port", [STRANGER_PORT, TENANT_PORT])
@pytest.mark.parametrize("layers", ["udp(dst=9)", "tcp(dst=80)"])
def test_a_forged_dscp_on_other_traffic_gains_nothing(port, layers, before):
    """The most urgent DSCP that hosts give gradients; the program goes by the DLCP header alone."""
    urgent = dscp(7, False)
    text = f"ethernet() ipv4(src=10.0.0.9, dst=10.0.0.3, dscp={urgent}) {layers} {'00' * (FRAME_BYTES - 60)}"
    service = serve(stf.frame(text).value, port)
    unharmed(service, before)
    assert service.flood_arrived > 0


def test_a_job_that_nobody_registered_starves_nobody_where_jobs_are_named(before):
    flood = packet(2, "queue=7, protected=1, job=99")
    unharmed(serve(flood, TENANT_PORT, KNOWN_JOBS), before)
    unharmed(serve(packet(2, "type=5, queue=7, job=99"), TENANT_PORT, KNOWN_JOBS), before)


# ------------------------------------------------------------------------------------------------------------- budgets

DEEP = "register_write queue_depth(3,5) 60\n"
MESSAGE = "queue=5, drop_class=6, job=7, step=1"


def run(text: str) -> stf.StfOutcome:
    return stf.run(stf.parse(f"{ENTRIES}{THRESHOLDS}{text}"), stf.BuiltIn(Program.load(PROGRAM)))


def lines(port: int, fields: str, came: bool) -> str:
    sent = f"packet {port} ethernet() ipv4(src=10.0.0.1, dst=10.0.0.3) udp() dlcp({fields})\n"
    return DEEP + sent + (f"expect {OUT_PORT}\n" if came else "no_packet\n")


def test_a_message_loses_no_more_than_its_own_budget_whatever_others_claim():
    own = f"{MESSAGE}, budget=3"
    forged = f"{MESSAGE}, budget=65535"
    text = lines(1, own, False) + lines(2, forged, False) * 5
    # Five forged packets were dropped in its name: they took from its budget, and none of its own is dropped any more.
    text += lines(1, own, True) * 20
    outcome = run(text)
    assert outcome.failures == []


def test_a_stranger_spends_nobodys_budget_and_takes_nobodys_slot():
    text = lines(STRANGER_PORT, f"{MESSAGE}, budget=65535", True) * 5
    text += lines(1, f"{MESSAGE}, budget=2", False) * 2 + lines(1, f"{MESSAGE}, budget=2", True)
    outcome = run(text)
    assert outcome.failures == []


def test_a_slot_that_another_message_holds_protects_and_is_kept():
    """Job 7, step 0 and step 26501 want one slot; who comes second is not dropped, and cannot take it over."""
    first, second = "queue=5, drop_class=6, job=7", "queue=5, drop_class=6, job=7, step=26501"
    text = lines(1, f"{first}, budget=2", False) + lines(2, f"{second}, budget=65535", True) * 5
    text += lines(1, f"{first}, budget=2", False) + lines(1, f"{first}, budget=2", True)
    outcome = run(text)
    assert outcome.failures == []
