# SPDX-License-Identifier: Apache-2.0
"""Chakra traces mean what ASTRA-sim takes them to mean; wrong ones are refused with file, node and reason."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings

from dlcp.sim.graphs.graph import GraphBuilder
from dlcp.sim.traces import chakra
from dlcp.sim.traces.chakra import rank_files, read_chakra, write_chakra
from dlcp.sim.traces.operations import TraceFormatError, check_workload, workload_graph
from tests.sim.traced_graphs import HOSTS, end_ps, graphs, step_of_ring

MEMORY, COMPUTE, SEND, RECEIVE, COLLECTIVE = 2, 4, 5, 6, 7
HEAD = b"\x07\x0a\x050.0.4"
"""GlobalMetadata with a version, as the generators of public traces write it."""


def node(number: int, kind: int, *after: int, ctrl: tuple = (), micros: int = 0, name: str = "n", values="", **attrs):
    """Return a node as it stands in a file, length first."""
    made = chakra._Node(id=number, name=name, type=kind, data_deps=after, ctrl_deps=ctrl, duration_micros=micros)
    made.attr.extend(chakra._attribute(key, value) for key, value in attrs.items())
    if values:
        made.inputs.values = values
    content = made.SerializeToString()
    assert len(content) < 128 or values
    return chakra_length(len(content)) + content


def chakra_length(size: int) -> bytes:
    return bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])


def trace(folder: Path, *ranks: bytes) -> list[Path]:
    for rank, nodes in enumerate(ranks):
        (folder / f"job.{rank}.et").write_bytes(HEAD + nodes)
    return rank_files(folder / "job.0.et")


def graph_of(files, **more):
    workload = read_chakra(files, **more)
    return workload_graph(workload, range(len(workload.ranks)), 0).graph


def test_a_public_generators_bytes_are_understood(tmp_path):
    """These are the bytes of ASTRA-sim's microbenchmark of an all-reduce of 1 MB over two ranks."""
    content = bytes.fromhex(
        "120c616c6c5f7265647563655f321807520e0a0969735f6370755f6f70d80100520d0a09636f6d6d5f747970654800"
        "520f0a09636f6d6d5f73697a6548808040"
    )
    content = chakra_length(len(content)) + content
    workload = read_chakra(trace(tmp_path, content, content))
    (operation,) = workload.ranks[1]
    assert (operation.collective, operation.size_bytes, operation.group) == ("all_reduce", 1 << 20, (0, 1))


@pytest.mark.parametrize(
    ("number", "sent"),
    [(0, 2 * 3), (1, 3), (2, 3 * 4), (3, 3), (4, 3 / 4), (5, 3), (6, 3), (7, 3), (8, 3), (9, 0)],
    ids=[
        "all_reduce",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "broadcast",
        "all_to_all",
        "reduce_scatter",
        "block",
        "barrier",
    ],
)
def test_collectives_send_what_they_have_to(tmp_path, number, sent):
    part = node(3, COLLECTIVE, comm_type=number, comm_size=40_000)
    graph = graph_of(trace(tmp_path, *[part] * 4))
    assert graph.nodes["size_bytes"].sum() == pytest.approx(sent * 40_000, abs=10)
    assert end_ps(graph) > 0


def test_the_root_of_a_broadcast_sends(tmp_path):
    part = node(3, COLLECTIVE, comm_type=5, comm_size=40_000, comm_root=2)
    graph = graph_of(trace(tmp_path, part, part, part))
    assert set(graph.nodes["source"][graph.nodes["size_bytes"] > 0].tolist()) == {2}


def test_nodes_wait_for_data_and_for_control(tmp_path):
    nodes = node(5, COMPUTE, micros=3) + node(6, COMPUTE, 5, micros=4) + node(7, MEMORY, ctrl=(6,), micros=5)
    assert end_ps(graph_of(trace(tmp_path, nodes + node(8, 1, 7)))) == 12_000_000


