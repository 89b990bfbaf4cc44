# SPDX-License-Identifier: Apache-2.0
"""The compiled DLCP program: generated text, plain and compiled, against a slow oracle of BMv2's semantics."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlcp.switch import DROP_PORT, Action, MemberRef, Program, ProgramError, UnknownNameError
from tests.switch import batches, leaf_traffic
from tests.switch import oracle as oracles

ROOT = Path(__file__).parents[2]
JSON = ROOT / "p4" / "build" / "dlcp.json"


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("numba")
    program = Program.load(JSON, backend="numba")
    leaf_traffic.populate(program)
    return program


@pytest.fixture
def plain():
    program = Program.load(JSON)
    leaf_traffic.populate(program)
    return program


def scenario(count, seed):
    """Packets with ports, times and depths, as a switch would pass them to the program."""
    random = np.random.default_rng(seed)
    now = 400_000 + np.cumsum(random.integers(0, 30, count))
    # A pause longer than a budget slot may idle, so that those of `occupy` and others can change hands.
    now[count // 2 :] += 2_000_000
    return leaf_traffic.packets(count, seed), random.integers(1, 7, count), now, random.integers(0, 64, count)


def occupy(owners, used):
    """Let every other budget slot belong to a message that nobody sends, since just now."""
    for slot in range(0, len(owners), 2):
        owners[slot], used[slot] = 0xFFFF0001, 390_000


SLOTS = "DlcpIngress.selective_drop."


def test_program_equals_oracle(plain):
    oracle = oracles.Oracle(JSON)
    leaf_traffic.populate_oracle(oracle)
    for registers in (plain.registers, oracle.registers):
        occupy(registers[f"{SLOTS}slot_owner"], registers[f"{SLOTS}slot_used_us"])
    packets, ports, now, depths = scenario(4000, 1)
    forwarded = 0
    for number, (packet, port, us, depth) in enumerate(
        zip(packets, ports.tolist(), now.tolist(), depths.tolist(), strict=True)
    ):
        buffer = bytearray(packet)
        out, priority, carry = plain.ingress(buffer, port, us)
        expected, expected_priority, state = oracle.ingress(packet, port, us)
        assert (out, priority) == (expected, expected_priority), f"packet {number}: {packet.hex()}"
        if out == DROP_PORT:
            continue
        sent = plain.egress(buffer, carry, out, us, 5, depth + 1, depth, us + 5)
        wanted = oracle.egress(state, out, us, 5, depth + 1, depth, us + 5)
        assert sent == len(wanted or b"")
        if wanted is not None:
            forwarded += 1
            assert buffer[:sent].hex() == wanted.hex(), f"packet {number}: {packet.hex()}"
    for name, values in oracle.registers.items():
        assert plain.registers[name].values().tolist() == values, name
    for name, values in oracle.counters.items():
        assert plain.counters[name].values().tolist() == values, name
    # The scenario has to reach what it is there for: every event of ingress, marks in egress.
    ingress = plain.counters["ingress_events"].values()[:, 0].reshape(-1, 8).sum(0)
    assert (ingress > 0).all(), ingress
    assert plain.counters["egress_events"].values()[1::8, 0].sum() > 10
    assert 1000 < forwarded < 4000


def batch(program, packets, ports, now, depths):
    rows = np.zeros((len(packets), 192), np.uint8)
    lengths = np.array([len(packet) for packet in packets])
    for row, packet in zip(rows, packets, strict=True):
        row[: len(packet)] = np.frombuffer(packet, np.uint8)
    out, priorities, carry = batches.ingress(program, rows, lengths, ports, now)
    kept = np.flatnonzero(out != DROP_PORT)
    through = np.ascontiguousarray(rows[kept])
    sent = batches.egress(
        program,
        through,
        lengths[kept],
        carry[kept],
        out[kept],
        now[kept],
        5,
        depths[kept] + 1,
        depths[kept],
        now[kept] + 5,
    )
    return out, priorities, kept, through, sent


def test_compiled_equals_plain(plain, compiled):
    compiled.reset_state()
    for program in (plain, compiled):
        occupy(program.registers["slot_owner"], program.registers["slot_used_us"])
    for seed in (2, 3):
        inputs = scenario(3000, seed)
        if seed == 3:
            inputs = (*inputs[:2], inputs[2] + 60_000_000, inputs[3])
        for left, right in zip(batch(plain, *inputs), batch(compiled, *inputs), strict=True):
            np.testing.assert_array_equal(left, right)
    left, right = plain.snapshot(), compiled.snapshot()
    for name in left.registers:
        np.testing.assert_array_equal(left.registers[name], right.registers[name], err_msg=name)
    for name in left.counters:
        np.testing.assert_array_equal(left.counters[name], right.counters[name], err_msg=name)
    assert left.counters["ingress_events"].sum() > 0
    assert left.registers["DlcpIngress.selective_drop.slot_spent"].sum() > 0


def test_batch_equals_one_by_one(plain):
    packets, ports, now, depths = scenario(300, 4)
    out, priorities, kept, through, sent = batch(plain, packets, ports, now, depths)
    other = Program.load(JSON)
    leaf_traffic.populate(other)
    results = []
    buffers = [bytearray(packet) for packet in packets]
    for buffer, port, us in zip(buffers, ports.tolist(), now.tolist(), strict=True):
        results.append(other.ingress(buffer, port, us))
    assert out.tolist() == [item[0] for item in results]
    assert priorities.tolist() == [item[1] for item in results]
    for row, index, was_sent in zip(through, kept, sent, strict=True):
        us, depth = int(now[index]), int(depths[index])
        port, _, carry = results[index]
        assert other.egress(buffers[index], carry, port, us, 5, depth + 1, depth, us + 5) == was_sent
        assert bytes(row[: len(buffers[index])]) == bytes(buffers[index])


def test_one_packet_through_the_compiled_back_end(compiled, plain):
    compiled.reset_state()
    for packet in leaf_traffic.packets(50, 5):
        left, right = bytearray(packet), bytearray(packet)
        expected = plain.ingress(left, 1, 10**8)
        assert compiled.ingress(right, 1, 10**8)[:2] == expected[:2]
        if expected[0] != DROP_PORT:
            compiled_carry = tuple(expected[2])
            arguments = (expected[0], 10**8, 1, 0, 0, 10**8)
            assert plain.egress(left, expected[2], *arguments) == compiled.egress(right, compiled_carry, *arguments)
            assert left == right


def test_changes_are_seen_without_compiling_again(plain, compiled):
    packet = next(p for p in leaf_traffic.packets(500, 6) if p[12:14] == b"\x08\x06" and len(p) > 20)
    match = {"ethernet_dst": int.from_bytes(packet[:6], "big")}
    for program in (plain, compiled):
        table = program.tables["ethernet_route"]
        if table.get(match) is not None:
            table.delete(match)
        assert program.ingress(bytearray(packet), 1, 10**9)[0] == DROP_PORT
        table.insert(match, Action("to_port", {"port": 42}))
        assert program.ingress(bytearray(packet), 1, 10**9)[0] == 42
        table.modify(match, Action("to_port", {"port": 43}))
        assert program.ingress(bytearray(packet), 1, 10**9)[0] == 43
        table.delete(match)
        assert program.ingress(bytearray(packet), 1, 10**9)[0] == DROP_PORT


def test_a_change_of_routes_is_seen(plain, compiled):
    to_host = (0x0A000004).to_bytes(4, "big")
    made = (p for p in leaf_traffic.packets(500, 7) if p[12:14] == b"\x08\x00" and p[30:34] == to_host)
    packet = next(p for p in made if plain.ingress(bytearray(p), 1, 10**9)[0] == 4)
    for program in (plain, compiled):
        host = {"ipv4_dst": (int.from_bytes(packet[30:34], "big"), 32)}
        program.profiles["route_selector"].modify_member(4, Action("to_next_hop", {"port": 33, "mac": 7}))
        assert program.ingress(bytearray(packet), 1, 10**9)[0] == 33
        program.tables["ipv4_route"].modify(host, MemberRef(2))
        assert program.ingress(bytearray(packet), 1, 10**9)[0] == 2
        program.profiles["route_selector"].modify_member(4, Action("to_next_hop", {"port": 4, "mac": 0x020000000004}))
        program.tables["ipv4_route"].modify(host, MemberRef(4))
        assert program.ingress(bytearray(packet), 1, 10**9)[0] == 4


def test_state_can_be_read_written_and_reset(plain):
    depth, events = plain.registers["queue_depth"], plain.counters["ingress_events"]
    depth[9] = 77
    assert depth[9] == 77
    assert depth.values()[9] == 77
    events[3] = (2, 300)
    assert events[3].packets == 2
    assert events.values()[3].tolist() == [2, 300]
    plain.reset_state()
    assert depth[9] == 0
    assert events[3] == (0, 0)
    with pytest.raises(ValueError, match="cells of 19 bits"):
        depth[0] = 1 << 19
    with pytest.raises(ValueError, match="has no cell 512; the last is 511"):
        depth[512] = 1


def test_clear_entries_leaves_an_empty_switch(plain):
    plain.clear_entries()
    assert not any(len(table) for table in plain.tables.values())
    assert not plain.profiles["route_selector"].members()
    assert all(plain.ingress(bytearray(p), 1, 10**9)[0] == DROP_PORT for p in leaf_traffic.packets(100, 8))
    leaf_traffic.populate(plain)
    assert any(plain.ingress(bytearray(p), 1, 10**9)[0] != DROP_PORT for p in leaf_traffic.packets(100, 8))


def test_names_may_be_short_and_wrong_ones_are_explained(plain):
    assert plain.tables["DlcpIngress.route.ipv4_route"] is plain.tables["ipv4_route"]
    with pytest.raises(UnknownNameError, match=r"no table 'ipv4_rout'; did you mean DlcpIngress\.route\.ipv4_route "):
        plain.tables["ipv4_rout"]
    with pytest.raises(KeyError):
        plain.counters["events"]


def test_a_missing_back_end_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ProgramError, match=r"pip install 'dlcp\[switch\]'"):
        Program.load(JSON, backend="numba")
    with pytest.raises(ProgramError, match="choose python or numba"):
        Program.load(JSON, backend="c")


@pytest.mark.parametrize("mode", [0o700, 0o770])
def test_compiled_code_is_kept_only_where_nobody_else_writes(mode, tmp_path, monkeypatch):
    from dlcp.switch import cache_directory

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "dlcp" / "switch"
    path.mkdir(parents=True)
    path.chmod(mode)
    assert cache_directory() == (path if mode == 0o700 else None)


def test_old_programs_do_not_pile_up_on_disk(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    from dlcp.switch.executor import program as back_end

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(back_end.KEPT_PROGRAMS + 3):
        assert number == back_end.load_compiled(f"CACHE = False\nVALUE = {number}\n").VALUE
    directory = back_end.cache_directory()
    assert len(list(directory.glob("dlcp_program_*.py"))) == back_end.KEPT_PROGRAMS
    assert all("CACHE = True" in path.read_text() for path in directory.glob("dlcp_program_*.py"))


CHECKED = """
from tests.switch import leaf_traffic, test_program
from dlcp.switch import Program
program = Program.load(test_program.JSON, backend="numba")
leaf_traffic.populate(program)
print(test_program.batch(program, *test_program.scenario(1500, 9))[0].sum())
"""


def test_compiled_text_stays_within_its_arrays(plain, tmp_path):
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECKED],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == batch(plain, *scenario(1500, 9))[0].sum()
