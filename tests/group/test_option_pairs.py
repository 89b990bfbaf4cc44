# SPDX-License-Identifier: Apache-2.0
"""Every pair of options either trains, with equal replicas on a network that loses packets, or is refused by name."""

import itertools
import random
from importlib.util import find_spec

import numpy as np
import pytest

from dlcp.session import Options
from dlcp.transport import Endpoint
from dlcp.values.dtypes import ValueType
from tests.families import has_raw_sockets
from tests.faults.lossy_sockets import lossy_endpoints
from tests.group.group_ranks import serving, together

RANKS = 3
STEPS = 4
"""A parameter server leaves the first two steps in full precision."""
SHAPES = {"front.weight": (70, 100), "front.bias": (100,), "back.weight": (100, 60)}
LOSS = 0.05

VALUES = {
    "compression": ["", "fp16", "topk:0.1", "randomk:0.1", "qsgd:4", "terngrad", "signsgd", "efsignsgd", "atomo:2",
                    "powersgd:2"],
    "collective": ["direct", "ring", "auto", "server:127.0.0.1:9"],
    "combine": ["average", "sum", "adasum"],
    "value_type": [kind for kind in ValueType if kind is not ValueType.BFLOAT16 or find_spec("ml_dtypes")],
    "congestion": ["dctcp", "ecn", "cubic"],
    "loss_bound": [0.1, 0.0, "0.1, front.*=0, back.*=0.3"],
    "immediate": [False, True],
    "error_feedback": [True, False],
    "samples": [0, 16],
    "shared_memory": [True, False],
    "payload_bytes": [512, 1024],
    "tagged": [True, False],
    "foreign_trimming": [False, *([True] if has_raw_sockets() else [])],
    "fallback": [True, False],
    "flush": [False, True],
}  # fmt: skip
NOT_OPTIONS = "value_type", "flush"


def given(combination):
    """Return a combination's options; what it does not say is the default, or whatever does not rule the rest out."""
    open_choices = {"fallback": False}
    return open_choices | {name: combination[name] for name in combination if name not in NOT_OPTIONS}


def refusal(combination):
    """Return the error with which a combination is refused; None if it is not."""
    try:
        Options(**given(combination))
    except ValueError as error:
        return error
    return None


def all_pairs(values, seed=1):
    """Return combinations that are not refused, and pairs that are: each two values of two options are in either.

    Each combination begins with a pair that no other has, and takes, one option at a time, whichever value has most
    pairs that no other has.
    """
    draw, names = random.Random(seed), list(values)
    places = [(name, place) for name in names for place in range(len(values[name]))]
    missing = dict.fromkeys(pair for pair in itertools.combinations(places, 2) if pair[0][0] != pair[1][0])
    found, refused = [], []
    while missing:
        chosen = dict(next(iter(missing)))
        if refusal(_values(values, chosen)):
            refused.append(_values(values, chosen))
            del missing[next(iter(missing))]
            continue
        for name in draw.sample(names, len(names)):
            if name not in chosen:
                admitted = [
                    place
                    for place in draw.sample(range(len(values[name])), len(values[name]))
                    if not refusal(_values(values, {**chosen, name: place}))
                ]
                chosen[name] = max(admitted, key=lambda place: _gain(missing, names, chosen, name, place))
        for pair in _pairs(names, chosen):
            missing.pop(pair, None)
        found.append(_values(values, chosen))
    return found, refused


def _values(values, chosen):
    return {name: values[name][place] for name, place in chosen.items()}


def _pairs(names, chosen):
    return itertools.combinations([(name, chosen[name]) for name in names], 2)


def _gain(missing, names, chosen, name, place):
    pairs = (sorted([(name, place), other], key=lambda each: names.index(each[0])) for other in chosen.items())
    return sum(tuple(pair) in missing for pair in pairs)


@pytest.fixture(autouse=True)
def lossy_network(monkeypatch):
    monkeypatch.setattr(Endpoint, "__init__", lossy_endpoints(LOSS))


def gradients(rank, step, value_type):
    generator = np.random.default_rng([rank, step])
    kind = np.float64 if value_type is ValueType.FLOAT64 else np.float32
    found = {name: value_type.narrow(generator.standard_normal(shape).astype(kind)) for name, shape in SHAPES.items()}
    if value_type is ValueType.BFLOAT16:
        import ml_dtypes

        return {name: values.view(ml_dtypes.bfloat16) for name, values in found.items()}
    return found


def train(group, combination):
    """Take some steps; return all averages."""
    group.register(SHAPES)
    got = []
    for step in range(STEPS):
        if combination["samples"]:
            group.samples(8 * (group.rank + step))
        if combination["flush"] and step == STEPS - 1:
            group.flush()
        mine = gradients(group.rank, step, combination["value_type"])
        group.average(mine)
        assert group.active, group.reason
        got.append(mine)
    group.barrier()
    return got


@pytest.fixture(scope="module")
def server():
    """A parameter server, which serves all these trainings: they tell it their options."""
    with serving() as found:
        yield f"{found.address[0]}:{found.address[1]}"


def run(combination, server):
    """Train with a combination; return all averages of each rank."""
    chosen = given(combination)
    if chosen["collective"].startswith("server:"):
        chosen["collective"] = f"server:{server}"
    options = Options(deadline_s=15.0, meet_s=15.0, **chosen)
    return together(RANKS, lambda group: train(group, combination), options)


COMBINATIONS, REFUSED = all_pairs(VALUES)


def shown(combination):
    """What is not the default, for the name of a test."""
    changed = {name: value for name, value in combination.items() if value != VALUES[name][0]}
    return " ".join(f"{name}={getattr(value, 'value', value)}" for name, value in changed.items())


@pytest.mark.parametrize("combination", COMBINATIONS, ids=shown)
def test_options_go_together(combination, server):
    results = run(combination, server)
    for other in results[1:]:
        for step, averages in enumerate(other):
            for name, values in averages.items():
                assert values.tobytes() == results[0][step][name].tobytes(), f"replicas differ at step {step}: {name}"
                assert np.isfinite(values.astype(np.float64)).all()


def test_a_refusal_names_both_options():
    assert REFUSED
    for pair in REFUSED:
        text = str(refusal(pair))
        for name in pair:
            assert name in text, f"{pair} is refused by {text!r}"
