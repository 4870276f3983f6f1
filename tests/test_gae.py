from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import Estimator, Segments, on_tensors, random_segments

from sfactory.gae import gae, gae_torch

IMPLEMENTATIONS = {"numpy": gae, "torch": on_tensors(gae_torch)}


@pytest.fixture(params=list(IMPLEMENTATIONS))
def estimate(request: pytest.FixtureRequest) -> Estimator:
    return IMPLEMENTATIONS[request.param]


def reference(s: Segments, gamma: float, lam: float) -> np.ndarray:
    """The definition: for every step the discounted sum of the temporal differences up to its episode's end, in
    float64."""
    steps, rows = s.values.shape
    advantages = np.zeros((steps, rows))
    for b in range(rows):
        for start in range(steps):
            for t in range(start, steps):
                following = float(s.bootstrap_value[b]) if t == steps - 1 else float(s.values[t + 1, b])
                if s.truncated[t, b]:
                    following = float(s.final_values[t, b])
                if s.terminated[t, b]:
                    following = 0.0
                delta = float(s.rewards[t, b]) + gamma * following - float(s.values[t, b])
                advantages[start, b] += (gamma * lam) ** (t - start) * delta
                if s.terminated[t, b] or s.truncated[t, b]:
                    break
    return advantages


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 20),
    rows=st.integers(1, 6),
    ends=st.sampled_from([0.0, 0.1, 0.4]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_agrees_with_the_definition(seed: int, steps: int, rows: int, ends: float, gamma: float, lam: float) -> None:
    segments = random_segments(seed, steps, rows, ends)
    expected = reference(segments, gamma, lam)
    for estimate in IMPLEMENTATIONS.values():
        advantages, returns = estimate(*segments[1:], gamma, lam)
        np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(returns, expected + segments.values, rtol=1e-9, atol=1e-9)


def test_float32_stays_within_1e_5_over_a_long_segment(estimate: Estimator) -> None:
    segments = random_segments(1, 128, 16, ends=0.01, dtype=np.float32)
    advantages, returns = estimate(*segments[1:], 0.99, 0.95)
    assert advantages.dtype == returns.dtype == np.float32
    np.testing.assert_allclose(advantages, reference(segments, 0.99, 0.95), rtol=1e-5, atol=1e-5)


def test_a_termination_wins_over_a_truncation_in_the_same_step(estimate: Estimator) -> None:
    one = np.ones((1, 1))
    advantages, _ = estimate(one, 2 * one, np.ones(1), one.astype(bool), one.astype(bool), 7 * one, 0.9, 0.9)
    assert advantages.item() == -1.0


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_splitting_at_an_end_equals_the_two_parts_alone(estimate: Estimator, kind: str) -> None:
    segments = random_segments(4, 12, 5)
    ends = {"terminated": segments.terminated.copy(), "truncated": segments.truncated.copy()}
    for name, array in ends.items():
        array[6] = name == kind
    final_values = segments.final_values.copy()
    final_values[6] = 3.0
    segments = segments._replace(**ends, final_values=final_values)
    whole = estimate(*segments[1:], 0.9, 0.9)
    first = segments.part(0, 7, np.full(5, 3.0))
    if kind == "truncated":
        first.truncated[6] = False
    second = segments.part(7, 12, segments.bootstrap_value)
    for all_steps, *parts in zip(whole, estimate(*first[1:], 0.9, 0.9), estimate(*second[1:], 0.9, 0.9), strict=True):
        np.testing.assert_allclose(all_steps, np.concatenate(parts), rtol=1e-9)


def test_garbage_behind_an_end_stays_there(estimate: Estimator) -> None:
    segments = random_segments(5, 6, 2, ends=0.0)
    segments.terminated[2, 0] = segments.truncated[2, 1] = True
    segments.final_values[2, 1] = 1.0
    clean = estimate(*segments[1:], 0.9, 0.9)
    segments.rewards[3] = segments.values[3] = np.nan
    for before, after in zip(clean, estimate(*segments[1:], 0.9, 0.9), strict=True):
        np.testing.assert_array_equal(after[:3], before[:3])
        np.testing.assert_array_equal(after[4:], before[4:])
        assert np.isnan(after[3]).all()


@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_infinities_behind_an_end_stay_there(estimate: Estimator, infinity: float) -> None:
    """Their sum times a decay of 0 would be NaN."""
    segments = random_segments(5, 8, 2, ends=0.0)
    segments.terminated[2, 0] = segments.truncated[2, 1] = True
    segments.final_values[2, 1] = 1.0
    clean = estimate(*segments[1:], 0.9, 0.9)
    segments.rewards[3:] = infinity
    for before, after in zip(clean, estimate(*segments[1:], 0.9, 0.9), strict=True):
        np.testing.assert_array_equal(after[:3], before[:3])
        assert (after[3:] == infinity).all()


@pytest.mark.parametrize("name", ["rewards", "terminated", "truncated", "final_values"])
def test_a_wrong_shape_is_named(estimate: Estimator, name: str) -> None:
    segments = random_segments(9, 4, 5)._replace(**{name: np.zeros((4, 1), dtype=bool)})
    with pytest.raises(ValueError, match=rf"{name} has shape \(4, 1\) and values has \(4, 5\)"):
        estimate(*segments[1:], 0.9, 0.95)
