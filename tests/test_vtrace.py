from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import Estimator, Segments, on_tensors, random_segments

from sfactory.gae import gae
from sfactory.vtrace import unweighted_vtrace, vtrace


def weighted_vtrace(log_weights: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace of tensors, with the arguments of :func:`vtrace`."""
    outcome, (*settings, rho_bar_pg) = inputs[:6], (*inputs[6:], 1.0, 1.0, 1.0, 1.0)[:5]
    vs, advantages = unweighted_vtrace(log_weights, *outcome, *settings)
    return vs, log_weights.exp().clamp(max=rho_bar_pg) * advantages


IMPLEMENTATIONS = {"numpy": vtrace, "torch": on_tensors(weighted_vtrace)}


@pytest.fixture(params=list(IMPLEMENTATIONS))
def estimate(request: pytest.FixtureRequest) -> Estimator:
    return IMPLEMENTATIONS[request.param]


def reference(
    s: Segments, gamma: float, lam: float, rho_bar: float, c_bar: float, rho_bar_pg: float
) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one column and one step at a time in float64."""
    steps, rows = s.values.shape
    vs, advantages = np.empty((steps, rows)), np.empty((steps, rows))
    for b in range(rows):
        next_value = next_vs = float(s.bootstrap_value[b])
        for t in reversed(range(steps)):
            w, r, v = np.exp(float(s.log_ratios[t, b])), float(s.rewards[t, b]), float(s.values[t, b])
            rho, c = min(rho_bar, w), lam * min(c_bar, w)
            gamma_t = gamma_c = gamma
            v_prime, vs_prime = next_value, next_vs
            trace = next_vs - next_value
            if s.terminated[t, b]:
                gamma_t = gamma_c = v_prime = vs_prime = trace = 0.0
            elif s.truncated[t, b]:
                v_prime = vs_prime = float(s.final_values[t, b])
                gamma_c = trace = 0.0
            delta = rho * (r + gamma_t * v_prime - v)
            q = lam * vs_prime + (1 - lam) * v_prime
            vs[t, b] = v + delta + gamma_c * c * trace
            advantages[t, b] = min(rho_bar_pg, w) * (r + gamma_t * q - v)
            next_value, next_vs = v, vs[t, b]
    return vs, advantages


def assert_both_close(actual: tuple, expected: tuple, tolerance: float = 1e-9) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 20),
    rows=st.integers(1, 6),
    ends=st.sampled_from([0.0, 0.1, 0.4]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.8, 1.0]),
    bars=st.sampled_from([(1.0, 1.0, 1.0), (1.5, 0.7, 2.0), (np.inf, 1.0, 0.5), (0.8, np.inf, np.inf)]),
)
def test_agrees_with_the_definition(
    seed: int, steps: int, rows: int, ends: float, gamma: float, lam: float, bars: tuple
) -> None:
    segments = random_segments(seed, steps, rows, ends)
    expected = reference(segments, gamma, lam, *bars)
    for estimate in IMPLEMENTATIONS.values():
        assert_both_close(estimate(*segments, gamma, lam, *bars), expected)


def test_float32_stays_within_1e_5_over_a_long_segment(estimate: Estimator) -> None:
    segments = random_segments(1, 128, 32, ends=0.01, dtype=np.float32)
    vs, advantages = estimate(*segments, 0.99, 0.95)
    assert vs.dtype == advantages.dtype == np.float32
    assert_both_close((vs, advantages), reference(segments, 0.99, 0.95, 1.0, 1.0, 1.0), 1e-5)


def test_worked_example(estimate: Estimator) -> None:
    zero = np.zeros((4, 1))
    rewards, values = np.array([[1.0], [0], [2], [1]]), np.array([[0.5], [1], [0.2], [0.3]])
    vs, _ = estimate(zero, rewards, values, np.array([5.0]), zero.astype(bool), zero.astype(bool), zero, 0.99)
    np.testing.assert_allclose(vs[:, 0], [8.7335, 7.8116, 7.8905, 5.95], atol=5e-5)


def test_on_policy_it_is_the_n_step_return(estimate: Estimator) -> None:
    segments = random_segments(2, 9, 3, ends=0.0)
    segments = segments._replace(log_ratios=np.zeros_like(segments.values))
    n_step = segments.bootstrap_value
    vs, advantages = estimate(*segments, 0.9)
    for t in reversed(range(9)):
        n_step = segments.rewards[t] + 0.9 * n_step
        np.testing.assert_allclose(vs[t], n_step, rtol=1e-9)
        np.testing.assert_allclose(advantages[t], n_step - segments.values[t], rtol=1e-9)