def test_callers_are_not_waited_for(tmp_path):
    """Nodes from PyTorch name their caller as a control dependency, also one that was left out, or themselves."""
    nodes = node(5, COMPUTE, micros=3, rf_id=1, ctrl=(5,)) + node(6, COMPUTE, micros=4, is_cpu_op=True, ctrl=(2,))
    assert end_ps(graph_of(trace(tmp_path, nodes))) == 4_000_000


def test_a_processor_computes_one_thing_at_a_time(tmp_path):
    nodes = node(1, COMPUTE, micros=3) + node(2, COMPUTE, micros=4) + node(3, COMPUTE, micros=5, is_cpu_op=True)
    assert end_ps(graph_of(trace(tmp_path, nodes))) == 7_000_000


def test_the_call_of_a_collective_is_a_computation(tmp_path):
    nodes = node(1, COLLECTIVE, micros=3, is_cpu_op=True)
    assert end_ps(graph_of(trace(tmp_path, nodes))) == 3_000_000


def test_operations_become_time_at_a_given_rate(tmp_path):
    files = trace(tmp_path, node(1, COMPUTE, num_ops=2_000_000, tensor_size=8))
    assert end_ps(graph_of(files, flops=1e12)) == 2_000_000
    with pytest.raises(TraceFormatError, match=r"node 1 \(n\): it has no duration, but 2000000 operations"):
        read_chakra(files)


def test_groups_are_listed_in_the_trace_or_by_the_caller(tmp_path):
    listed = '["[{\\"pg_name\\": \\"4\\", \\"ranks\\": [0, 2]}]"]'.replace('\\"', '"')
    init = node(1, 1, name="## process_group:init ##", values=listed)
    part = node(2, COLLECTIVE, comm_type=0, comm_size=8, pg_name="4")
    files = trace(tmp_path, init + part, init, init + part)
    assert {each.group for each in read_chakra(files).operations() if each.group} == {(0, 2)}
    files = trace(tmp_path, part, b"", part)
    assert {each.group for each in read_chakra(files, groups={"4": (0, 2)}).operations()} == {(0, 2)}
    with pytest.raises(TraceFormatError, match=r"0\.et: node 2 .* which ranks are in its process group '4'$"):
        read_chakra(files)


def test_files_may_be_compressed(tmp_path):
    path = tmp_path / "job.0.et"
    path.write_bytes(gzip.compress(HEAD + node(1, COMPUTE, micros=3)))
    assert end_ps(graph_of([path])) == 3_000_000


