# SPDX-License-Identifier: Apache-2.0
"""No number of a file is beyond what engines can hold: each has limits, and errors name the field and the limit."""

import dataclasses
import typing
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from msgspec import Meta

from dlcp.inputs.document import DocumentError
from dlcp.sim import limits
from dlcp.sim.arithmetic import ps_per_kibibyte
from dlcp.sim.engines.rules import timeout_ps
from dlcp.sim.experiments.experiment import Experiment, RunSetting, read
from dlcp.sim.experiments.running import TimeDistribution
from dlcp.sim.graphs.graph import GraphBuilder
from dlcp.sim.jobs.models import StepProfile, parse_size
from dlcp.sim.limits import PACKETS_PER_MESSAGE_MAX, SIZE_BYTES_MAX, TIME_MAX_PS, LimitError, check_packets, picoseconds
from dlcp.sim.network.nodes import TopologyError
from dlcp.sim.network.topology import Dragonfly, FatTree, LeafSpine, NetworkFile, RailOptimised, build_topology
from dlcp.sim.traces.operations import OperationKind, RankOperation, TraceFormatError, Workload, check_workload
from dlcp.sim.transports.specs import TIMEOUT_BACKOFF_MAX

WITHOUT_MEANING = ("value", "set", "paper", "limit")
"""Fields of figures and claims, which change no run."""


def numbers(kind: object, place: str, seen: set, metas: tuple = ()) -> typing.Iterator[tuple[str, tuple]]:
    """Yield the place and the limits of each number in a type and the records that it refers to."""
    if typing.get_origin(kind) is typing.Annotated:
        inner, *more = typing.get_args(kind)
        yield from numbers(inner, place, seen, (*metas, *more))
    elif kind in (int, float):
        yield place, metas
    elif msgspec.inspect.is_struct_type(kind) or dataclasses.is_dataclass(kind):
        if kind not in seen:
            seen.add(kind)
            for name, hint in typing.get_type_hints(kind, include_extras=True).items():
                if name in getattr(kind, "__struct_fields__", ()) or dataclasses.is_dataclass(kind):
                    yield from numbers(hint, f"{kind.__name__}.{name}", seen)
    elif typing.get_origin(kind) is not typing.Literal:
        for inner in typing.get_args(kind):
            yield from numbers(inner, place, seen)


@pytest.mark.parametrize("kind", [RunSetting, Experiment, StepProfile, NetworkFile])
def test_every_number_of_a_file_has_a_least_and_a_greatest_value(kind) -> None:
    for place, metas in numbers(kind, kind.__name__, set()):
        if place == "Claim.paper":  # a published figure that changes no run
            continue
        marks = [each for each in metas if isinstance(each, Meta)]
        assert any(each.ge is not None or each.gt is not None for each in marks), f"{place} has no least value"
        assert any(each.le is not None or each.lt is not None for each in marks), f"{place} has no greatest value"


