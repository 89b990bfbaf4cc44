# SPDX-License-Identifier: Apache-2.0
"""Groups without a framework compress as well: real endpoints, a path that loses packets, and one that breaks."""

import threading

import numpy as np
import pytest

from dlcp.session import Options
from dlcp.session.joining import NotJoinedError
from dlcp.transport import TransportError
from tests.compress.compressed_ranks import NOTHING_PROTECTED
from tests.faults.bad_network import BadNetwork, Weather
from tests.group.group_ranks import LIMIT_S, together
from tests.transport.free_ports import free_udp_ports

SHAPES = {"conv.weight": (64, 8, 9), "conv.bias": (64,), "fc.weight": (80, 60)}
STEPS = 10
QUICK = {"payload_bytes": 256, "silence_s": 1.0, "deadline_s": 2.5, "meet_s": 8.0, "tag_policy": NOTHING_PROTECTED}


def gradients(rank, step):
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def options_over(network, rank, **changes):
    host, port = network.places[rank]
    return Options(bind=f"127.0.0.1:{network.ports[rank]}", advertise=f"{host}:{port}", **{**QUICK, **changes})


def train(network, steps, size=2, before_step=lambda step: None, **changes):
    """Each rank's results by step, its summary, whether DLCP was in use at each step, and its residual."""

    def one(group):
        group.register(list(SHAPES))
        kept, active = [], []
        for step in range(steps):
            before_step(step)
            mine = gradients(group.rank, step)
            group.average(mine)
            kept.append(mine)
            active.append(group.active)
        owed = {name: group._session.averager.feedback.of(name) for name in SHAPES}
        return kept, group.ledger.summary(), active, owed

    return together(size, one, [options_over(network, rank, **changes) for rank in range(size)])


def assert_identical(results):
    for kept, *_ in results[1:]:
        for mine, first in zip(kept, results[0][0], strict=True):
            for name in SHAPES:
                assert mine[name].tobytes() == first[name].tobytes()


def missing(results, steps):
    """How much of all gradients was neither in a result nor is owed."""
    size, worst = len(results), 0.0
    for name, shape in SHAPES.items():
        given = sum(gradients(rank, step)[name] for rank in range(size) for step in range(steps))
        taken = size * sum(kept[name] for kept in results[0][0])
        owed = sum(owed[name].reshape(shape) for *_, owed in results if owed[name] is not None)
        worst = max(worst, float(np.abs(taken + owed - given).max()))
    return worst


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("topk:0.1", {}),
        ("powersgd:2", {}),
        ("qsgd:4", {}),
        ("signsgd", {"fallback": False}),
        ("", {"combine": "adasum", "fallback": False}),
        ("efsignsgd", {"combine": "sum", "fallback": False}),
    ],
)
def test_at_one_percent_loss_bounds_are_kept_and_replicas_identical(text, changes):
    with BadNetwork(free_udp_ports(2), seed=4) as network:
        network.weather = Weather(loss=0.01)
        results = train(network, STEPS, compression=text, **changes)
        assert network.seen["lost"] > 0
    assert_identical(results)
    for _, summary, active, _ in results:
        assert active == [True] * STEPS
        assert summary["violations"] == 0
        assert summary["max_message_ratio"] <= 0.1
    if text in ("topk:0.1", "powersgd:2"):
        assert missing(results, STEPS) < 1e-4


def test_where_the_path_breaks_nothing_that_compression_left_out_is_gone():
    averaged = threading.Barrier(2)
    with BadNetwork(free_udp_ports(2), seed=4) as network:

        def break_at_one(step):
            if step == 1:
                averaged.wait(LIMIT_S)  # else a rank that is still in step 0 would leave DLCP there
                network.weather = Weather(blocked=True)

        results = train(network, 3, before_step=break_at_one, compression="topk:0.1")
    assert_identical(results)
    for _, _, active, owed in results:
        assert active[0]
        assert not active[-1]
        assert all(part is None for part in owed.values())
    assert missing(results, 3) < 1e-4


@pytest.mark.parametrize("changes", [{"combine": "adasum"}, {"compression": "signsgd"}])
def test_what_is_no_average_ends_in_a_clear_error(changes):
    with BadNetwork(free_udp_ports(2), seed=4) as network:

        def break_at_one(step):
            if step == 1:
                network.weather = Weather(blocked=True)

        with pytest.raises(TransportError, match="rank"):
            train(network, 3, before_step=break_at_one, fallback=False, **changes)


def test_ranks_must_ask_for_the_same():
    with BadNetwork(free_udp_ports(2)) as network:
        options = [options_over(network, rank, compression=text) for rank, text in enumerate(["qsgd:4", "topk:0.1"])]
        with pytest.raises(NotJoinedError, match="compression"):
            together(2, lambda group: None, [one.with_(fallback=False) for one in options])
