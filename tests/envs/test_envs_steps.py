"""The compiled pass over what a step says of its rows, beside the same in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from sfactory.envs.kernels.steps import all_finite, all_known, settle_step
from sfactory.envs.observations import _all_finite, _all_known


@pytest.mark.parametrize("rests", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_a_step_is_settled_as_by_numpy(rows: int, rests: bool) -> None:
    rng = np.random.default_rng(rows + rests)
    reward = rng.normal(size=rows).astype(np.float32)
    terminated, truncated, began = rng.random((3, rows)) < 0.3
    began &= rests
    resting = began.copy()
    own_reward = np.full(rows, np.nan, np.float32)
    own_terminated, own_truncated, first, active = np.array(rng.random((4, rows)) < 0.5)

    ended, finite = settle_step(
        reward, terminated, truncated, rests, resting, own_reward, own_terminated, own_truncated, first, active
    )

    terminates = terminated & ~began
    truncates = truncated & ~began & ~terminated
    ends = terminates | truncates
    np.testing.assert_array_equal(own_reward, np.where(began, 0, reward))
    np.testing.assert_array_equal(own_terminated, terminates)
    np.testing.assert_array_equal(own_truncated, truncates)
    np.testing.assert_array_equal(first, began if rests else ends)
    np.testing.assert_array_equal(active, ~ends if rests else np.ones(rows, bool))
    np.testing.assert_array_equal(resting, ends & rests)
    assert (ended, finite) == (ends.sum(), True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_a_value_that_is_not_finite_is_found_wherever_it_stands(rows: int, value: float) -> None:
    for row in {0, rows // 2, rows - 1}:
        values = np.full(rows, np.finfo(np.float32).max)
        assert all_finite(values) and _all_finite(values)
        values[row] = value
        assert not all_finite(values) and not _all_finite(values)
        none = np.zeros(rows, bool)
        for resting, finite in [
            (none.copy(), False),
            (np.arange(rows) == row, True),
        ]:  # a row that was reset has no reward
            outcome = np.empty(rows, np.float32), none.copy(), none.copy(), none.copy(), none.copy()
            assert settle_step(values, none, none, True, resting, *outcome) == (0, finite)


def test_no_values_are_finite() -> None:
    assert all_finite(np.empty(0, np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_whether_categories_are_known_is_told_as_by_numpy(dtype: type) -> None:
    rng, sizes = np.random.default_rng(0), np.array([3, 1, 200], np.int64)
    for _ in range(100):
        known = rng.integers(0, sizes, (4, 3)).astype(dtype)
        unknown = known.copy()
        column = rng.integers(3)
        unknown[rng.integers(4), column] = sizes[column]
        for values, good in ((known, True), (unknown, False)):
            assert all_known(values.reshape(-1), sizes) == _all_known(values.reshape(-1), sizes) == good
    assert not all_known(np.array([0, 0, -1], np.int32), sizes) and not _all_known(np.array([0, 0, -1]), sizes)