def test_on_policy_corrections_and_advantages_are_those_of_gae(estimate: Estimator) -> None:
    segments = random_segments(3, 16, 8)
    segments = segments._replace(log_ratios=np.zeros_like(segments.values))
    vs, advantages = estimate(*segments, 0.97, 0.8)
    expected, _ = gae(*segments[1:], 0.97, 0.8)
    assert_both_close((vs - segments.values, advantages), (expected, expected))


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_splitting_at_an_end_equals_the_two_parts_alone(estimate: Estimator, kind: str) -> None:
    segments = random_segments(4, 12, 5)
    ends = {"terminated": segments.terminated.copy(), "truncated": segments.truncated.copy()}
    for name, array in ends.items():
        array[6] = name == kind
    final_values = segments.final_values.copy()
    final_values[6] = 3.0
    segments = segments._replace(**ends, final_values=final_values)
    whole = estimate(*segments, 0.9, 0.9)
    # A truncated episode goes on from the final observation; the last step of the part alone has no end but that
    # bootstrap.
    first = segments.part(0, 7, np.full(5, 3.0))
    if kind == "truncated":
        first.truncated[6] = False
    second = segments.part(7, 12, segments.bootstrap_value)
    parts = zip(estimate(*first, 0.9, 0.9), estimate(*second, 0.9, 0.9), strict=True)
    assert_both_close(whole, tuple(np.concatenate(pair) for pair in parts))


def test_garbage_behind_an_end_stays_there(estimate: Estimator) -> None:
    segments = random_segments(5, 6, 2, ends=0.0)
    segments.terminated[2, 0] = segments.truncated[2, 1] = True
    segments.final_values[2, 1] = 1.0
    clean = estimate(*segments, 0.9, 0.9)
    for array in segments[:3]:
        array[3] = np.nan
    garbage = estimate(*segments, 0.9, 0.9)
    for before, after in zip(clean, garbage, strict=True):
        np.testing.assert_array_equal(after[:3], before[:3])
        np.testing.assert_array_equal(after[4:], before[4:])


@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_infinities_behind_an_end_stay_there(estimate: Estimator, infinity: float) -> None:
    """Their sum times a decay of 0 would be NaN."""
    segments = random_segments(5, 8, 2, ends=0.0)
    segments.terminated[2, 0] = segments.truncated[2, 1] = True
    segments.final_values[2, 1] = 1.0
    clean = estimate(*segments, 0.9, 0.9)
    segments.rewards[3:] = infinity
    for before, after in zip(clean, estimate(*segments, 0.9, 0.9), strict=True):
        np.testing.assert_array_equal(after[:3], before[:3])
        assert (after[3:] == infinity).all()


@pytest.mark.parametrize("broken", ["log_ratios", "rewards", "values"])
def test_a_nan_shows_in_its_own_step(estimate: Estimator, broken: str) -> None:
    segments = random_segments(6, 5, 2, ends=0.0)
    getattr(segments, broken)[3, 1] = np.nan
    vs, advantages = estimate(*segments, 0.9)
    for result in (vs, advantages):
        assert np.isnan(result[3, 1])
        assert np.isfinite(result[:, 0]).all()


def test_huge_ratios_are_truncated(estimate: Estimator) -> None:
    segments = random_segments(7, 5, 2)
    huge, one = (segments._replace(log_ratios=np.full((5, 2), value)) for value in (1000.0, 0.0))
    assert_both_close(estimate(*huge, 0.9), estimate(*one, 0.9))


def test_strided_inputs_give_the_same(estimate: Estimator) -> None:
    segments = random_segments(8, 7, 6)
    columns = Segments(*(array[..., ::2] for array in segments))
    copies = Segments(*(array.copy() for array in columns))
    assert_both_close(estimate(*columns, 0.9), estimate(*copies, 0.9))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("rewards", (3, 5), r"rewards has shape \(3, 5\) and values has \(4, 5\)"),
        ("bootstrap_value", (4,), r"bootstrap_value has shape \(4,\); with values \(4, 5\) it must be \(5,\)"),
        ("values", (20,), r"values has shape \(20,\); it must be \[T, B\]"),
    ],
)
def test_a_wrong_shape_is_named(estimate: Estimator, name: str, shape: tuple[int, ...], message: str) -> None:
    segments = random_segments(9, 4, 5)._replace(**{name: np.zeros(shape)})
    with pytest.raises(ValueError, match=message):
        estimate(*segments, 0.9)


def test_a_wrong_shape_of_the_ratios_is_named_as_the_argument_is() -> None:
    segments = random_segments(9, 4, 5)._replace(log_ratios=np.zeros((3, 5)))
    with pytest.raises(ValueError, match=r"log_ratios has shape \(3, 5\) and values has \(4, 5\)"):
        vtrace(*segments, 0.9)
    with pytest.raises(ValueError, match=r"log_weights has shape \(3, 5\) and values has \(4, 5\)"):
        on_tensors(unweighted_vtrace)(*segments, 0.9, 1.0, 1.0, 1.0)


def test_targets_carry_no_gradient() -> None:
    tensors = [torch.from_numpy(array) for array in random_segments(10, 4, 2)]
    tensors[0].requires_grad_()
    tensors[2].requires_grad_()
    assert not any(result.requires_grad for result in unweighted_vtrace(*tensors, 0.9, 1.0, 1.0, 1.0))