EXPERIMENT = """\
name: small
title: t
question: q
setting:
  topology: {kind: star, hosts: 4, host_link: {rate_gbps: 100}}
  transports: {t: {kind: dctcp}}
  training: [{name: job, model: 1MB, workers: 4, transport: t, steps: 2}]
  traffic: [{name: others, load: 0.1, transport: t, stop_s: 0.01}]
  stop_s: 10
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stop_s: 10\n", "stop_s: 1e12\n", r":9: setting\.stop_s: must be at most 2,305,843, got 1000000000000"),
        ("rate_gbps: 100", "rate_gbps: 1e-12", r"host_link\.rate_gbps: must be at least 0\.004, got 1e-12"),
        ("load: 0.1", "load: 1e-300", r"traffic\[0\]\.load: .* flows of others begin on average"),
        ("hosts: 4", "hosts: 1000000000", r"topology\.hosts: must be at most 65,536"),
        ("steps: 2", "steps: 1e9", r"steps: must be at most 100,000"),
        ("steps: 2", "steps: 2, jitter: .nan", r"jitter: expected a number, got '\.nan'"),
        ("steps: 2", "steps: 2, compression: 1e300", "compression: must be at most 1,000,000"),
        ("steps: 2", "steps: 2, scheduler: p3, piece_bytes: 1", "number of pieces of the gradients is 1e"),
        ("model: 1MB", "model: 99TB", r"training\[0\]\.model: 99TB is not between 1 byte and 17,592,186,044,416"),
        ("model: 1MB", "model: 0MB", "0MB is not between 1 byte"),
        ("model: 1MB", "model: 8000GB, collective: tree", "number of packets of a message of 8,000,000,000,000 bytes"),
        ("stop_s: 10\n", "seed: 18446744073709551615\n", "seed: must be at most"),
        ("kind: dctcp", "kind: dctcp, min_timeout_us: 1e300", "min_timeout_us: must be at most 100,000,000"),
        (
            "model: 1MB",
            "model: vgg16, batch: 1000000000, stragglers: [{worker: 0, factor: 1e6}]",
            r"stragglers: the computing time of a step in seconds is .* at most 2,305,843 can be simulated",
        ),
        ("load: 0.1", "load: 0.1, most_bytes: 1", "flows of others have 1 bytes on average, and with headers of 60"),
        ("steps: 2", "steps: 2, stragglers: [{worker: 1}, {worker: 1}]", "stragglers names a worker twice"),
        ("steps: 2", f"steps: 2, pipeline: {'9' * 5000}-1", "does not name the replicas of each stage"),
        (
            "stop_s: 10\n",
            "stop_s: 10\n  patterns: [{name: p, every_s: 1e-9, stop_s: 1, transport: t}]\n",
            r"patterns\[0\]: the number of times that the flows begin is 1e\+09",
        ),
    ],
)
def test_a_number_beyond_its_limit_is_refused_by_name(tmp_path, old, new, message) -> None:
    assert old in EXPERIMENT
    (path := tmp_path / "small.yaml").write_text(EXPERIMENT.replace(old, new, 1))
    with pytest.raises(DocumentError, match=message):
        read(path)


def test_large_models_are_possible_where_collectives_cut_them(tmp_path) -> None:
    large = (
        EXPERIMENT.replace("model: 1MB", "model: 4TB")
        .replace("hosts: 4", "hosts: 64")
        .replace("workers: 4", "workers: 64")
    )
    (path := tmp_path / "large.yaml").write_text(large)
    assert read(path, engine="flows").runs


@pytest.mark.parametrize(
    ("text", "size"),
    [("1MB", 10**6), ("1MiB", 1 << 20), ("2 KiB", 2048), ("1.5kB", 1500), ("1TiB", 1 << 40), ("3B", 3)],
)
def test_sizes_have_decimal_and_binary_units(text, size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("column", ["size_bytes", "delay_ps"])
@pytest.mark.parametrize("value", [-1, max(SIZE_BYTES_MAX, TIME_MAX_PS) + 1])
def test_a_graph_takes_no_number_that_would_wrap_around(column, value) -> None:
    with pytest.raises(LimitError, match="can be simulated"):
        GraphBuilder().messages(0, 1, **{"size_bytes": 1, column: [1, value]}, transport=0)


def test_a_message_has_no_more_packets_than_engines_count() -> None:
    check_packets(PACKETS_PER_MESSAGE_MAX * 1440, 1440)
    with pytest.raises(LimitError, match=r"1,440 in each, is 2\.14748e"):
        check_packets(PACKETS_PER_MESSAGE_MAX * 1440 + 1, 1440)


def test_durations_become_picoseconds_or_are_refused() -> None:
    assert picoseconds([[1e-12], [2.5]]).tolist() == [[1], [2_500_000_000_000]]
    for wrong in (-1e-9, 1e300, np.nan):
        with pytest.raises(LimitError, match="a duration in seconds"):
            picoseconds([0.0, wrong])


def test_limits_fit_the_engines_integers() -> None:
    assert 2 * TIME_MAX_PS <= limits.FOREVER_PS < 1 << 63
    assert limits.PACKET_BYTES_MAX * ps_per_kibibyte(limits.RATE_MIN_GBPS) < 1 << 62
    assert ps_per_kibibyte(limits.RATE_MIN_GBPS) < 1 << 31
    assert limits.TIMER_MAX_PS << 2 * TIMEOUT_BACKOFF_MAX <= TIME_MAX_PS
    assert limits.TIMER_US_MAX * 1e6 <= limits.TIMER_MAX_PS
    assert SIZE_BYTES_MAX / (limits.PACKET_BYTES_MAX - 120) <= PACKETS_PER_MESSAGE_MAX
    assert limits.SEED_MAX * 65537 < 1 << 63


def test_a_timer_ends_after_however_long_a_round_trip() -> None:
    stream = SimpleNamespace(rtt=TIME_MAX_PS, rtt_var=TIME_MAX_PS >> 1, backoff=TIMEOUT_BACKOFF_MAX, in_flight=1)
    assert timeout_ps(stream, SimpleNamespace(kind=2, min_timeout_ps=1)) << TIMEOUT_BACKOFF_MAX <= TIME_MAX_PS


def test_the_mean_of_the_longest_times_is_exact() -> None:
    times = TimeDistribution()
    times.add(np.full(100, TIME_MAX_PS, np.int64))
    assert times.mean_s == TIME_MAX_PS / 1e12


@pytest.mark.parametrize(
    "spec",
    [
        LeafSpine(leaves=65_536, hosts_per_leaf=65_536),
        LeafSpine(leaves=4096, spines=65_536, hosts_per_leaf=1),
        FatTree(ports=64, oversubscription=65_536),
        Dragonfly(groups=65_536, routers_per_group=65_536, hosts_per_router=1),
        RailOptimised(servers=65_536, gpus_per_server=65_536, servers_per_pod=1),
    ],
)
def test_a_network_that_is_too_large_is_refused_before_it_is_built(spec) -> None:
    with pytest.raises(TopologyError, match="the topology has"):
        build_topology(spec)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"duration_ps": 2 * TIME_MAX_PS}, r"it takes 4\.61169e.* s; 0 to 2,305,843 s can be simulated"),
        ({"duration_ps": -5}, "it takes -5e-12 s"),
        ({"kind": OperationKind.SEND, "peer": 1, "size_bytes": 1 << 63}, "it has 9,223,372,036,854,775,808 bytes"),
        ({"kind": OperationKind.COLLECTIVE, "group": (0, 1, 0)}, "its group has rank 0 twice"),
        ({"kind": OperationKind.SEND, "peer": 1, "columns": {"queue": 300}}, "its queue is 300; -1 to 7 are possible"),
        ({"kind": OperationKind.SEND, "peer": 1, "columns": {"step": "x"}}, "its step is 'x'"),
    ],
)
def test_operations_of_any_trace_are_checked(changed, message) -> None:
    operation = dataclasses.replace(RankOperation(OperationKind.COMPUTE, "a", "job:3"), **changed)
    with pytest.raises(TraceFormatError, match=rf"job:3: rank 0: .*{message}"):
        check_workload(Workload("job", [[operation], []]))
