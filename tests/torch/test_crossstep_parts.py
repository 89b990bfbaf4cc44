# SPDX-License-Identifier: Apache-2.0
"""Cross-step scheduling without a network: groups, partial steps, and who waits when a parameter is read."""

import copy
import pickle

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from dlcp.session.options import Options
from dlcp.torch.crossstep import cross_step
from dlcp.torch.layers import LayerGroup, in_groups
from dlcp.torch.partial_step import Guard, PartialStep
from dlcp.values.tags import Layer, layers_in_order
from dlcp.wire.payloads import PLANE_BLOCK_VALUES


def described(net):
    layers = layers_in_order([name for name, _ in net.named_parameters()])
    return [(name, parameter, layers[name]) for name, parameter in net.named_parameters()]


def names_in(groups):
    return [[name for name, *_ in group] for group in groups]


def test_groups_reach_the_least_size_and_keep_modules_whole():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    # 80, 32, 80, 80 bytes
    assert names_in(in_groups(described(net), 100)) == [
        ["0.weight", "0.bias", "1.weight", "1.bias"],
        ["2.weight", "2.bias", "3.weight", "3.bias"],
    ]
    assert names_in(in_groups(described(net), 1)) == [[f"{i}.weight", f"{i}.bias"] for i in range(4)]
    assert len(in_groups(described(net), 1 << 20)) == 1


def test_groups_grow_away_from_the_input():
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(16)))  # 64 bytes each
    assert [len(group) for group in in_groups(described(net), 64)] == [1, 2, 4, 4, 4, 1]


def test_groups_hold_one_type_each():
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).double()])
    assert names_in(in_groups(described(net), 1 << 20)) == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias", "2.weight", "2.bias"],
    ]


def test_a_group_says_what_was_used_and_leaves_the_rest_alone():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(3, 1)).to(memory_format=torch.channels_last)
    group = LayerGroup(0, described(net))
    assert [segment.stop - segment.start for segment in group.segments] == [54, 3, 3, 1] + 5 * [PLANE_BLOCK_VALUES]
    weight, bias, unused, late = group.members
    weight.parameter.grad = gradient = torch.randn(3, 2, 3, 3).to(memory_format=torch.channels_last)
    bias.parameter.grad = torch.randn(3)
    weight.take()
    assert not group.complete
    bias.take()
    late.parameter.grad = torch.tensor([5.0])
    group.fill(updates=3)
    assert group.members[0].average.stride() == weight.parameter.stride()
    assert torch.equal(weight.average, gradient)
    assert weight.parameter.grad.data_ptr() == weight.average.data_ptr(), "backward's own memory is free again"
    values, flags = group.flat, group.flat[54 + 3 + 3 + 1 :].view(5, PLANE_BLOCK_VALUES)
    group.read_flags(values)
    assert [member.name for member in group.used()] == ["0.weight", "0.bias", "1.bias"]
    assert flags[:, -1].tolist() == [1, 1, 0, 1, 1]
    assert not flags[:, :-1].any()
    assert group.agreed
    assert late.average.item() == 5
    assert not unused.average.any()
    flags[4, -1] = 0.5  # another rank has updated an even number of times
    flags[2, -1] = 0.5  # and has used what this one has not
    group.read_flags(values)
    assert not group.agreed
    assert unused in group.used()


def test_changing_one_gradient_is_no_change_of_its_neighbours():
    net = nn.Linear(2, 2)
    group = LayerGroup(0, described(net))
    for member in group.members:
        member.parameter.grad = member.average
        member.take()
    net.bias.grad.mul_(2)
    assert [member.unchanged for member in group.members] == [True, False]
    group.members[1].take()
    assert [member.in_buffer and member.unchanged for member in group.members] == [True, True]
    net.weight.grad = net.weight.grad.clone()
    assert [member.in_buffer for member in group.members] == [False, True]


