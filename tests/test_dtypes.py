# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from dlcp.values.dtypes import ValueType

EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def awkward_floats():
    """Float32 values that rounding gets wrong first: ties, neighbours of ties, subnormals, overflow, not numbers."""
    halves = EVERY_PATTERN.astype(np.uint32) << 16
    near_ties = [halves | low for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    return np.concatenate([*near_ties, np.random.default_rng(0).integers(0, 1 << 32, 50_000, np.uint32)]).view(
        np.float32
    )


def test_every_bfloat16_widens_as_in_torch(torch):
    expected = torch.from_numpy(EVERY_PATTERN.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(ValueType.BFLOAT16.widen(EVERY_PATTERN), expected)


def test_bfloat16_rounds_as_in_torch(torch):
    floats = awkward_floats()
    ours = ValueType.BFLOAT16.narrow(floats)
    theirs = torch.from_numpy(floats.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(floats)
    np.testing.assert_array_equal(ours[numbers], theirs[numbers])
    assert np.isnan(ValueType.BFLOAT16.widen(ours[~numbers])).all()
    assert (~numbers).sum() > 1000


def test_float16_rounds_as_in_torch(torch):
    floats = awkward_floats()
    ours = ValueType.FLOAT16.narrow(floats)
    theirs = torch.from_numpy(floats.copy()).half().numpy()
    np.testing.assert_array_equal(ours, theirs)
    assert np.isinf(ours).any()


@pytest.mark.parametrize("value_type", list(ValueType))
def test_narrow_undoes_widen(value_type):
    patterns = np.random.default_rng(1).integers(0, 256, 1 << 17, np.uint8).view(value_type.storage)
    widened = value_type.widen(patterns)
    assert widened.dtype == (np.float64 if value_type is ValueType.FLOAT64 else np.float32)
    back = value_type.narrow(widened)
    assert back.dtype == value_type.storage
    numbers = ~np.isnan(widened)
    assert back[numbers].tobytes() == patterns[numbers].tobytes()


@pytest.mark.parametrize("value_type", list(ValueType))
def test_another_storage_is_refused(value_type):
    other = np.float64 if value_type is ValueType.FLOAT32 else np.float32
    with pytest.raises(TypeError, match=value_type.value):
        value_type.widen(np.zeros(4, other))
