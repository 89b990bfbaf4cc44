# SPDX-License-Identifier: Apache-2.0
"""GOAL files mean what LogGOPSim takes them to mean, and wrong ones are refused with line, rank and reason."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from dlcp.sim.graphs.graph import GraphBuilder
from dlcp.sim.scenario import TraceJob
from dlcp.sim.traces.goal import read_goal, write_goal
from dlcp.sim.traces.operations import GOAL_EAGER_BYTES, OperationKind, TraceFormatError, workload_graph
from tests.sim.traced_graphs import HOSTS, end_ps, graphs, step_of_ring

PING_PONG = """\
num_ranks 2  // two of them

rank 0 {
  l1: calc 1500
  l2: send 1440b to 1 tag 7
  l3: recv 1440b from 1 tag 8 cpu 1 nic 0
  l2 requires l1
  l4: calc 500
  l4 requires l3 /* a comment
  over lines */
}
rank 1 {
  l1: recv 1440b from 0 tag 7
  l2: send 1440b to 0 tag 8
  l2 requires l1
}
"""
ONE_WAY_PS = 2 * (1500 * 800 + 1_000_000)
"""Of a packet of 1,500 bytes over two links of 10 Gbit/s and 1 us."""


def parsed(text: str, path: Path = Path("job.goal")):
    return read_goal(path, text.encode())


def end_of(text: str, eager_bytes: int = GOAL_EAGER_BYTES, **settings) -> int:
    workload = parsed(text)
    workload.eager_bytes = eager_bytes
    return end_ps(workload_graph(workload, range(HOSTS), 0, TraceJob(name="t", file="", **settings)).graph)


def ranks(*bodies: str) -> str:
    blocks = "".join(f"rank {rank} {{\n{body}\n}}\n" for rank, body in enumerate(bodies))
    return f"num_ranks {len(bodies)}\n{blocks}"


def test_a_message_goes_to_and_fro():
    workload = parsed(PING_PONG)
    kinds = [operation.kind for operation in workload.ranks[0]]
    assert kinds == [OperationKind.COMPUTE, OperationKind.SEND, OperationKind.RECEIVE, OperationKind.COMPUTE]
    assert [operation.after for operation in workload.ranks[0]] == [[], [0], [], [2]]
    acknowledgement_ps = 64 * 800  # rank 1 sends it before its own message
    assert end_of(PING_PONG) == 1_500_000 + 2 * ONE_WAY_PS + acknowledgement_ps + 500_000


def test_a_small_send_ends_when_it_begins_and_a_large_one_when_it_has_arrived():
    text = ranks("s: send 1440b to 1\nc: calc 100000\nc requires s", "recv 1440b from 0")
    assert end_of(text) == 100_000_000
    assert end_of(text, eager_bytes=1439) == ONE_WAY_PS + 100_000_000


def test_a_large_send_waits_for_its_receive():
    text = ranks("send 1440b to 1", "c: calc 100000\nr: recv 1440b from 0\nr requires c")
    assert end_of(text) == 100_000_000
    assert end_of(text, eager_bytes=1439) == 100_000_000 + ONE_WAY_PS


def test_irequires_waits_for_the_beginning():
    later = "a: calc 3000\nb: calc 5000\nb requires a\nc: calc 4000 cpu 1\nc {} b"
    assert end_of(ranks(later.format("requires"))) == 12_000_000
    assert end_of(ranks(later.format("irequires"))) == 8_000_000


def test_calculations_of_a_processor_run_one_at_a_time():
    assert end_of(ranks("calc 3000\ncalc 4000")) == 7_000_000
    assert end_of(ranks("calc 3000\ncalc 4000 cpu 1")) == 4_000_000
    # The one that is ready first runs first, wherever it stands in the file.
    waiting = "c: calc 9000 cpu 1\na: calc 1000\na requires c\nb: calc 2000"
    assert end_of(ranks(waiting)) == 10_000_000


def test_computations_can_be_made_faster():
    assert end_of(ranks("calc 3000"), compute_factor=0.5) == 1_500_000


def test_messages_of_a_tag_belong_together_in_the_order_of_the_file():
    text = ranks(
        "send 9000b to 1 tag 1\nsend 1440b to 1 tag 2",
        "a: recv 1440b from 0 tag 2\nb: recv 9000b from 0 tag 1\nc: calc 1\nc requires a",
    )
    graph = workload_graph(parsed(text), range(2), 0).graph
    assert graph.nodes["size_bytes"].tolist() == [9000, 1440, 0]
    (after_small,) = graph.followers[graph.starts[1] : graph.starts[2]].tolist()
    assert after_small == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no num_ranks; the file is incomplete or not GOAL"),
        ("rank 0 {\n}", r"job\.goal:1: num_ranks has to come before the first rank"),
        ("num_ranks 0\n", r"job\.goal:1: num_ranks is 0; it must be from 1 to 65536"),
        ("num_ranks 2\nrank 0 {\ncalc 1\n}\n", "rank 1 of 2 has no block; the file is incomplete"),
        ("num_ranks 1\nrank 0 {\ncalc 1\n", "the file ends within rank 0: its block has no closing bracket"),
        ("num_ranks 1\nrank 1 {\n", r"job\.goal:2: there is no rank 1; num_ranks is 1"),
        ("num_ranks 1\nrank 0 {\n}\nrank 0 {\n}", r"job\.goal:4: rank 0 has two blocks"),
        ("num_ranks 1\n}", r"job\.goal:2: a closing bracket without an opening one"),
        ("num_ranks 1\n/* no end", "the file ends within a comment"),
        (ranks("jump 3"), r"job\.goal:3: rank 0: expected calc, send, recv, requires or irequires, got 'jump 3'"),
        (ranks("calc ten"), r"job\.goal:3: rank 0: expected `calc NANOSECONDS \[cpu N\]`, got 'calc ten'"),
        (ranks("send 10 to 1"), r"job\.goal:3: rank 0: expected `send BYTESb to RANK .*`, got 'send 10 to 1'"),
        (ranks("a: calc 1\na: calc 2"), r"goal:4: rank 0: the label 'a' is given twice, here and on line 3"),
        (ranks("load1: calc 1\nload1 requires load"), r"goal:4: .* the label 'load'; did you mean load1\?"),
        (ranks("a: send 10b to 2"), r"job\.goal:3: rank 0: send a: there is no rank 2; the ranks are 0 to 0"),
        (ranks("a: send 10b to 0"), r"job\.goal:3: rank 0: send a: a rank cannot exchange a message with itself"),
        (ranks("a: send 10b to 1", ""), r"job\.goal:3: rank 0: send a: rank 1 has no receive for it"),
        (ranks("", "b: recv 10b from 0 tag 4"), r"goal:6: rank 1: receive b: rank 0 sends 0 messages with tag 4"),
        (
            ranks("a: send 10b to 1", "b: recv 9b from 0"),
            r"receive b: it takes 9 bytes, but rank 0: send a .*10",
        ),
        (ranks("r: recv 1b from -1"), r"job\.goal:3: receive r takes any rank \(-1\), which depends on the network"),
        (ranks("r: recv 1b from 0 tag -1"), "takes any tag"),
        (ranks("a: calc 1\na requires a"), r"job\.goal:3: rank 0: compute a: it waits for itself"),
        (
            ranks("a: calc 1\nb: calc 1\na requires b\nb requires a"),
            r"wait for each other, so .*: rank 0: compute a \(job\.goal:3\) waits for rank 0: compute b",
        ),
        (
            ranks(*(f"r: recv 1b from {1 - rank}\ns: send 1b to {1 - rank}\ns requires r" for rank in range(2))),
            r"rank \d: receive r \(job\.goal:\d\) waits for rank \d: send s .* waits for rank \d: receive r",
        ),
        (
            ranks(
                *(f"s: send 70000b to {1 - rank}\nr: recv 70000b from {1 - rank}\nr requires s" for rank in range(2))
            ),
            "a send of more than 65535 bytes waits for its receive",
        ),
        (ranks("", ""), "no rank has an operation"),
        (ranks(f"calc {'9' * 5000}"), r"job\.goal:3: size has 5000 digits; at most 18 are possible"),
        (f"num_ranks {'9' * 5000}\n", "num_ranks has 5000 digits"),
        (ranks("s: send 40000000000000b to 1", "r: recv 40000000000000b from 0"), "40,000,000,000,000 bytes; at most"),
        (
            ranks("calc 9999999999999999"),
            "rank 0: compute without a label: it takes 1e\\+07 s; 0 to 2,305,843 s can be simulated",
        ),
    ],
)
def test_a_wrong_file_is_refused(text, message):
    with pytest.raises(TraceFormatError, match=message):
        workload_graph(parsed(text), range(2), 0)


def test_what_is_not_text_is_refused():
    with pytest.raises(TraceFormatError, match="byte 3 is not text"):
        read_goal(Path("job.goal"), b"num\xff")


# The binary form ------------------------------------------------------------------------------------------------------


def binary(*ranks_: list[tuple]) -> bytes:
    """Return a binary schedule: each operation is (kind, peer, size, tag, cpu, followers, begun followers)."""
    table_end = 6 + 16 * len(ranks_)
    table, bodies = b"", b""
    for operations in ranks_:
        waits = [0] * len(operations)
        for *_, followers, begun in operations:
            for each in (*followers, *begun):
                waits[each] += 1
        roots = [number for number, count in enumerate(waits) if not count]
        body = struct.pack(f"<II{len(roots)}I", len(operations), len(roots), *roots)
        appendix: list[int] = []
        for count, (kind, peer, size, tag, cpu, followers, begun) in zip(waits, operations, strict=True):
            body += struct.pack("<IBIQIBB", count, kind, peer, size, tag, cpu, 0)
            for each in (followers, begun):
                body += struct.pack("<II", len(each), len(appendix))
                appendix += each
        body += struct.pack(f"<{len(appendix)}I", *appendix)
        begin = table_end + len(bodies)
        table += struct.pack("<QQ", begin, begin + len(body))
        bodies += body
    return struct.pack("<QIBB", 4223, len(ranks_), 1, 1) + table + bodies


SEND, RECEIVE, CALC = 1, 2, 3
BINARY_PING_PONG = binary(
    [
        (CALC, 0, 1500, 0, 0, [1], []),
        (SEND, 1, 1440, 7, 0, [], []),
        (RECEIVE, 1, 1440, 8, 1, [3], []),
        (CALC, 0, 500, 0, 0, [], []),
    ],
    [(RECEIVE, 0, 1440, 7, 0, [1], []), (SEND, 0, 1440, 8, 0, [], [])],
)


def test_the_binary_form_is_the_same_job():
    text, read = parsed(PING_PONG), read_goal(Path("job.bin"), BINARY_PING_PONG)
    for mine, theirs in zip(text.operations(), read.operations(), strict=True):
        for name in ("kind", "after", "after_begin", "duration_ps", "processor", "peer", "size_bytes", "tag"):
            assert getattr(mine, name) == getattr(theirs, name), name


def test_a_binary_irequires_waits_for_the_beginning():
    read = read_goal(Path("job.bin"), binary([(CALC, 0, 3, 0, 0, [], [1]), (CALC, 0, 3, 0, 1, [], [])]))
    assert read.ranks[0][1].after_begin == [0]


@pytest.mark.parametrize("length", range(8, len(BINARY_PING_PONG), 7))
def test_an_incomplete_binary_file_is_refused(length):
    with pytest.raises(TraceFormatError, match=rf"the file ends after {length} bytes, within .*; it is incomplete"):
        read_goal(Path("job.bin"), BINARY_PING_PONG[:length])


def test_a_wrong_binary_file_is_refused():
    with pytest.raises(TraceFormatError, match=r"rank 0: operation 0 has the kind 9; 1, 2 and 3 are possible"):
        read_goal(Path("job.bin"), binary([(9, 0, 3, 0, 0, [], [])]))
    wrong = bytearray(binary([(CALC, 0, 3, 0, 0, [0], [])]))
    wrong[-4:] = struct.pack("<I", 5)
    with pytest.raises(TraceFormatError, match="operation 5 waits for operation 0, but the rank has 1"):
        read_goal(Path("job.bin"), bytes(wrong))


def test_a_binary_file_with_lost_dependencies_is_refused():
    wrong = bytearray(binary([(CALC, 0, 3, 0, 0, [1], []), (CALC, 0, 3, 0, 0, [], [])]))
    first_follower = 8 + 6 + 16 + 8 + 4 + 31 - 4
    assert wrong[first_follower - 4 : first_follower] == b"\1\0\0\0"
    wrong[first_follower] = 7
    with pytest.raises(TraceFormatError, match="operation 0 has dependencies beyond the 1 in the file"):
        read_goal(Path("job.bin"), bytes(wrong))
    wrong = bytearray(BINARY_PING_PONG)
    wrong[8 + 6 + 8] += 4
    with pytest.raises(TraceFormatError, match=r"rank 0 ends at byte \d+, but its operations do not end there"):
        read_goal(Path("job.bin"), bytes(wrong))


def test_the_longer_operations_of_loggopsim2_are_the_same_job():
    """They have 65 more bytes each, and the ends in the table of ranks are later."""
    content, longer, table = BINARY_PING_PONG[8:], b"", b""
    begin = 6 + 2 * 16
    for rank in range(2):
        first, end = struct.unpack_from("<QQ", content, 6 + 16 * rank)
        count, roots = struct.unpack_from("<II", content, first)
        at = first + 8 + 4 * roots
        nodes = b"".join(content[at + 39 * each : at + 39 * (each + 1)] + bytes(65) for each in range(count))
        body = content[first:at] + nodes + content[at + 39 * count : end]
        table += struct.pack("<QQ", begin, begin + len(body))
        begin, longer = begin + len(body), longer + body
    read = read_goal(Path("job.bin"), BINARY_PING_PONG[:14] + table + longer)
    for mine, theirs in zip(parsed(PING_PONG).operations(), read.operations(), strict=True):
        assert (mine.kind, mine.after, mine.size_bytes) == (theirs.kind, theirs.after, theirs.size_bytes)


def test_several_interfaces_of_a_rank_are_one_and_the_job_says_so():
    text = "a: send 9b to 1 nic 0\nb: send 9b to 1 tag 1 nic 3"
    note = parsed(ranks(text, "recv 9b from 0\nrecv 9b from 0 tag 1")).note
    assert note.startswith("1 ranks use up to 2 network interfaces (nic), which are simulated as one")
    assert not parsed(PING_PONG).note


# Writing --------------------------------------------------------------------------------------------------------------


def written(graph, folder: Path):
    path = folder / "job.goal"
    write_goal(graph, path)
    return path, read_goal(path, path.read_bytes())


def test_a_step_ends_at_the_same_picosecond_after_a_round_trip(tmp_path):
    graph = step_of_ring()
    _, workload = written(graph, tmp_path)
    assert end_ps(workload_graph(workload, range(HOSTS), 0).graph) == end_ps(graph)


@given(graph=graphs())
@settings(max_examples=60)
def test_all_messages_and_computations_are_written(graph, tmp_path_factory):
    path, workload = written(graph, tmp_path_factory.getbasetemp())
    again = workload_graph(workload, range(HOSTS), 0).graph
    for host in range(HOSTS):
        for column in ("source", "target"):
            sizes = [np.sort(each.nodes["size_bytes"][each.nodes[column] == host]) for each in (graph, again)]
            np.testing.assert_array_equal(sizes[0][sizes[0] > 0], sizes[1][sizes[1] > 0])
    assert again.nodes["delay_ps"].sum() == graph.nodes["delay_ps"].sum()
    text = path.read_text()
    write_goal(graph, path)
    assert path.read_text() == text


def test_a_delay_of_a_message_becomes_a_computation(tmp_path):
    builder = GraphBuilder()
    builder.messages(0, 1, 1440, transport=0, delay_ps=5_000_000)
    path, workload = written(builder.build(), tmp_path)
    assert "d0: calc 5000\n" in path.read_text()
    assert end_ps(workload_graph(workload, range(HOSTS), 0).graph) == 5_000_000 + ONE_WAY_PS


def test_what_a_trace_cannot_express_is_refused(tmp_path):
    builder = GraphBuilder()
    first, second = builder.messages([0, 2], [1, 3], 1440, transport=0)
    builder.follow(first, second)
    with pytest.raises(ValueError, match="node 1 waits for node 0: one is at host 2, the other at host 1"):
        write_goal(builder.build(), tmp_path / "job.goal")
    assert not (tmp_path / "job.goal").exists()
    empty = GraphBuilder()
    empty.delays(0)
    with pytest.raises(ValueError, match="nothing to write"):
        write_goal(empty.build(), tmp_path / "job.goal")


def test_only_traffic_between_nodes_crosses_the_network():
    text = ranks("send 1440b to 1", "r: recv 1440b from 0\ns: send 1440b to 2\ns requires r", "recv 1440b from 1")
    assert end_of(text) > 2 * ONE_WAY_PS
    assert end_of(text, ranks_per_node=2) == ONE_WAY_PS
    assert end_of(ranks("send 1440b to 1", "recv 1440b from 0", "calc 3"), ranks_per_node=2) == 3000
