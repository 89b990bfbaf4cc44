# SPDX-License-Identifier: Apache-2.0
"""Jobs that learn: their models miss exactly the values of lost packets."""

import msgspec
import numpy as np
import pytest

from dlcp.collectives.reduction_rules import average as real_average
from dlcp.sim.engines.packet_engine import MESSAGE_SIZE, PACKET_OUTCOME
from dlcp.sim.experiments.experiment import ExperimentRun, RunSetting
from dlcp.sim.experiments.running import run
from dlcp.sim.jobs import learning
from dlcp.sim.jobs.learning import (
    GradientExchange,
    LearningError,
    LearningSpec,
    ShardMessages,
    StepOutcome,
    TaskTrainer,
    decoded,
    shards_of,
)
from dlcp.sim.jobs.models import TASK_LAYERS
from dlcp.sim.jobs.training import TrainingJob
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.transports.specs import DctcpTransport, DlcpTransport
from dlcp.values.dtypes import ValueType
from dlcp.values.planes import PlaneLayout
from dlcp.values.tags import packet_magnitudes

WORKERS, PER_PACKET, PACKETS = 3, 10, 20
VALUES = PER_PACKET * PACKETS
WHOLE = np.array([(1, True)] * PACKETS, PACKET_OUTCOME)


def setting(**changes: object) -> RunSetting:
    """Four workers and two servers; one of the links loses packets."""
    job = {
        "name": "job",
        "model": "trained",
        "workers": 4,
        "servers": 2,
        "collective": "parameter_server",
        "scheduler": "dlcp",
        "piece_bytes": 60_000,
        "transport": "dlcp",
        "loss_bound": 0.1,
        "steps": 6,
        "jitter": 0.1,
        "learn": LearningSpec(task="table", target=0.6, batch=8, compute_s=1e-4),
    } | changes
    return RunSetting(
        topology=Star(hosts=6, host_link=LinkSpec(rate_gbps=10.0)),
        switches=SwitchSpec(discipline="dlcp", buffer_packets=30),
        transports={"dlcp": DlcpTransport(), "dctcp": DctcpTransport(), "gone": DlcpTransport(error_feedback=False)},
        training=(TrainingJob(**job),),
    )


def trained(given: RunSetting, engine: str = "kernel") -> dict:
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    return run(ExperimentRun(experiment="test", point={}, setting=given, convergence="published"), engine)


def curve(document: dict) -> list[tuple[int, float, float]]:
    return [(each["step"], each["accuracy"], each["loss"]) for each in document["jobs"][0]["curve"]]


def one_shard(owner: int = -1) -> list[ShardMessages]:
    nodes = np.arange(WORKERS)
    return [ShardMessages(0, 4 * VALUES, owner, nodes, nodes, WORKERS + nodes)]


def outcome(lacking: dict) -> StepOutcome:
    sizes = np.zeros(2 * WORKERS, MESSAGE_SIZE)
    sizes["packets"] = PACKETS
    return StepOutcome(sizes, 32, lacking)


def exchange(**changes: object) -> GradientExchange:
    return GradientExchange([VALUES], WORKERS, value_bytes=4, payload_bytes=4 * PER_PACKET, **changes)


@pytest.fixture
def gradients() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((WORKERS, VALUES)).astype(np.float32)


def lose(*positions: int, classes: list[int] | None = None) -> np.ndarray:
    packets = WHOLE.copy()
    packets["drop_class"] = classes if classes is not None else np.arange(PACKETS) // 3
    packets["delivered"][list(positions)] = False
    return packets


def test_lost_packets_are_missing_once_and_come_with_the_next_step(gradients: np.ndarray) -> None:
    ours, whole = exchange(), gradients.copy()
    # The last packet by drop class takes the place of the one with the smallest magnitude.
    found = ours.average(gradients.copy(), one_shard(), outcome({1: lose(PACKETS - 1)}))
    least = int(packet_magnitudes(whole[1], ValueType.FLOAT32, PER_PACKET).argmin())
    lost = slice(least * PER_PACKET, (least + 1) * PER_PACKET)
    delivered = whole.copy()
    delivered[1, lost] = 0
    np.testing.assert_array_equal(found, delivered.sum(0) / np.float32(WORKERS))
    np.testing.assert_array_equal(ours.residual[1, lost], whole[1, lost])
    assert np.count_nonzero(ours.residual) == PER_PACKET
    later = ours.average(np.zeros_like(gradients), one_shard(), outcome({}))
    np.testing.assert_array_equal(later[lost], whole[1, lost] / np.float32(WORKERS))
    assert not np.delete(later, np.arange(VALUES)[lost]).any()
    assert not ours.residual.any()


def test_averages_are_those_of_real_ranks(gradients: np.ndarray) -> None:
    """With and without error feedback, for the packets that are missing here."""
    for feedback in (True, False):
        ours = exchange(error_feedback=feedback)
        lacking = {0: lose(19, 12), 2: lose(17)}
        found = ours.average(gradients.copy(), one_shard(), outcome(lacking))
        delivered = {}
        for rank, row in enumerate(gradients):
            order = np.argsort(-packet_magnitudes(row, ValueType.FLOAT32, PER_PACKET), kind="stable")
            mask = np.ones(PACKETS, bool)
            if rank in lacking:
                mask[order[~lacking[rank]["delivered"]]] = False
            delivered[rank] = mask
        rows = {rank: row * np.repeat(delivered[rank], PER_PACKET) for rank, row in enumerate(gradients)}
        expected = real_average(rows, delivered, ValueType.FLOAT32, PER_PACKET, rescale=not feedback)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
        assert ours.residual.any() == feedback


