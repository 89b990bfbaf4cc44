# SPDX-License-Identifier: Apache-2.0
"""A job's own trace is replayed with its computing times, but waits for the simulated network."""

import json
from pathlib import Path

import pytest

from dlcp.sim.traces.operations import OperationKind, TraceFormatError, workload_graph
from dlcp.sim.traces.profiler_trace import is_dlcp_trace, read_dlcp_trace, read_pytorch_profiles
from tests.sim.traced_graphs import end_ps

PATH = Path("job.json")
MS = 1000.0


def steps_ms(workload, rate_gbps: float = 10.0) -> list[float]:
    """Return the duration of each step with a network that takes no time beside a computation, in milliseconds."""
    graph = workload_graph(workload, range(len(workload.ranks)), 0)
    assert len(graph.ends) == len(workload.steps)
    return [end_ps(graph.graph, rate_gbps) / 1e9]


# DLCP -----------------------------------------------------------------------------------------------------------------


def bucket(rank: int, step: int, number: int, begin_ms: float, end_ms: float, size: int = 1000, **more) -> list[dict]:
    where = {"ph": "X", "cat": "bucket", "pid": rank + 1, "tid": 100_000 + number, "ts": begin_ms * MS}
    whole = {**where, "name": f"bucket {number}", "dur": (end_ms - begin_ms) * MS}
    return [{**whole, "args": {"step": step, "bytes": size, "layers": "a", **more}}]


def phase(rank: int, step: int, number: int, name: str, begin_ms: float, took_ms: float, **more) -> list[dict]:
    where = {"ph": "X", "cat": "bucket", "pid": rank + 1, "tid": 100_000 + number, "ts": begin_ms * MS}
    return [{**where, "name": name, "dur": took_ms * MS, "args": {"step": step, **more}}]


def wait(rank: int, step: int, begin_ms: float, end_ms: float) -> list[dict]:
    common = {"cat": "step", "name": "wait", "pid": rank + 1, "tid": rank + 1, "id2": {"local": hex(step * 8 + rank)}}
    return [
        {"ph": "b", **common, "ts": begin_ms * MS, "args": {"step": step}},
        {"ph": "e", **common, "ts": end_ms * MS},
    ]


def dlcp_trace(steps: int = 4, ranks: int = 2, wait_ms: float = 30.0, **bucket_more) -> list[dict]:
    """Return steps of two buckets: 10 ms apart, then a wait, then 5 ms until the next step."""
    length = 10 + wait_ms + 5
    events = []
    for rank in range(ranks):
        for step in range(steps):
            begin = 100 + step * length
            done = begin + 10 + wait_ms
            events += bucket(rank, step, 0, begin, done - 1, **bucket_more)
            events += bucket(rank, step, 1, begin + 10, done, **bucket_more)
            events += wait(rank, step, begin + 10, done)
    return events


def test_waiting_is_simulated_and_computing_is_not():
    workload = read_dlcp_trace(PATH, dlcp_trace())
    assert workload.measured_s == pytest.approx([0.045] * 3)
    assert [workload.compute_s(rank) for rank in range(2)] == pytest.approx([0.045, 0.045])
    assert workload.algorithm == "direct"
    (end_ms,) = steps_ms(workload)
    assert 45 < end_ms < 45.1, "three steps of 15 ms, and messages that take microseconds"


def test_tagging_and_applying_take_their_time():
    events = dlcp_trace()
    for rank in range(2):
        for step in range(4):
            begin = 100 + step * 45
            events += phase(rank, step, 1, "tag", begin + 10, 2.0, bits=32)
            events += phase(rank, step, 1, "sum", begin + 20, 1.5)
            events += phase(rank, step, 1, "apply", begin + 39, 1.0)
    (end_ms,) = steps_ms(read_dlcp_trace(PATH, events))
    assert 45 + 3 * 4.5 < end_ms < 45.1 + 3 * 4.5


