# SPDX-License-Identifier: Apache-2.0
import itertools
from contextlib import contextmanager

import pytest

from tests.p4runtime.control import KINDS, Control, config
from tests.p4runtime.targets import Bmv2, BuiltIn

_election_ids = itertools.count(1)


def running(kind):
    missing = kind.missing()
    if missing:
        pytest.skip(missing)
    switch = kind()
    try:
        switch.start()
        yield switch
    finally:
        switch.stop()
        getattr(switch, "close", lambda: None)()


@pytest.fixture(scope="session")
def built_in():
    """A running built-in switch."""
    yield from running(BuiltIn)


@pytest.fixture(scope="session")
def bmv2():
    """A running simple_switch_grpc; skips where it is missing."""
    yield from running(Bmv2)


@pytest.fixture(params=["built_in", "bmv2"])
def target(request):
    """A running switch: the suite runs on the built-in one, and on simple_switch_grpc where it is there."""
    return request.getfixturevalue(request.param)


@contextmanager
def primary(switch):
    """Be the primary controller of a switch, and give it this project's program."""
    with Control(switch.address, strict=isinstance(switch, BuiltIn)) as control:
        control.arbitrate(next(_election_ids))
        control.set_pipeline(config())
        yield control


@pytest.fixture
def control(target):
    """The primary controller of a switch that has just been given this project's program."""
    with primary(target) as found:
        yield found


@pytest.fixture
def both(built_in, bmv2):
    """The primary controllers of both switches; skips where BMv2 is missing."""
    with primary(built_in) as ours, primary(bmv2) as theirs:
        yield ours, theirs


@pytest.fixture
def kinds(control):
    """The same of a switch that has been given ``program/kinds.p4``."""
    control.set_pipeline(config(KINDS))
    return control


@pytest.fixture
def next_id():
    """Return election ids, each higher than all there have been."""
    return lambda: next(_election_ids)