@pytest.mark.parametrize("owner", [-1, 1])
def test_rounding_is_sent_later(gradients: np.ndarray, owner: int) -> None:
    ours, given = exchange(), outcome({})
    layout = PlaneLayout(VALUES, 8, 4 * PER_PACKET)
    given.sizes["packets"], given.sizes["upper"] = 2 * layout.packets, layout.packets
    upper = [(0, True)] * layout.packets
    lower = np.array([*upper, *[(3, True)] * (layout.packets - 1), (7, False)], PACKET_OUTCOME)
    found = ours.average(gradients.copy(), one_shard(owner), StepOutcome(given.sizes, 8, {0: lower}))
    mean = gradients.mean(0, dtype=float)
    assert 0 < np.abs(found - mean).max() < 0.2
    total = WORKERS * found.astype(float) + ours.residual.sum(0) + WORKERS * ours.rounded_off
    np.testing.assert_allclose(total, gradients.sum(0, dtype=float), atol=1e-5)
    whole, upper = decoded(gradients, 8)
    assert np.abs(upper - gradients).max() > 4 * np.abs(whole - gradients).max()


def test_nothing_lost_is_plain_training() -> None:
    """Over another transport, with other pieces, in other order: the same model after the same steps."""
    given = {"loss_bound": 0.0}
    plain = curve(trained(setting(transport="dctcp", scheduler="fifo", **given)))
    assert curve(trained(setting(**given))) == plain
    assert curve(trained(setting(loss_bound=0.1, collective="direct", servers=0, workers=6))) != plain
    lost = trained(setting(loss_bound=0.1))
    assert lost["metrics"]["loss_ratio"] > 0
    assert curve(lost)[1:] != plain[1:]
    # What is lost shows in the accuracy, not in the time.
    job = setting(loss_bound=0.1).training[0]
    assert [each["seconds"] for each in lost["jobs"][0]["curve"]][-1] == pytest.approx(
        sum(lost["jobs"][0]["step_s"]), rel=1e-6
    )
    assert len(curve(lost)) == job.steps + 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"transport": "gone"},
        {"precision": "auto"},
        {"collective": "direct", "servers": 0, "workers": 6, "precision": 8},
    ],
    ids=["loss", "without feedback", "precision", "direct"],
)
def test_both_engines_train_the_same(changes: dict) -> None:
    given = setting(**{"steps": 3, **changes})
    kernel, reference = trained(given), trained(given, "reference")
    assert kernel["jobs"] == reference["jobs"]
    assert kernel["metrics"] == reference["metrics"]
    assert ("precision" in changes) == (8 in kernel["jobs"][0].get("bits", []))
    assert "precision" in changes or kernel["metrics"]["loss_ratio"] > 0


def test_messages_divide_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    seen = []

    def note(nodes: np.ndarray, step: int, workers: tuple[int, ...]) -> list[ShardMessages]:
        seen.append(shards_of(nodes, step, workers))
        return seen[-1]

    monkeypatch.setattr(learning, "shards_of", note)
    trained(setting(steps=5))
    assert len(seen) == 5
    for shards in seen:
        ends = [shard.first_byte + shard.size_bytes for shard in shards]
        assert [0, *ends[:-1]] == [shard.first_byte for shard in shards]
        assert ends[-1] == 4 * sum(layer.parameters for layer in TASK_LAYERS["table"])
        for shard in shards:
            assert shard.ranks.tolist() == [0, 1, 2, 3]
            assert len(shard.results) == 4


@pytest.mark.parametrize("task", TASK_LAYERS)
def test_described_networks_are_those_that_are_trained(task: str) -> None:
    pytest.importorskip("torch")
    spec = LearningSpec(task=task, target=0.5, batch=1)
    trainer = TaskTrainer(spec, "sgd", workers=2, steps=1, seed=1)
    described = sum(layer.parameters for layer in TASK_LAYERS[task])
    # The alphabet of `text` depends on the version of Python.
    assert sum(trainer.sizes) == pytest.approx(described, rel=0.02 if task == "text" else 0)
    assert trainer.gradients().shape == (2, sum(trainer.sizes))


def test_gradients_are_those_of_each_worker() -> None:
    torch = pytest.importorskip("torch")
    trainer = TaskTrainer(LearningSpec(task="text", target=0.5, batch=2), "sgd", workers=3, steps=1, seed=1)
    batches = next(trainer._batches)
    inputs, labels = trainer._data.train_inputs[batches], trainer._data.train_labels[batches]
    trainer._batches = iter([batches])
    one_by_one = torch.stack([trainer._gradient(*worker) for worker in zip(inputs, labels, strict=True)])
    np.testing.assert_allclose(trainer.gradients(), one_by_one.numpy(), atol=1e-5)


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"there is no task 'digit'; did you mean digits\?"):
        LearningSpec(task="digit", target=0.5)
    with pytest.raises(msgspec.ValidationError, match="target"):
        msgspec.convert({"task": "digits"}, LearningSpec)
    job = setting().training[0]
    with pytest.raises(ValueError, match="add `learn`"):
        msgspec.structs.replace(job, learn=None)
    with pytest.raises(ValueError, match="got collective 'ring' with loss_bound"):
        msgspec.structs.replace(job, collective="ring", servers=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LearningError, match=r"need PyTorch, which is not installed: pip install 'dlcp\[sim,demo\]'"):
        TaskTrainer(job.learn, "sgd", 4, 6, 1)