def test_fewer_bits_are_fewer_bytes():
    events = dlcp_trace() + phase(0, 1, 1, "tag", 156, 0.0, bits=8) + phase(1, 1, 1, "tag", 156, 0.0, bits=8)
    sizes = [each.size_bytes for each in read_dlcp_trace(PATH, events).ranks[0] if each.group]
    assert sizes == [1000, 1000, 1000, 250, 1000, 1000]


def test_a_bucket_of_fsdp_is_a_reduce_scatter():
    events = dlcp_trace()
    for rank in range(2):
        events += phase(rank, 0, 0, "reduce-scatter", 100, 20.0)
    found = [each.collective for each in read_dlcp_trace(PATH, events).ranks[0] if each.group]
    assert found == ["reduce_scatter", *["all_reduce"] * 5]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (dlcp_trace(size=0), r"job\.json: rank 0: bucket 0 of step 0 has no size; record the trace again"),
        (dlcp_trace(unfinished=True), "bucket 0 of step 0 never ended"),
        (dlcp_trace(steps=2), "its ranks have 2 steps in common; at least 3 are needed"),
        (
            [each for each in dlcp_trace(ranks=3) if each["pid"] != 2],
            "rank 1 has no buckets; the trace needs all ranks",
        ),
        ([{"ph": "X", "cat": "bucket"}], r"job\.json: an event of DLCP lacks 'pid'"),
        ([*dlcp_trace(), 3], r"job\.json: an event of DLCP has no fields: 3"),
        (phase(0, 0, 0, "tag", 0, 1), "no rank has buckets"),
        (bucket(0, 0, 0, 5, 4), "dur: must be at least 0"),
        ([{**each, "ts": "x"} for each in dlcp_trace()], "ts: expected a number, got text"),
        ([each for each in dlcp_trace() if each["ph"] != "b"], "a wait ends that has not begun"),
        ([*dlcp_trace(), *bucket(0, 3, 0, 50, 60)], r"rank 0: step 2 ends at 50000\.0 us, but begins at 190000\.0 us"),
    ],
)
def test_an_incomplete_trace_of_dlcp_is_refused(events, message):
    with pytest.raises(TraceFormatError, match=message):
        read_dlcp_trace(PATH, events)


def test_a_bucket_that_a_rank_lacks_is_named():
    kept = [
        each
        for each in dlcp_trace()
        if (each["pid"], each["name"], each.get("args", {}).get("step")) != (2, "bucket 1", 1)
    ]
    workload = read_dlcp_trace(PATH, kept)
    with pytest.raises(
        TraceFormatError, match=r"rank 0: all_reduce .*\(bucket 1 of step 1\): rank 1 does not take part"
    ):
        workload_graph(workload, range(2), 0)


# PyTorch --------------------------------------------------------------------------------------------------------------


def profile(rank: int, events: list[dict], world: int = 2, groups=()) -> dict:
    about = {"rank": rank, "world_size": world, "pg_config": list(groups)}
    return {"distributedInfo": about, "traceEvents": [{"ph": "X", "args": {}, "tid": 1, **each} for each in events]}


def slice_of(name: str, category: str, begin_ms: float, end_ms: float, **more) -> dict:
    return {"name": name, "cat": category, "ts": begin_ms * MS, "dur": (end_ms - begin_ms) * MS, **more}


GLOO = {"Input Dims": [[250]], "Input type": ["float"]}
NCCL = {"Collective name": "allreduce", "In msg nelems": 500, "dtype": "BFloat16", "Group size": 2}


