# SPDX-License-Identifier: Apache-2.0
"""A group averages what any framework gives it: whole steps or one parameter after the other, the same on all ranks."""

import numpy as np
import pytest

import dlcp.session
from dlcp.session import Options, average_metrics, buckets, mean_over_ranks
from dlcp.session.buckets import BucketPlan
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import TagPolicy, layers_in_order
from tests.faults.bad_network import BadNetwork, Weather
from tests.group.group_ranks import LIMIT_S, on_ranks, together
from tests.transport.free_ports import free_port, free_udp_ports

NAMES = ["conv1.weight", "conv1.bias", "fc.weight", "fc.bias", "scale"]
SHAPES = {"conv1.weight": (8, 3, 3), "conv1.bias": (8,), "fc.weight": (70, 50), "fc.bias": (70,), "scale": ()}
ALL_DROPPABLE = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)


def gradients(rank, step, dtype=np.float32):
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def mean(size, step, dtype=np.float32):
    parts = [gradients(rank, step, dtype) for rank in range(size)]
    return {name: np.mean([part[name].astype(np.float64) for part in parts], axis=0) for name in NAMES}


def assert_averaged(got, size, step, dtype=np.float32):
    wanted = mean(size, step, dtype)
    exact = {np.float16: 2e-3, np.float32: 1e-6, np.float64: 1e-12}[dtype]
    for name in NAMES:
        np.testing.assert_allclose(got[name], wanted[name], rtol=exact, atol=exact)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_whole_steps_are_averaged_in_place(size):
    def train(group):
        group.register(NAMES)
        kept = []
        for step in range(3):
            mine = gradients(group.rank, step)
            given = dict(mine)
            group.average(mine)
            assert all(mine[name] is given[name] for name in NAMES)
            kept.append(mine)
        return kept, group.active, group.step, group.ledger.summary()

    results = together(size, train)
    for kept, active, step, ledger in results:
        assert (active, step, ledger["violations"]) == (size > 1, 3, 0)
        assert (ledger["sent"] > 0) == (size > 1)
        for number, got in enumerate(kept):
            assert_averaged(got, size, number)
            for name in NAMES:
                np.testing.assert_array_equal(got[name], results[0][0][number][name], "replicas are identical")


def test_after_a_flush_nothing_is_left_to_send():
    def train(group):
        group.register(["w"])
        left, total = [], 0.0
        for step in range(4):
            mine = {"w": np.random.default_rng([group.rank, step]).standard_normal(60_000).astype(np.float32)}
            if step == 3:
                group.flush()
            group.average(mine)
            total = total + mine["w"].astype(np.float64)
            left.append(group._session.averager.feedback.size)
        group.start("w", mine["w"])
        with pytest.raises(RuntimeError, match="call end_step before a flush"):
            group.flush()
        group.end_step()
        return left, total

    options = Options(loss_bound=0.3, immediate=True, tag_policy=ALL_DROPPABLE, shared_memory=False, precision="8")
    results = together(2, train, options)
    given = sum(np.random.default_rng([rank, step]).standard_normal(60_000) for rank in range(2) for step in range(4))
    for left, total in results:
        assert min(left[:3]) > 1000
        assert left[3] == 0
        np.testing.assert_allclose(2 * total, given, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("collective", ["direct", "ring", "auto"])
def test_other_formats_and_collectives(dtype, collective):
    def train(group):
        group.register(NAMES)
        mine = gradients(group.rank, 0, dtype)
        group.average(mine)
        return mine

    for got in together(3, train, Options(collective=collective)):
        assert_averaged(got, 3, 0, dtype)


def test_bfloat16_is_exchanged_as_its_bits():
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def train(group):
        group.register(["w"])
        values = np.full(3000, group.rank + 0.5, ml_dtypes.bfloat16)
        group.average({"w": values})
        return values

    for got in together(2, train):
        assert got.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got.astype(np.float32), np.ones(3000))


def test_parameters_may_come_one_by_one_in_any_order():
    def train(group):
        group.register(NAMES)
        kept = []
        for step in range(3):
            mine = gradients(group.rank, step)
            order = np.random.default_rng([group.rank, step]).permutation(NAMES)
            futures = {name: group.start(name, mine[name]) for name in order}
            group.end_step()
            assert all(futures[name].result(0) is mine[name] for name in NAMES)
            kept.append(mine)
        return kept

    for kept in together(3, train):
        for step, got in enumerate(kept):
            assert_averaged(got, 3, step)


def test_the_last_parameter_of_a_step_sends_the_last_bucket():
    def train(group):
        group.register(NAMES)
        for step in range(3):
            mine = gradients(group.rank, step)
            futures = [group.start(name, mine[name]) for name in NAMES]
            for future in futures:
                future.result(LIMIT_S)
            assert_averaged(mine, 2, step)
            group.end_step()

    together(2, train)