def test_what_is_on_its_way_is_not_harmed_by_gradients_of_zeros():
    net = nn.Linear(2, 2)
    (weight, _) = LayerGroup(0, described(net)).members
    net.weight.grad = weight.average  # as the last step has left it
    net.weight.grad += 3
    weight.take()
    weight.detach()
    assert torch.equal(net.weight.grad, torch.zeros(2, 2))
    net.weight.grad += 4
    assert weight.unchanged
    assert torch.equal(weight.average, torch.full((2, 2), 3.0))


def test_a_group_has_its_gradients_in_exported_memory_until_it_leaves_that():
    net = nn.Linear(3, 2).half()
    group = LayerGroup(0, described(net))
    flags = 3 * PLANE_BLOCK_VALUES
    assert group.host_bytes == (6 + 2 + flags) * 2, "values of two bytes"
    group.leave_exported()
    memory = np.zeros(group.host_bytes, np.uint8)
    group.move_to(memory)
    assert group.exported
    for member in group.members:
        member.parameter.grad = torch.randn_like(member.parameter)
    group.members[0].take()
    expected, bias = net.weight.grad.clone(), net.bias.grad
    assert torch.equal(torch.from_numpy(memory[:12].view(np.float16)).view(2, 3), expected)
    group.leave_exported()
    memory[:] = 0x7F
    assert torch.equal(net.weight.grad, expected)
    assert net.bias.grad is bias, "it has never been there"


def test_a_sparse_gradient_is_refused_by_name():
    net = nn.ModuleDict({"words": nn.Embedding(9, 2, sparse=True)})
    group = LayerGroup(0, described(net))
    net["words"](torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"words\.weight is torch\.sparse.*sparse=False"):
        group.members[0].take()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.Rprop(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False, capturable=False),
    ],
)
def test_partial_steps_in_any_order_make_a_whole_step(make):
    results = []
    for partial in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = make([{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}])
        steps = PartialStep(optimizer) if partial else None
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(5, 3)).square().sum().backward()
            if not partial:
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
                continue
            settings = steps.settings()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # a scheduler goes on before the update
            steps.update([net[1].bias, net[0].weight], settings)
            steps.update([net[1].weight], settings)
            steps.update([net[0].bias], settings)
        results.append((net.state_dict(), optimizer.state_dict()["state"]))
    (whole, whole_state), (parts, part_state) = results
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    for index, state in whole_state.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(part_state[index][name])), name


class CountsInGroup(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


def test_an_optimizer_with_state_for_all_parameters_is_refused():
    net = nn.Linear(2, 2)
    optimizer = CountsInGroup(net.parameters(), lr=0.1)
    steps = PartialStep(optimizer)
    with pytest.raises(RuntimeError, match=r"CountsInGroup changes 'count'.*dlcp\.torch\.enable"):
        steps.update([net.weight], steps.settings())
    with pytest.raises(ValueError, match="LBFGS cannot be stepped layer by layer"):
        PartialStep(torch.optim.LBFGS(net.parameters()))


@pytest.mark.parametrize(
    "chosen",
    [
        {"compression": "topk:0.1"},
        {"combine": "adasum", "fallback": False},
        {"samples": 8},
    ],
    ids=lambda chosen: next(iter(chosen)),
)
def test_what_it_does_not_do_is_refused(chosen):
    net = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=rf"cross-step .* does not support {next(iter(chosen))}=.* use dlcp\.torch\.enable"
    ):
        cross_step(net, torch.optim.SGD(net.parameters(), lr=1.0), options=Options(**chosen))


def test_the_optimizers_own_step_is_refused_until_released():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    steps = PartialStep(optimizer)
    net.weight.data.zero_()  # so that two steps of one are a step of two, to the bit
    net.weight.grad = torch.ones(2, 2)
    before = net.weight.detach().clone()
    with pytest.raises(RuntimeError, match="the optimizer that cross_step returned"):
        optimizer.step()
    assert torch.equal(net.weight, before)
    assert not steps.watched
    steps.whole()
    steps.release()
    optimizer.step()
    assert torch.equal(net.weight, before - 2)


