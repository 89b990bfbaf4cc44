# SPDX-License-Identifier: Apache-2.0
"""Effects of options on a group's averages: samples, compression, combining rules, bounds, and what adapts them."""

import numpy as np
import pytest

from dlcp.session import NotJoinedError, Options
from tests.faults.bad_network import BadNetwork, Weather
from tests.group.group_ranks import together
from tests.transport.free_ports import free_udp_ports

SHAPES = {"front.weight": (60, 50), "front.bias": (60,), "back.weight": (40, 60)}
SAMPLES = [8, 0, 24]


def gradients(rank, step):
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def train(group, steps=3, samples=None):
    group.register(SHAPES)
    got = []
    for step in range(steps):
        if samples is not None:
            group.samples(samples[group.rank])
        mine = gradients(group.rank, step)
        if samples is not None and not samples[group.rank]:
            mine["front.bias"][:] = np.nan
        group.average(mine)
        got.append(mine)
    return got


def expected(step, weights, name):
    parts = [weight * gradients(rank, step)[name] for rank, weight in enumerate(weights) if weight]
    return np.sum(parts, 0) / len(weights)


def assert_weighed(results):
    weights = [3 * count / sum(SAMPLES) for count in SAMPLES]
    for got in results:
        for step, averages in enumerate(got):
            for name in SHAPES:
                np.testing.assert_allclose(averages[name], expected(step, weights, name), atol=1e-5)
                np.testing.assert_array_equal(averages[name], results[0][step][name])


def test_every_sample_counts_the_same():
    assert_weighed(together(3, lambda group: train(group, samples=SAMPLES), Options(samples=16)))


def test_every_sample_counts_the_same_over_the_store():
    ports = free_udp_ports(3)
    with BadNetwork(ports) as network:
        network.weather = Weather(blocked=True)
        options = [
            Options(samples=16, bind=f"127.0.0.1:{port}", advertise=f"{host}:{place}", meet_s=2.0)
            for port, (host, place) in zip(ports, network.places, strict=True)
        ]
        assert_weighed(together(3, lambda group: train(group, samples=SAMPLES), options))


def test_samples_have_to_be_announced_by_all_and_in_time():
    def late(group):
        group.register(SHAPES)
        group.start("front.bias", gradients(group.rank, 0)["front.bias"])
        with pytest.raises(RuntimeError, match="step 0 is under way"):
            group.samples(3)
        group.end_step()

    together(2, late, Options(samples=4))
    with pytest.raises(ValueError, match=r"set Options\(samples=\.\.\.\) on every rank"):
        together(2, lambda group: group.samples(3))
    with pytest.raises(NotJoinedError, match="samples='set' and rank 1 samples='not set'"):
        together(2, train, [Options(samples=4, meet_s=2.0), Options(meet_s=2.0)])


@pytest.mark.parametrize("compression", ["fp16", "topk:0.05", "powersgd"])
def test_gradients_are_compressed(compression):
    whole, less = (
        together(2, lambda group: (train(group), group.ledger.summary()["sent"]), options)[0]
        for options in (Options(payload_bytes=512), Options(payload_bytes=512, compression=compression))
    )
    assert less[1] < 0.8 * whole[1]
    for step, averages in enumerate(less[0]):
        wanted = whole[0][step]["back.weight"]
        assert np.linalg.norm(averages["back.weight"] - wanted) < 1.2 * np.linalg.norm(wanted)


def test_gradients_are_summed():
    for got in together(2, train, Options(combine="sum", fallback=False)):
        for step, sums in enumerate(got):
            for name in SHAPES:
                np.testing.assert_allclose(sums[name], 2 * expected(step, [1, 1], name), atol=1e-5)