def test_a_rank_without_a_gradient_counts_as_zeros():
    def train(group):
        group.register(NAMES)
        group.average(gradients(group.rank, 0))
        some = gradients(group.rank, 1)
        if group.rank == 1:
            del some["fc.weight"], some["scale"]
        group.average(some)
        return some

    first, second = together(2, train)
    np.testing.assert_allclose(first["fc.weight"], gradients(0, 1)["fc.weight"] / 2, rtol=1e-6)
    np.testing.assert_allclose(first["scale"], gradients(0, 1)["scale"] / 2, rtol=1e-6)
    np.testing.assert_array_equal(first["fc.bias"], second["fc.bias"])


def test_arrays_of_any_layout_and_none_at_all():
    def train(group):
        group.register(["t", "s", "e"])
        table = np.arange(20000, dtype=np.float32).reshape(100, 200) * (group.rank + 1)
        strided = np.zeros((50, 2), np.float32)
        strided[:, 0] = group.rank
        for _ in range(2):
            group.average({"t": table.T, "s": strided[:, 0], "e": np.empty((0, 3), np.float32)})
        return table, strided

    for table, strided in together(2, train):
        np.testing.assert_allclose(table, np.arange(20000).reshape(100, 200) * 1.5)
        np.testing.assert_array_equal(strided[:, 0], np.full(50, 0.5))
        assert not strided[:, 1].any()


def test_what_cannot_be_exchanged_is_named_before_anything_is_sent():
    def train(group):
        with pytest.raises(RuntimeError, match=r"call register\(names\) first"):
            group.average({})
        group.register(NAMES)
        mine = gradients(group.rank, 0)
        with pytest.raises(KeyError, match=r"'fc\.weights' has not been registered; did you mean fc\.weight\?"):
            group.average({"fc.weights": mine["fc.weight"]})
        with pytest.raises(TypeError, match="scale is int64; DLCP exchanges float32, float64, float16, bfloat16"):
            group.average({**mine, "scale": np.array(1)})
        fixed = mine["scale"].copy()
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match=r"scale is read-only; pass a copy"):
            group.average({**mine, "scale": fixed})
        group.average(mine)
        assert group.step == 1
        with pytest.raises(
            ValueError, match=r"fc\.bias has 3 values of float32; in the first step it had 70 of float32"
        ):
            group.average({**mine, "fc.bias": np.zeros(3, np.float32)})
        group.average(gradients(group.rank, 1))
        group.start("scale", mine["scale"])
        with pytest.raises(RuntimeError, match="scale has been started in step 2; call end_step"):
            group.start("scale", mine["scale"])
        with pytest.raises(RuntimeError, match="step 2 is under way; call end_step before a broadcast"):
            group.broadcast(np.zeros(3))
        with pytest.raises(RuntimeError, match="step 2 is under way"):
            group.register(NAMES)
        group.end_step()

    together(2, train)


def test_a_parameter_that_the_first_step_lacked_is_refused():
    def train(group):
        group.register(NAMES)
        mine = gradients(group.rank, 0)
        group.average({name: mine[name] for name in NAMES[:2]})
        with pytest.raises(ValueError, match=r"fc\.weight had no gradient in the first step"):
            group.start("fc.weight", mine["fc.weight"])

    together(2, train)


def test_parameters_may_be_registered_anew():
    def train(group):
        for names in (NAMES, list(reversed(NAMES)), NAMES[:2]):
            group.register(names)
            for _ in range(2):
                mine = {name: gradients(group.rank, group.step)[name] for name in names}
                group.average(mine)
                for name in names:
                    np.testing.assert_allclose(mine[name], mean(2, group.step - 1)[name], atol=1e-6)

    together(2, train)


def test_ranks_with_other_parameters_are_told_which():
    def train(group):
        names = list(NAMES)
        if group.rank == 2:
            names[2] = "head.weight"
        with pytest.raises(
            ValueError, match=r"parameter 2 is (fc|head)\.weight on rank . and (fc|head)\.weight on rank ."
        ):
            group.register(names)

    together(3, train)


@pytest.mark.parametrize(("names", "problem"), [([], "no parameters"), (["a", "b", "a"], "a is registered twice")])
def test_names_that_cannot_be(names, problem):
    with dlcp.session.join(rank=0, size=1) as group, pytest.raises(ValueError, match=problem):
        group.register(names)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_arrays_are_broadcast_whole(size, monkeypatch):
    monkeypatch.setattr("dlcp.session.group.PART_BYTES", 1 << 14)

    def train(group):
        group.register(["w"])
        got = []
        for root in range(size):
            values = np.full((100, 99), group.rank, np.float64)
            group.broadcast(values, root)
            got.append(values)
            mine = np.full(2000, group.rank, np.float32)
            group.average({"w": mine})
            np.testing.assert_allclose(mine, (size - 1) / 2)
        group.broadcast(np.empty(0))
        number = np.array(group.rank)
        group.broadcast(number, 1)
        with pytest.raises(ValueError, match="contiguous and writable"):
            group.broadcast(np.zeros((4, 4)).T[1:])
        return got, int(number)

    for got, number in together(size, train):
        assert number == 1
        for root, values in enumerate(got):
            np.testing.assert_array_equal(values, np.full((100, 99), root))


