# SPDX-License-Identifier: Apache-2.0
"""The effect of ``dlcp train`` on a script's models, in real ranks over 127.0.0.1."""

import os

import pytest

from dlcp.train import headroom
from dlcp.train.launcher import WorkerTask, read_reports
from dlcp.train.worker import ScriptSession
from tests.torch.workers import launch, values
from tests.train.scripts import in_session, make, plain_script, train
from tests.transport.free_ports import free_port, free_udp_ports

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(110)


def only_model(report):
    (model,) = report["models"]
    return model


def with_and_without(worker):
    """One launch for everything that needs two ranks and ends well."""
    import contextlib
    import io

    found = {"plain": plain_script(worker)}
    for name, script in SCRIPTS.items():
        with contextlib.redirect_stderr(io.StringIO()) as said:
            found[name] = (*in_session(worker, script), said.getvalue())
    return found


def accumulating(worker):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make())
    with torch.no_grad():
        model(torch.ones(1, 32))
    assert not model._comm_hooks, "nothing is trained yet"
    with model.no_sync():
        model(torch.ones(1, 32)).sum().backward()
    assert model._comm_hooks, "a pipeline runs all its forward passes like this one"
    train(model, 2)
    return


def enabling_itself(worker):
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch

    model = DistributedDataParallel(make())
    state = dlcp.torch.enable(model, worker.options(loss_bound=0.0))
    train(model)
    state.close()


def sharding(worker):
    from torch.distributed.fsdp import fully_shard

    import dlcp.torch

    model = fully_shard(make())
    state = dlcp.torch.enable(model, worker.options(loss_bound=0.0))
    train(model)
    state.close()


def with_a_hook(worker):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make())
    model.register_comm_hook(None, fp16_compress_hook)
    train(model)


