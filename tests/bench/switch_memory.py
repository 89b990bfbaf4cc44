# SPDX-License-Identifier: Apache-2.0
"""Packets a second through the built-in switch's program in memory: ingress and egress of a DLCP packet, one thread.

A leaf switch: 16 hosts below, 4 equal-cost ports to the spine, 128 hosts behind them, 8 jobs of which half have a
metered share, thresholds for every queue and drop class. Half of the packets stay in the rack, half are sprayed over
the spine; the queues are deep enough at times that some packets are marked or dropped.
"""

import argparse
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlcp.bench import BenchResult, result
from dlcp.switch import DROP_PORT, Action, GroupRef, MeterConfig, Program, udp_headers
from dlcp.wire import UDP_PORT_BASE
from tests.bench.harness import Benchmark, int_option
from tests.switch import batches

PROGRAM = Path(__file__).parents[2] / "p4" / "build" / "dlcp.json"
HOSTS, RACKS, UPLINKS, JOBS = 16, 9, 4, 8
FRAME_BYTES = 1442
UDP_END = 42
STRIDE = 1536
START_US = 10_000_000
BURST, BATCH = 64, 256


def populate(program: Program) -> None:
    """Write the entries of a leaf switch."""
    tables, profile = program.tables, program.profiles["route_selector"]
    for port in range(1, HOSTS + 1):
        tables["port_trust"].insert({"ig_port": port}, Action("trust"))
        profile.add_member(port, Action("to_next_hop", {"port": port, "mac": 0x020000000000 + port}))
        profile.add_group(port, [port])
        tables["ipv4_route"].insert({"ipv4_dst": (0x0A000000 + port, 32)}, GroupRef(port))
    uplinks = [1000 + i for i in range(UPLINKS)]
    for i, member in enumerate(uplinks):
        profile.add_member(member, Action("to_next_hop", {"port": HOSTS + 1 + i, "mac": 0x02FF00000000 + i}))
    profile.add_group(1000, uplinks)
    for rack in range(1, RACKS):
        tables["ipv4_route"].insert({"ipv4_dst": (0x0A000000 + (rack << 8), 24)}, GroupRef(1000))
    share = MeterConfig(cir=1_250_000_000, cburst=1_500_000, pir=1_250_000_000, pburst=1_500_000)
    for job in range(1, JOBS + 1, 2):
        for port in range(1, HOSTS + UPLINKS + 1):
            match = {"job": job, "control": 0, "eg_port": port}
            tables["job_share"].insert(match, Action("metered"))
            tables["job_share"].set_meter(match, share)
    for queue in range(8):
        tables["ecn_threshold"].insert({"queue": queue}, Action("mark_above", {"depth": 48}))
        for drop_class in range(1, 8):
            limit = Action("drop_above", {"depth": 64 - 4 * drop_class})
            tables["drop_threshold"].insert({"queue": queue, "drop_class": drop_class}, limit)
    tables["classify"].insert({"job": (1, 0xFFFF), "type": (1, 0xF), "queue": (6, 7)}, Action("as_tagged"), priority=2)


def data_packets(count: int, seed: int = 1) -> list[bytes]:
    """Make DLCP data packets from the hosts of the rack, half of them for hosts of any rack."""
    random = np.random.default_rng(seed)

    def draw(least: int, most: int) -> int:
        return int(random.integers(least, most + 1))

    packets = []
    for index in range(count):
        source = draw(1, HOSTS)
        rack = draw(0, RACKS - 1) if random.random() < 0.5 else 0
        target = f"10.0.{rack}.{draw(1, HOSTS)}"
        headers = udp_headers(
            f"02:00:00:00:00:{source:02x}",
            "02:00:00:00:00:fe",
            f"10.0.0.{source}",
            target,
            40000 + source,
            UDP_PORT_BASE,
            2,
            FRAME_BYTES - UDP_END,
        )
        dlcp = struct.pack(
            ">BBBBHHIHHIIQ",
            *(0x11, 0, draw(2, 6) << 5 | draw(0, 7) << 2, draw(0, 255), draw(1, JOBS)),
            *(40, index >> 12, draw(0, 63), source, index, count, 0x1234),
        )
        packets.append((headers + dlcp).ljust(FRAME_BYTES, b"\0"))
    return packets


def run_plain(program: Program, packets: list[bytes]) -> float:
    """Return packets a second, one after the other, in bursts that have just been received."""
    program.reset_state()
    depths = np.random.default_rng(2).integers(0, 56, len(packets)).tolist()
    ingress, egress = program.ingress, program.egress
    now, taken = START_US, 0.0
    for start in range(0, len(packets), BURST):
        buffers = [bytearray(packet) for packet in packets[start : start + BURST]]
        started = time.perf_counter()
        for packet, depth in zip(buffers, depths[start : start + BURST], strict=True):
            now += 7
            port, _, carry = ingress(packet, packet[11], now)
            if port != DROP_PORT:
                egress(packet, carry, port, now, 3, depth, depth, now)
        taken += time.perf_counter() - started
    return len(packets) / taken


def run_batch(program: Program, packets: list[bytes]) -> float:
    """Return packets a second in batches that have just been received."""
    program.reset_state()
    count = len(packets) // BATCH * BATCH
    frames = np.frombuffer(b"".join(packets[:count]), np.uint8).reshape(count, FRAME_BYTES)
    buffer: NDArray[np.uint8] = np.zeros((BATCH, STRIDE), np.uint8)
    lengths, ports = np.full(BATCH, FRAME_BYTES), frames[:, 11].astype(np.int64)
    depths, now = np.random.default_rng(2).integers(0, 56, count), START_US + np.arange(count) * 7
    taken = 0.0
    for start in range(0, count, BATCH):
        rows = slice(start, start + BATCH)
        buffer[:, :FRAME_BYTES] = frames[rows]
        started = time.perf_counter()
        out, _, carry = batches.ingress(program, buffer, lengths, ports[rows], now[rows])
        # Rows that were dropped go through egress too: choosing rows costs more than running them.
        out = np.where(out == DROP_PORT, 0, out)
        batches.egress(program, buffer, lengths, carry, out, now[rows], 3, depths[rows], depths[rows], now[rows])
        taken += time.perf_counter() - started
    return count / taken


def _switch_memory(arguments: argparse.Namespace) -> list[BenchResult]:
    packets = data_packets(arguments.packets)
    contenders: dict[str, Callable[[], float]] = {}
    if arguments.backend in ("python", "both"):
        plain = Program.load(PROGRAM)
        populate(plain)
        contenders["switch.memory.python"] = lambda: run_plain(plain, packets)
    if arguments.backend in ("numba", "both"):
        compiled = Program.load(PROGRAM, backend="numba")
        populate(compiled)
        contenders["switch.memory.numba"] = lambda: run_batch(compiled, packets)
    samples = arguments.turns.take(contenders)
    return [result(name, "packets/s", values, smaller_is_better=False) for name, values in samples.items()]


BENCHMARK = Benchmark(
    _switch_memory,
    {
        "--packets": int_option(20_000, "of a round"),
        "--backend": {"choices": ("python", "numba", "both"), "default": "both", "help": "(default: both)"},
    },
    rounds=7,
    warm_up=1,
)
