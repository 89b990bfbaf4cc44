# SPDX-License-Identifier: Apache-2.0
"""The trace of real training with losses, read strictly, tells what the ledger does; clocks of hosts are aligned."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from dlcp.commands import trace as command
from dlcp.host.timeline import SUFFIX, TraceError, clock_offsets, find_timelines, trace_events

PLACE = {"ph", "name", "pid", "tid"}
FIELDS = {
    "M": PLACE | {"args"},
    "X": PLACE | {"cat", "ts", "dur", "args"},
    "b": PLACE | {"cat", "ts", "id2", "args"},
    "e": PLACE | {"cat", "ts", "id2"},
    "C": PLACE | {"ts", "args"},
    "i": PLACE | {"cat", "ts", "s", "args"},
}
TYPES = dict.fromkeys(("ph", "name", "cat", "s"), (str,)) | dict.fromkeys(("args", "id2"), (dict,))
TYPES |= dict.fromkeys(("pid", "tid"), (int,)) | dict.fromkeys(("ts", "dur"), (int, float))
METADATA = {"process_name": {"name": str}, "process_sort_index": {"sort_index": int}, "thread_name": {"name": str}}
PHASES = ["tag", "reduce-scatter", "sum", "all-gather", "confirm", "apply"]


def strictly_read(path):
    """Return a trace's slices, counters and marks, once all of it is as the Chrome trace event format says.

    So much of the format as there is of it in a trace; every event has what its kind requires, and nothing else.
    """
    document = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    open_slices, slices, counters, marks, names = {}, [], defaultdict(list), [], {}
    for event in document["traceEvents"]:
        assert set(event) == FIELDS[event["ph"]]
        for field in event:
            assert type(event[field]) in TYPES[field], f"{field} of {event}"
        assert min(event["pid"], event["tid"]) > 0, "0 is the idle one"
        if event["ph"] == "M":
            assert METADATA[event["name"]] == {name: type(value) for name, value in event["args"].items()}
            assert names.setdefault((event["name"], event["pid"], event["tid"]), event["args"]) == event["args"]
            continue
        assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                slices.append(event)
            case "b":
                assert open_slices.setdefault(event["id2"]["local"], event) is event, "an identity is used once"
            case "e":
                begin = open_slices.pop(event["id2"]["local"])
                assert [begin[key] for key in ("cat", "name", "pid")] == [event[key] for key in ("cat", "name", "pid")]
                assert event["ts"] >= begin["ts"]
                slices.append(begin | {"dur": event["ts"] - begin["ts"]})
            case "C":
                assert {name: type(value) in (int, float) for name, value in event["args"].items()} == {"value": True}
                counters[event["pid"], event["name"]].append((event["ts"], event["args"]["value"]))
            case "i":
                assert event["s"] in ("g", "p", "t")
                marks.append(event)
    assert open_slices == {}
    assert {("process_name", each["pid"], each["pid"]) for each in slices} <= names.keys()
    assert {("thread_name", each["pid"], each["tid"]) for each in slices if each["ph"] == "X"} <= names.keys()
    _check_nesting(slices)
    return slices, counters, marks


def _check_nesting(slices):
    """Check it to the nanosecond, rounded as Perfetto does, which drops slices that overlap."""
    threads = defaultdict(list)
    for each in slices:
        if each["ph"] == "X":
            threads[each["pid"], each["tid"]].append((round(1e3 * each["ts"]), -round(1e3 * each["dur"])))
    for found in threads.values():
        ends = []
        for begin, negative in sorted(found):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or begin - negative <= ends[-1], "slices of a thread lie in each other"
            ends.append(begin - negative)


# Training -------------------------------------------------------------------------------------------------------------


def training(worker, folder):
    """Train with DDP and with FSDP2 over a path that loses packets; return the ledgers and the profiler's events."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch
    from dlcp.transport import Endpoint
    from dlcp.values.tags import TagPolicy
    from tests.faults.lossy_sockets import lossy_endpoints
    from tests.torch.test_backend_training import sharded
    from tests.train.scripts import make, train

    Endpoint.__init__ = lossy_endpoints(0.05)
    droppable = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)
    lossy = worker.options(loss_bound=0.2, immediate=True, tag_policy=droppable, payload_bytes=64)
    model = DistributedDataParallel(make())
    state = dlcp.torch.enable(model, lossy.with_(trace=str(Path(folder) / "ddp")))
    with torch.profiler.profile() as profile:
        train(model)
    state.endpoint.flush(30)
    ledger = [(each.step, each.message, each.receiver, each) for each in state.ledger.records]
    state.close()
    group = dist.new_group(backend="dlcp")
    _, sums = sharded(group, worker.rank, lossy.with_(bind=""))
    dist.destroy_process_group(group)
    return ledger, sums, {each.key for each in profile.key_averages()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pytest.importorskip("torch")
    from tests.torch.workers import launch, values

    folder = tmp_path_factory.mktemp("timelines")
    environment = {"DLCP_TRACE": str(folder / "fsdp"), "DLCP_PAYLOAD_BYTES": "576"}  # some hundred packets
    ranks = values(launch(2, training, folder, environment=environment))
    for each in ("ddp", "fsdp"):
        command.write(folder / f"{each}.json", [folder / each])
    return folder, ranks


def test_messages_have_the_ledgers_losses_and_waiting(trained):
    folder, ranks = trained
    slices, counters, marks = strictly_read(folder / "ddp.json")
    assert marks == []
    total = Counter()
    for rank, (ledger, _, _) in enumerate(ranks):
        found = {
            (each["args"]["step"], each["args"]["message"], each["args"]["peer"]): each
            for each in slices
            if each["pid"] == rank + 1 and each["name"].startswith("to rank")
        }
        assert found.keys() == {(step, message, receiver) for step, message, receiver, _ in ledger}
        for step, message, receiver, record in ledger:
            each = found[step, message, receiver]
            assert [each["args"][name] for name in ("lost", "packets", "retransmitted", "what")] == [
                *(record.lost, record.packets, record.retransmitted, record.layers)
            ]
            assert each["dur"] / 1e6 == pytest.approx(record.seconds, abs=1e-5)
        for name in ("lost", "retransmitted"):
            in_all = sum(getattr(record, name) for *_, record in ledger)
            assert counters[rank + 1, f"{name} packets"][-1][1] == in_all
            total[name] += in_all
    assert total["lost"] > 0, "the run has to lose packets for this to say something"


def test_a_bucket_goes_through_its_phases_one_after_the_other(trained):
    slices, _, _ = strictly_read(trained[0] / "ddp.json")
    threads = defaultdict(list)
    for each in slices:
        if each["cat"] == "bucket":
            threads[each["pid"], each["tid"], each["args"]["step"]].append(each)
    assert len(threads) == 2 * 4, "two ranks, four steps, and a bucket"
    for (pid, _, _), (bucket, *phases) in threads.items():
        assert "unfinished" not in bucket["args"]
        assert [each["name"] for each in phases] == PHASES
        assert sum(each["dur"] for each in phases) == pytest.approx(bucket["dur"], abs=0.1)
        assert phases[0]["args"]["bits"] in (8, 32)
        assert phases[1]["args"]["last"] == 2 - pid, "of two ranks the other one contributes last"
    steps = [each for each in slices if each["name"] == "step"]
    assert sorted((each["pid"], each["args"]["step"]) for each in steps) == [(p, s) for p in (1, 2) for s in range(4)]


def test_the_simulator_reads_it(trained):
    operations = pytest.importorskip("dlcp.sim.traces.operations")
    from dlcp.sim.traces.profiler_trace import read_dlcp_trace
    from tests.train.scripts import make

    document = json.loads((trained[0] / "ddp.json").read_text())
    workload = read_dlcp_trace(trained[0] / "ddp.json", document["traceEvents"])
    operations.check_workload(workload)
    assert [len(workload.steps), len(workload.measured_s)] == [3, 3], "the last of four steps has no end"
    parameters = sum(each.numel() for each in make().parameters())
    for rank in range(2):
        buckets = [each for each in workload.ranks[rank] if each.group]
        assert len(buckets) == 3
        assert {each.size_bytes for each in buckets} <= {4 * parameters, parameters}, (
            "in full precision, or with 8 bits"
        )
        assert 0 < workload.compute_s(rank) < sum(workload.measured_s) * 1.5


def test_collectives_of_fsdp_have_the_groups_losses(trained):
    folder, ranks = trained
    slices, counters, _ = strictly_read(folder / "fsdp.json")
    for rank, (_, sums, _) in enumerate(ranks):
        kinds = Counter(each["name"] for each in slices if each["pid"] == rank + 1 and each["cat"] == "collective")
        assert kinds["all_gather"] > 0
        assert kinds["reduce_scatter"] > 0
        assert counters[rank + 1, "lost packets"][-1][1] == sums["lost"]
    assert sum(sums["lost"] for _, sums, _ in ranks) > 0


def test_the_profiler_shows_what_the_frameworks_threads_do(trained):
    for _, _, seen in trained[1]:
        assert "dlcp: hand over a bucket" in seen


# Files ----------------------------------------------------------------------------------------------------------------


def timeline(folder, rank, clock, ahead_ns, notes, *, day_ns=0):
    about = {"rank": rank, "process_rank": rank, "process": 1, "host": clock, "clock": clock}
    about |= {"began_unix_ns": 10**18 + day_ns, "began_ns": ahead_ns}
    lines = [f"{ahead_ns},joined,0,0,a session"]
    lines += [f"{ahead_ns + time_ns},{event.format(began=ahead_ns)}" for time_ns, event in notes]
    (folder / f"rank-{rank}-1-0{SUFFIX}").write_text("\n".join([json.dumps(about), *lines, ""]))


def test_clocks_of_hosts_are_aligned_by_confirmations(tmp_path):
    sent, arrived = "sent,0,{0},{1},{{began}},10,0,0,5,0,0,a", "arrived,0,{0},{1},{{began}},10,0,a"
    # The least time to a confirmation is 100 us both ways; other messages wait for longer.
    ours = [(1_000_000, sent.format(1, 1)), (2_000_000, sent.format(2, 1)), (3_000_000, arrived.format(3, 1))]
    theirs = [(900_000, arrived.format(1, 0)), (1_200_000, arrived.format(2, 0)), (3_100_000, sent.format(3, 0))]
    timeline(tmp_path, 0, "here", 10**12, ours)
    timeline(tmp_path, 1, "there", 7 * 10**12, theirs, day_ns=10**9)
    timeline(tmp_path, 2, "elsewhere", 3 * 10**12, [], day_ns=5 * 10**9)
    found = find_timelines([tmp_path])
    assert clock_offsets(found) == {
        "here": 0,
        "there": -6 * 10**12,
        "elsewhere": -2 * 10**12 + 5 * 10**9,  # which exchanged nothing: by the time of day
    }
    moments = {
        (event["pid"], event["args"]["message"]): event["ts"]
        for event in trace_events(found)
        if event["ph"] == "b" and event["cat"] == "message"
    }
    assert moments[1, 1] == moments[2, 1], "both began at the same moment, by whatever clock"


def test_what_a_killed_rank_left_open_is_in_the_trace(tmp_path):
    notes = [
        (5_000, "ready,3,1,400,fc1"),
        (9_000, "tagged,3,1,8"),
        (11_000, "issued,4,0,all_reduce"),
        (20_000, "left,3,0,why, so"),
    ]
    timeline(tmp_path, 0, "here", 100, notes)
    command.write(tmp_path / "trace.json", [tmp_path])
    slices, _, marks = strictly_read(tmp_path / "trace.json")
    assert [(each["name"], each["dur"]) for each in slices] == [("bucket 1", 15.0), ("tag", 4.0), ("all_reduce", 9.0)]
    assert [each["args"].get("unfinished") for each in slices] == [True, None, True]
    assert slices[1]["args"] == {"step": 3, "bits": 8}
    assert [each["args"] for each in marks] == [{"reason": "why, so"}]


def test_a_step_that_begins_before_the_last_one_is_noted_as_applied_follows_it(tmp_path):
    notes = [
        (5, "ready,3,0,400,a"),
        (8, "averaged,3,0"),
        (9, "ready,4,0,400,a"),
        (11, "applied,3,0"),
        (12, "applied,4,0"),
    ]
    timeline(tmp_path, 0, "here", 0, [(1000 * time, event) for time, event in notes])
    command.write(tmp_path / "trace.json", [tmp_path])
    slices, _, _ = strictly_read(tmp_path / "trace.json")
    found = [(each["name"], each["ts"], each["dur"]) for each in slices if each["cat"] == "bucket"]
    assert found == [("bucket 0", 5, 4), ("confirm", 5, 3), ("apply", 8, 1), ("bucket 0", 9, 3), ("apply", 9, 3)]


def test_a_folder_without_timelines_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"no rank has left a timeline in .*: check that the script uses"):
        find_timelines([tmp_path])