def on_cpu(rank: int, **shapes) -> dict:
    """Return two steps: 10 ms of backward, 20 ms of waiting for Gloo, and 5 ms of the optimizer."""
    events = []
    for step in range(2):
        begin = 1000 + 35 * step
        events += [
            slice_of(f"ProfilerStep#{step}", "user_annotation", begin, begin + 35),
            slice_of("aten::mm", "cpu_op", begin, begin + 6),
            slice_of("c10d::allreduce_", "cpu_op", begin + 6, begin + 7),
            slice_of("aten::mm", "cpu_op", begin + 7, begin + 10),
            slice_of("gloo:all_reduce", "user_annotation", begin + 8, begin + 30, tid=9, args=shapes or GLOO),
            slice_of("aten::add_", "cpu_op", begin + 30, begin + 35),
        ]
    return profile(rank, events)


def on_gpu(rank: int, **more) -> dict:
    """Return a step: 10 ms of kernels, the last 4 ms next to NCCL; 20 ms of NCCL alone; 5 ms of kernels."""
    events = [
        slice_of("gemm", "kernel", 0, 6),
        slice_of("gemm", "kernel", 6, 10),
        slice_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", "kernel", 6, 30, tid=20, args={**NCCL, **more}),
        slice_of("adam", "kernel", 30, 35),
    ]
    return profile(rank, events)


def read(*profiles: dict, ranks: int | None = None):
    return read_pytorch_profiles([(Path(f"{number}.json"), each) for number, each in enumerate(profiles)], ranks)


def test_a_gap_that_a_collective_ends_is_waiting():
    workload = read(on_cpu(0), on_cpu(1))
    assert workload.measured_s == pytest.approx([0.035, 0.035])
    assert workload.compute_s(0) == pytest.approx(0.030)
    assert [each.size_bytes for each in workload.ranks[0] if each.kind is OperationKind.COLLECTIVE] == [1000, 1000]
    assert steps_ms(workload) == [30], "what is sent takes less than the rest of the backward pass"


def test_a_large_collective_is_waited_for():
    shapes = {"Input Dims": [[250_000]], "Input type": ["float"]}
    exchange_ms = 1e6 * ((1500 + 64) / 1440) * 8 / 0.5e9 * 1e3  # with the headers, and acknowledgements
    (end_ms,) = steps_ms(read(on_cpu(0, **shapes), on_cpu(1, **shapes)), rate_gbps=0.5)
    assert end_ms == pytest.approx(2 * (6 + exchange_ms + 5), rel=0.01)


def test_kernels_of_a_gpu_are_computation():
    workload = read(on_gpu(0), on_gpu(1))
    assert workload.compute_s(0) == pytest.approx(0.015)
    (collective,) = [each for each in workload.ranks[0] if each.kind is OperationKind.COLLECTIVE]
    assert (collective.size_bytes, collective.group) == (1000, (0, 1))
    assert steps_ms(workload) == [15]