def test_hooks_around_the_step_are_seen():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    steps = PartialStep(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert steps.watched


class Reader(nn.Module):
    """Reads parameters in many ways."""

    def __init__(self):
        super().__init__()
        self.direct = nn.Parameter(torch.ones(3))
        self.listed = nn.ParameterList([torch.ones(3)])
        self.called = nn.Linear(3, 3)
        self.not_called = nn.Linear(3, 3)
        self.recurrent = nn.LSTM(3, 3)
        self.empty = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return nn.functional.linear(x, self.not_called.weight)


@pytest.fixture
def reader():
    net = Reader()
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    waited = []

    def wait(parameters):
        waited.extend(names[id(parameter)] for parameter in parameters if id(parameter) in names)

    return net, waited, Guard(net, wait)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda net: net.direct, ["direct"]),
        (lambda net: net.listed[0], ["listed.0"]),
        (lambda net: net.not_called.weight, ["not_called.weight"]),
        (lambda net: net.called(torch.ones(3)), ["called.weight", "called.bias"]),
        (lambda net: net.recurrent(torch.ones(1, 3)), [f"recurrent.{k}_{p}_l0" for k in ("weight", "bias")
                                                        for p in ("ih", "hh")]),
        (lambda net: net.empty.bias, []),
        (lambda net: next(net.called.parameters()), ["called.weight", "called.bias"]),
        (lambda net: net.get_parameter("called.bias"), ["called.bias"]),
        (lambda net: net.called.state_dict(), ["called.weight", "called.bias"]),
        (lambda net: net.called.load_state_dict(copy.deepcopy(Reader().called.state_dict())),
         ["called.weight", "called.bias"]),
        (lambda net: copy.deepcopy(net.called), ["called.weight", "called.bias"]),
        (lambda net: torch.func.functional_call(net.called, {}, torch.ones(3)), ["called.weight", "called.bias"]),
    ],
)  # fmt: skip
def test_whoever_reads_a_parameter_waits_for_it_and_for_no_other_module(reader, read, expected):
    net, waited, _ = reader
    read(net)
    assert sorted(set(waited)) == sorted(expected)


def test_a_forward_pass_waits_for_what_it_reads_without_calling(reader):
    net, waited, _ = reader
    net(torch.ones(3))
    assert set(waited) == {"direct", "not_called.weight"}, "its own, and what it reads"


def test_copies_and_pickles_of_a_guarded_model_are_plain(reader):
    net, waited, _ = reader
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert set(waited) == set(dict(net.named_parameters()))
        waited.clear()
        assert all(type(module._parameters) is dict for module in other.modules())
        other(torch.ones(3))
        other.called(torch.ones(3))
        assert waited == []
        assert torch.equal(other.direct, net.direct.detach())
        assert list(other.state_dict()) == list(net.state_dict())


def test_a_guard_comes_off_and_leaves_another_one_on(reader):
    net, waited, first = reader
    others = []
    second = Guard(net, lambda parameters: others.extend(parameters))
    _ = net.direct
    assert (len(waited), len(others)) == (1, 1)
    first.remove()
    net.called(torch.ones(3))
    _ = net.direct
    assert len(waited) == 1
    assert len(others) > 1
    second.remove()
    others.clear()
    net.called(torch.ones(3))
    assert others == []
    assert all(type(module._parameters) is dict for module in net.modules())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_layers_carry_the_positions_that_tags_need():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    group = LayerGroup(0, described(net))
    flags = 5 * [Layer("1.bias", 255, (0,))]
    assert [segment.layer for segment in group.segments] == [
        Layer("0.weight", 0), Layer("0.bias", 0), Layer("1.weight", 255), Layer("1.bias", 255), *flags
    ]  # fmt: skip
    assert group.label == "0.weight..1.bias"