def test_ranks_join_again_and_find_each_other():
    master = f"127.0.0.1:{free_port()}"

    def one(rank):
        found = []
        with dlcp.session.join(rank=rank, size=2, master=master) as outer:
            for _ in range(2):
                with dlcp.session.join(rank=rank, size=2, master=master) as group:
                    group.register(["w"])
                    values = np.full(10, group.rank, np.float32)
                    group.average({"w": values})
                    group.barrier()
                    found.append(values[0])
            outer.barrier()
        return found

    assert on_ranks(2, one) == {0: [0.5, 0.5], 1: [0.5, 0.5]}


SIZES = {"a": 40_000, "b": 30_000}
STEPS = 8


def lossy_gradients(rank, step):
    generator = np.random.default_rng([step, rank])
    return {name: generator.standard_normal(count).astype(np.float32) for name, count in SIZES.items()}


def train_with_loss(group):
    group.register(SIZES)
    total = dict.fromkeys(SIZES, 0.0)
    for step in range(STEPS):
        mine = lossy_gradients(group.rank, step)
        group.average(mine)
        total = {name: total[name] + mine[name].astype(np.float64) for name in SIZES}
    return total, group.ledger.summary()


def test_with_loss_replicas_stay_identical_and_the_bound_is_kept():
    ranks = 3
    ports = free_udp_ports(ranks)
    with BadNetwork(ports, seed=3) as network:
        network.weather = Weather(loss=0.05)
        common = Options(payload_bytes=1440, immediate=True, tag_policy=ALL_DROPPABLE, precision=32)
        options = [
            common.with_(bind=f"127.0.0.1:{port}", advertise=f"{host}:{place}")
            for port, (host, place) in zip(ports, network.places, strict=True)
        ]
        results = together(ranks, train_with_loss, options)
    assert sum(ledger["lost"] for _, ledger in results) > 20
    for total, ledger in results:
        assert ledger["violations"] == 0
        assert ledger["max_message_ratio"] <= 0.1
        for name in SIZES:
            np.testing.assert_array_equal(total[name], results[0][0][name], "replicas are identical")
            gradients = [lossy_gradients(rank, step)[name] for rank in range(ranks) for step in range(STEPS)]
            wrong = np.abs(total[name] - np.sum(gradients, 0, np.float64) / ranks) > 1e-4
            # What a step lost was sent with the next one: the last step's losses alone are missing.
            assert wrong.mean() < 0.35


def test_buckets_are_filled_from_the_back_the_first_one_less(monkeypatch):
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 400)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1000)
    layers = layers_in_order([f"layer{number}" for number in range(9)])
    sizes = [10, 100, 700, 200, 40, 50, 30, 60, 50]
    kinds = [ValueType.FLOAT32] * 4 + [ValueType.FLOAT16] + [ValueType.FLOAT32] * 4
    plan = BucketPlan.of(zip(layers.values(), sizes, kinds, strict=True))
    found = [[segment.layer.name[-1] for segment in bucket.segments] for bucket in plan.buckets]
    assert found == [["8"], ["7", "6", "5"], ["4"], ["3"], ["2"], ["1", "0"]]
    assert [bucket.sequence for bucket in plan.buckets] == list(range(6))
    for name, place in plan.slots.items():
        segments = {s.layer.name: (s.start, s.stop) for s in plan.buckets[place.bucket].segments}
        assert segments[name] == (place.start, place.stop)


def test_front_layers_are_tagged_the_most_urgent():
    def train(group):
        group.register(["front.weight", "middle.weight", "back.weight"])
        for _ in range(2):
            group.average(
                {name: np.ones(3000, np.float32) for name in ("front.weight", "middle.weight", "back.weight")}
            )
        return {int(position) for position in group.ledger.summary()["by_layer"]}

    for positions in together(2, train):
        assert positions == {0, 128, 255}


def test_means_over_ranks_are_the_same_to_the_bit():
    def run(group):
        own = np.random.default_rng(group.rank).standard_normal((3, 700)).astype(np.float32)[:, ::2]
        means = mean_over_ranks(own, group)
        return own, means, average_metrics({"loss": group.rank, "accuracy": 0.5}, group)

    results = together(3, run)
    for _, means, metrics in results:
        assert means.tobytes() == results[0][1].tobytes()
        np.testing.assert_allclose(means, np.mean([own for own, _, _ in results], 0, np.float64), rtol=1e-12)
        assert metrics == {"loss": 1.0, "accuracy": 0.5}