def sparse(worker):
    """A model with sparse gradients, and one without."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    words = DistributedDataParallel(nn.EmbeddingBag(20, 4, sparse=True))
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        words(torch.tensor([[1, 2], [worker.rank + 3, 4]])).sum().backward()
        optimizer.step()
    train(DistributedDataParallel(make()), 2)
    return words.module.weight.sum().item()


def sparse_measured(worker):
    return in_session(worker, sparse, WorkerTask(measure_steps=6))


def joining(worker, **how):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make())
    with model.join(**how):
        train(model, 3 + worker.rank)


def joining_unevenly(worker):
    joining(worker, divide_by_initial_world_size=False)


def with_the_python_reducer(worker):
    import torch

    torch._dynamo.config.optimize_ddp = "python_reducer"
    train(plain_model(), 2)
    torch._dynamo.config.optimize_ddp = "ddp_optimizer"


def plain_model():
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(make())


def two_models(worker):
    import os

    from torch.nn.parallel import DistributedDataParallel

    first, second = (DistributedDataParallel(make(seed)) for seed in (1, 2))
    del os.environ["DLCP_BIND"]  # two models need two ports
    train(first, 2)
    train(second, 3)


def subclassed(worker):
    from torch.nn.parallel import DistributedDataParallel

    class Wrapped(DistributedDataParallel):
        def __init__(self, module):
            super().__init__(module, gradient_as_bucket_view=True)

    train(torch.compile(Wrapped(make()), backend="eager"), 2)


def without_a_model(worker):
    return "nothing trained"


SCRIPTS = {
    "unchanged": plain_script,
    "accumulating": accumulating,
    "enabling itself": enabling_itself,
    "sharding": sharding,
    "with a hook": with_a_hook,
    "joining": joining,
    "joining unevenly": joining_unevenly,
    "python reducer": with_the_python_reducer,
    "sparse": sparse,
    "two models": two_models,
    "subclassed": subclassed,
    "without a model": without_a_model,
}


@pytest.fixture(scope="module")
def ranks():
    return values(launch(2, with_and_without))


def test_an_unchanged_script_trains_over_dlcp_to_the_same_bits(ranks):
    for found in ranks:
        digest, report, _ = found["unchanged"]
        assert digest == found["plain"]
        model = only_model(report)
        assert (model["on"], model["steps"], model["fallback"]) == (True, 4, None)
        assert model["ledger"]["sent"] > 0
        assert model["ledger"]["violations"] == 0
        assert model["note"] == "switched on by dlcp train"
    told = "dlcp: averages the gradients of Sequential (2,762 parameters) over 2 ranks: loss bound 10%"
    assert ranks[0]["unchanged"][2].count(told) == 1
    assert "averages" not in ranks[1]["unchanged"][2], "one rank speaks"


def test_dlcp_is_switched_on_at_the_first_synchronised_forward_pass(ranks):
    for found in ranks:
        error, report, _ = found["accumulating"]
        assert error is None, error
        assert only_model(report)["steps"] == 2


@pytest.mark.parametrize("script", ["enabling itself", "sharding"])
def test_a_script_that_enables_dlcp_itself_keeps_its_choice(ranks, script):
    for found in ranks:
        error, report, _ = found[script]
        assert error is None, error
        model = only_model(report)
        assert (model["on"], model["note"]) == (True, "switched on by the script")
        assert (model["loss_bound"], model["steps"], model["fallback"]) == (0.0, 4, None)
        assert model["ledger"]["sent"] > 0


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("with a hook", "a communication hook of its own"),
        ("joining unevenly", "join(divide_by_initial_world_size=False)"),
        ("python reducer", 'optimize_ddp="python_reducer"'),
    ],
)
def test_what_cannot_be_taken_over_is_left_alone_and_said(ranks, script, why):
    for found in ranks:
        error, report, _ = found[script]
        assert error is None, error
        model = only_model(report)
        assert not model["on"]
        assert why in model["note"]
    assert "leaves Sequential (2,762 parameters) alone" in ranks[0][script][2]


def test_ranks_that_join_with_different_numbers_of_steps_train_over_dlcp(ranks):
    for found in ranks:
        error, report, _ = found["joining"]
        assert error is None, error
        assert (only_model(report)["on"], only_model(report)["steps"]) == (True, 4)


def test_a_model_with_sparse_gradients_is_left_alone_and_the_rest_trains(ranks):
    for found in ranks:
        value, report, _ = found["sparse"]
        assert isinstance(value, float), value
        assert value == ranks[0]["sparse"][0]
        words, dense = report["models"]
        assert (dense["on"], dense["steps"], words["on"]) == (True, 2, False)
        assert "weight has sparse gradients" in words["note"]
    assert "leaves EmbeddingBag (80 parameters) alone: parameter weight has sparse gradients" in ranks[0]["sparse"][2]


def test_a_model_with_sparse_gradients_is_not_measured():
    for error, report in values(launch(2, sparse_measured)):
        assert isinstance(error, float), error
        assert report["measured"]["model"] == "Sequential"


def test_every_model_has_its_own_account(ranks):
    for found in ranks:
        error, report, _ = found["two models"]
        assert error is None, error
        assert [model["steps"] for model in report["models"]] == [2, 3]


def test_subclasses_and_compiled_models_are_models(ranks):
    for found in ranks:
        error, report, _ = found["subclassed"]
        assert error is None, error
        assert only_model(report)["steps"] == 2


def test_a_script_without_a_model_is_none_of_our_business(ranks):
    for found in ranks:
        assert found["without a model"][0] == "nothing trained"
        assert found["without a model"][1]["models"] == []


def test_distributed_data_parallel_is_itself_again_afterwards(ranks):
    from torch.nn.parallel import DistributedDataParallel

    from dlcp.train.worker import watch

    before = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    with watch(print, print, "dlcp"):
        assert DistributedDataParallel.__init__ is not before[0]
    assert (DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook) == before


def sharded():
    """Train with FSDP2; return the parameters, whole."""
    from torch.distributed.fsdp import fully_shard

    model = make()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    train(model)
    return [parameter.full_tensor().tolist() for parameter in model.parameters()]


def on_the_backend(worker, port):
    import torch.distributed as dist

    def script(worker):
        dist.init_process_group("gloo")
        total = torch.ones(3)
        dist.all_reduce(total)
        found = dist.get_backend(), total.tolist(), plain_script(worker), sharded() == over_gloo
        dist.destroy_process_group()
        return found

    over_gloo = sharded()
    dist.barrier()  # nobody leaves while another still connects
    dist.destroy_process_group()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return in_session(worker, script, WorkerTask(backend=True), DLCP_LOSS_BOUND="0", **where)


def test_a_script_that_asks_for_gloo_gets_the_backend(ranks):
    for value, report in values(launch(2, on_the_backend, str(free_port()))):
        assert not isinstance(value, BaseException), value
        assert value == ("dlcp", [2.0, 2.0, 2.0], ranks[0]["plain"], True)
        assert report["backend"] == "dlcp"


def failing(worker):
    def script(worker):
        plain_script(worker)
        if worker.rank == 1:
            raise KeyError("layer9")
        raise SystemExit(3)

    return in_session(worker, script)


def measuring(worker):
    def script(worker):
        from torch.nn.parallel import DistributedDataParallel

        train(DistributedDataParallel(make(width=2000)), 1000)
        return "never reached"

    os.environ |= {"DLCP_PRECISION": "auto", "DLCP_ROUTE": "auto"}
    return in_session(worker, script, WorkerTask(measure_steps=16))


def test_a_script_that_fails_is_reported_and_its_error_goes_on():
    first, second = values(launch(2, failing))
    assert isinstance(first[0], SystemExit)
    assert first[0].code == 3
    assert first[1]["error"] == "exit status 3"
    assert isinstance(second[0], KeyError)
    assert second[1]["error"] == "KeyError: 'layer9'"


def falling_back(worker):
    return in_session(worker, enabling_itself), in_session(worker, plain_script)


def test_a_fork_that_ends_leaves_the_report_to_the_rank(tmp_path):
    with ScriptSession(WorkerTask(reports=str(tmp_path))) as session:
        child = os.fork()
        if not child:
            try:
                session.__exit__(SystemExit, SystemExit(3), None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        (report,) = read_reports(tmp_path)
        assert not report["final"], "until the rank itself reports"
    (report,) = read_reports(tmp_path)
    assert report["final"]
    assert report["error"] is None


def test_a_script_that_changes_its_local_rank_reports_where_it_began(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with ScriptSession(WorkerTask(reports=str(tmp_path))):
        os.environ["LOCAL_RANK"] = "0"  # each rank sees only its own GPU
    (report,) = read_reports(tmp_path)
    assert (report["local_rank"], report["error"]) == (1, None)


def test_a_fallback_is_reported_even_where_the_script_closes_its_state():
    (port,) = free_udp_ports(1)  # one for two ranks: one of them finds it taken
    for rank in values(launch(2, falling_back, ports=[port, port])):
        for error, report in rank:
            assert not isinstance(error, BaseException), error
            assert str(port) in only_model(report)["fallback"]
            assert report["error"] is None, "training went on"


def test_without_peers_two_ways_are_measured_and_the_others_are_explained():
    ((_, report),) = values(launch(1, measuring))
    assert {way: len(seconds) for way, seconds in report["measured"]["seconds"].items()} == {"none": 8, "framework": 8}
    assert "group of one" in report["measured"]["why_not"]


def test_a_measurement_takes_all_ways_in_turn_and_ends_the_script():
    results = values(launch(2, measuring))
    for ended, report in results:
        assert isinstance(ended, SystemExit)
        assert ended.code == 0
        assert report["error"] is None
        assert {way: len(seconds) for way, seconds in report["measured"]["seconds"].items()} == {
            "none": 4,
            "framework": 4,
            "32 bits": 4,
            "8 bits": 4,
        }
        assert list(report["measured"]["steps_factors"]) == ["32 bits", "framework", "8 bits"]
        assert report["measured"]["gradient_bytes"] == 4 * (32 * 2000 + 2000 + 2000 * 10 + 10)
    found = headroom.evaluate([report for _, report in results])
    assert (found["ranks"], found["ranks_measured"], found["backend"]) == (2, 2, "gloo")
    assert all(way["step_s"] > 0 for way in found["ways"].values())
    assert found["speedup_at_most"] > 0