def test_a_single_profile_stands_for_all_ranks():
    assert len(read(on_gpu(0)).ranks) == 2
    workload = read(on_gpu(0), ranks=4)
    assert {each.group for each in workload.operations() if each.group} == {(0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("name", "collective", "size"),
    [
        ("_allgather_base", "all_gather", 1000),
        ("_reduce_scatter_base", "reduce_scatter", 1000),
        ("all_to_allv", "all_to_all", 1000),
        ("broadcast", "broadcast", 1000),
        ("barrier", "barrier", 1),
    ],
)
def test_collectives_have_their_names(name, collective, size):
    more = {"Collective name": name}
    (found,) = [each for each in read(on_gpu(0, **more), on_gpu(1, **more)).ranks[1] if each.group]
    assert (found.collective, found.size_bytes) == (collective, size)


def test_groups_are_listed_by_the_event_or_by_the_profile():
    def groups(**more):
        profiles = [on_gpu(rank, **more, **{"Group size": 2}) for rank in (0, 1)]
        for each in profiles:
            each["distributedInfo"] |= {"world_size": 4, "pg_config": [{"pg_name": "7", "ranks": [0, 1]}]}
        return {each.group for each in read(profiles[0], ranks=4).ranks[0] if each.group}

    assert groups(**{"Process Group Ranks": "[0, 3]"}) == {(0, 3)}
    assert groups(**{"Process Group Ranks": "[0, ...]", "Process Group Name": "7"}) == {(0, 1)}
    with pytest.raises(
        TraceFormatError, match=r"0\.json: nccl.* at 6000\.0 us: .* does not say which 2 ranks take part"
    ):
        groups()


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ([{"traceEvents": []}], r"0\.json: it has no distributedInfo: profile a process that has called"),
        ([profile(0, [])], r"0\.json: it has no collectives of NCCL or Gloo"),
        ([on_cpu(0, other=1)], r"gloo:all_reduce at 1006000\.0 us: it has no size: profile with record_shapes=True"),
        ([on_cpu(0, **{"Input Dims": [[3]], "Input type": ["c10::Odd"]})], "the size of a value of type 'c10::Odd'"),
        ([on_gpu(0, **{"Collective name": "send"})], "send is not a collective that can be simulated"),
        ([on_gpu(0), on_gpu(0)], r"1\.json: it is of rank 0, and so is 0\.json"),
        ([on_gpu(0), {**on_gpu(2)}], "rank 1 of 2 has no profile; give all ranks', or a single one"),
        ([on_gpu(0), on_gpu(1), on_gpu(5)], r"2\.json: it is of rank 5, but there are 2 ranks"),
        ([on_gpu(0, **{"In msg nelems": 0})], "it has 0 values, so the profile does not say how much is sent"),
        ([on_gpu(0, **{"In msg nelems": -3})], "In msg nelems: must be at least 0"),
        ([on_gpu(0, **{"Group size": "many"})], "Group size: expected a whole number, got text"),
        ([on_cpu(0, **{"Input Dims": [["x"]], "Input type": ["float"]})], "Input Dims: .*expected a whole number"),
        ([profile(0, [slice_of("gemm", "kernel", 5, 4)])], "an event: dur: must be at least 0"),
        ([profile(-1, [])], "distributedInfo: rank: must be at least 0"),
        ([on_gpu(5)], r"0\.json: it is of rank 5, but there are 2 ranks"),
        ([on_gpu(0, **{"Group size": 1, "Process Group Ranks": "[0, 1]"})], "does not say which 1 ranks take part"),
        ([on_gpu(0, **{"Group size": 1, "Process Group Ranks": "[0.7]"})], "Process Group Ranks: .*a whole number"),
        (
            [profile(0, [*on_gpu(0)["traceEvents"], slice_of("ProfilerStep#1", "user_annotation", 40, 50)])],
            "none of its 1 collectives begins between 40000.0 us and 50000.0 us, in its steps",
        ),
        (
            [profile(0, [*on_cpu(0)["traceEvents"], slice_of("ProfilerStep#7", "user_annotation", 1010, 1020)])],
            "ProfilerStep#7 begins at 1010000.0 us, before ProfilerStep#0 ends at 1035000.0 us",
        ),
        (
            [profile(0, [*on_cpu(0)["traceEvents"], slice_of("ProfilerStep#2", "user_annotation", 1069.9, 1105)])],
            "ProfilerStep#2 begins at 1069900.0 us, before ProfilerStep#1 ends at 1070000.0 us",
        ),
    ],
)
def test_an_incomplete_profile_is_refused(profiles, message):
    with pytest.raises(TraceFormatError, match=message):
        read(*profiles)


def test_ranks_with_different_numbers_of_steps_are_refused():
    shorter = on_cpu(1)
    shorter["traceEvents"] = [each for each in shorter["traceEvents"] if each["name"] != "ProfilerStep#1"]
    with pytest.raises(TraceFormatError, match=r"1\.json: rank 1 has 1 steps, another rank 2; the trace is incomplete"):
        read(on_cpu(0), shorter)


def test_traces_are_told_apart():
    assert is_dlcp_trace(dlcp_trace())
    assert not is_dlcp_trace(json.loads(json.dumps(on_gpu(0)))["traceEvents"])