PART = node(3, COLLECTIVE, comm_type=0, comm_size=40)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([b"\x05abc"], r"job\.0\.et: byte 8: message 1 has 5 bytes, but only 3 follow; the file is incomplete"),
        ([b"\xff\xff\xff\xff\xff\xff"], r"byte 8: this is not the length of message 1"),
        ([b"\x03\x0f\x0f\x0f"], r"byte 8: message 1 is not a Chakra Node"),
        ([node(1, 0)], r"node 1 \(n\): its type is 0; 1 to 7 are possible"),
        ([node(1, COMPUTE, 9, micros=1)], r"node 1 \(n\): it waits for node 9, which the file does not have"),
        ([node(1, COMPUTE) + node(1, COMPUTE)], "two nodes have the id 1"),
        ([node(1, SEND, comm_size=4)], r"node 1 \(n\): the attribute comm_dst is missing"),
        ([node(1, SEND, comm_size=-4, comm_dst=1)], "comm_size is '-4'; it must be a number of at least 0"),
        ([node(1, SEND, comm_size=4, comm_dst=1), b""], r"0\.et: rank 0: send 1 \(n\): rank 1 has no receive for it"),
        ([node(1, COLLECTIVE, comm_type=0)], "the attribute comm_size is missing"),
        ([node(1, COLLECTIVE, comm_type=12, comm_size=1)], "comm_type is 12; 0 to 9 are possible"),
        ([node(1, COLLECTIVE, comm_type=5, comm_size=1, comm_root=3)], "its root, rank 3, is not in its group"),
        ([PART, b""], r"0\.et: rank 0: all_reduce 3 \(n\): rank 1 does not take part: it has 0 such collectives"),
        (
            [PART, node(9, COLLECTIVE, comm_type=0, comm_size=44)],
            r"1\.et: rank 1: all_reduce 9 \(n\): its bytes is 44, but 40 in the same collective of rank 0",
        ),
        ([PART, node(9, COLLECTIVE, comm_type=7, comm_size=40)], "its collective is reduce_scatter, but all_reduce in"),
        ([node(1, COMPUTE, 2, micros=1) + node(2, COMPUTE, 1, micros=1)], "compute 1 .* waits for rank 0: compute 2"),
        ([node(1, 1, name="process_group:init", values="[x]")], "does not list process groups as PyTorch does"),
        ([node(1, COLLECTIVE, comm_type=0, comm_size=0)], "comm_size is 0, so the trace does not say how much is sent"),
        ([node(1, SEND, comm_size=0, comm_dst=1)], "comm_size is 0"),
        ([node(1, COLLECTIVE, comm_type=0, comm_size=float("inf"))], "comm_size is 'inf'; it must be a number"),
        ([node(1, COLLECTIVE, comm_type=0, comm_size=str((1 << 64) - 1))], "18,446,744,073,709,551,615 bytes; at most"),
        ([node(1, SEND, comm_size=4, comm_dst=1, dlcp_queue=300)], "its queue is 300; -1 to 7 are possible"),
        ([node(1, COMPUTE, dlcp_processor="x")], "dlcp_processor is 'x'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, ranks, message):
    with pytest.raises(TraceFormatError, match=message):
        check_workload(read_chakra(trace(tmp_path, *ranks)))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(TraceFormatError, match=r"there is neither this file nor job\.0\.et"):
        rank_files(tmp_path / "job")
    trace(tmp_path, PART, PART, PART)
    (tmp_path / "job.1.et").unlink()
    with pytest.raises(TraceFormatError, match=r"job\.1\.et: rank 1 has no file; .* from 0 to 2"):
        rank_files(tmp_path / "job")
    (tmp_path / "job.1.et").write_bytes(b"")
    with pytest.raises(TraceFormatError, match=r"job\.1\.et: the file is empty"):
        read_chakra(rank_files(tmp_path / "job"))


# Writing --------------------------------------------------------------------------------------------------------------


def round_trip(graph, path: Path):
    return graph_of(write_chakra(graph, path))


@given(graph=graphs())
@settings(max_examples=60)
def test_a_graph_ends_at_the_same_picosecond_after_a_round_trip(graph, tmp_path_factory):
    path = tmp_path_factory.mktemp("chakra") / "job"
    workload = read_chakra(write_chakra(graph, path))
    again = workload_graph(workload, range(HOSTS), 0).graph
    assert end_ps(again) == end_ps(graph)


def test_messages_keep_their_columns(tmp_path):
    graph = step_of_ring()
    graph.nodes["loss_bound"][graph.nodes["size_bytes"] > 0] = 0.25
    again = round_trip(graph, tmp_path / "job")
    for column in ("queue", "order", "lane", "class_shares", "loss_bound", "job", "step", "message", "sender"):
        mine, theirs = (each.nodes[each.nodes["size_bytes"] > 0][column].tolist() for each in (graph, again))
        assert mine == theirs, column


def test_other_tools_see_a_delay_in_whole_microseconds(tmp_path):
    builder = GraphBuilder()
    builder.messages(0, 1, 1440, transport=0, delay_ps=5_400_000)
    files = write_chakra(builder.build(), tmp_path / "job")
    first, second = chakra._nodes(files[0])
    assert (first.duration_micros, list(second.data_deps)) == (5, [first.id])
