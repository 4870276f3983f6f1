"""The action distribution against torch.distributions and the CPU sampler against it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical, Normal

from sfactory.distributions import ActionDistribution, Sampler
from sfactory.kernels.sampling import CompiledSampler, sample_rows
from sfactory.spaces import ActionSpec

SPACES = {
    "discrete": spaces.Discrete(5),
    "multidiscrete": spaces.MultiDiscrete([3, 5, 2]),
    "binary": spaces.MultiBinary(4),
    "box": spaces.Box(-1, 1, (3,)),
    "mixed": spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,)), spaces.Discrete(3))),
}


@pytest.fixture(params=SPACES, name="dist")
def _dist(request: pytest.FixtureRequest) -> ActionDistribution:
    return ActionDistribution(ActionSpec.from_space(SPACES[request.param]))


def _categories_and_normal(*sizes: int) -> ActionDistribution:
    return ActionDistribution(
        ActionSpec.from_space(spaces.Tuple((*map(spaces.Discrete, sizes), spaces.Box(-1, 1, (1,)))))
    )


def _params(dist: ActionDistribution, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dist.width, generator=torch.Generator().manual_seed(seed))


def _mask(dist: ActionDistribution, *shape: int) -> torch.Tensor:
    """A random mask with at least the first category of each component allowed."""
    mask = torch.rand(*shape, dist.action.logits, generator=torch.Generator().manual_seed(9)) < 0.5
    begin = 0
    for size in dist.action.sizes:
        mask[..., begin] = True
        begin += size
    return mask


def _reference(
    dist: ActionDistribution, params: torch.Tensor, mask: torch.Tensor | None
) -> tuple[list[Categorical], Normal]:
    logits = params[..., : dist.action.logits]
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    mean, log_std = params[..., dist.action.logits :].chunk(2, -1)
    return [
        Categorical(logits=part) for part in logits.split(dist.action.sizes, -1)
    ] if dist.action.sizes else [], Normal(mean, log_std.exp())


@pytest.mark.parametrize("masked", [False, True])
def test_densities_match_torch_distributions(dist: ActionDistribution, masked: bool) -> None:
    old, new = _params(dist, 6, 7), _params(dist, 6, 7, seed=1)
    mask = _mask(dist, 6, 7) if masked else None
    categorical, continuous, log_prob = dist.sample(old, mask, torch.Generator().manual_seed(3))
    parts, normal = _reference(dist, new, mask)

    def summed(categorical_terms: list[torch.Tensor], normal_terms: torch.Tensor) -> torch.Tensor:
        return sum(categorical_terms, torch.zeros(6, 7)) + normal_terms.sum(-1)

    expected = summed([p.log_prob(categorical[..., k]) for k, p in enumerate(parts)], normal.log_prob(continuous))
    entropy = summed([p.entropy() for p in parts], normal.entropy())
    divergence = summed(
        [(p.logits > -math.inf).sum(-1).log() - p.entropy() for p in parts], torch.zeros_like(normal.loc)
    )
    torch.testing.assert_close(dist.log_prob(new, categorical, continuous, mask), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dist.entropy(new, mask), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dist.kl_from_uniform(new, mask), divergence, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(log_prob, dist.log_prob(old, categorical, continuous, mask), rtol=1e-5, atol=1e-5)
    both = dist.log_prob_and_entropy(new, categorical.long(), continuous, mask)
    torch.testing.assert_close(both, (expected, entropy), rtol=1e-5, atol=1e-5)
    allowed = torch.ones(6, 7, dist.action.logits) if mask is None else mask.float()
    from_uniform = [
        part.sum(-1).log() - p.entropy()
        for part, p in zip(allowed.split(dist.action.sizes, -1), parts, strict=True)
        if parts
    ]
    torch.testing.assert_close(
        dist.kl_from_uniform(new, mask), sum(from_uniform, torch.zeros(6, 7)), rtol=1e-4, atol=1e-5
    )


def test_samples_and_mode_respect_the_mask(dist: ActionDistribution) -> None:
    params, mask = _params(dist, 500), _mask(dist, 500)
    for categorical in (dist.sample(params, mask, torch.Generator().manual_seed(0))[0], dist.mode(params, mask)[0]):
        assert categorical.dtype == torch.int32
        assert categorical.shape == (500, len(dist.action.sizes))
        for k, part in enumerate(mask.split(dist.action.sizes, -1) if dist.action.sizes else []):
            assert part.gather(-1, categorical[:, k : k + 1].long()).all()


def test_sample_frequencies() -> None:
    dist = _categories_and_normal(3)
    params = torch.tensor([0.5, 1.5, -1.0, 2.0, math.log(0.5)]).expand(40_000, -1)
    categorical, continuous, _ = dist.sample(params, generator=torch.Generator().manual_seed(0))
    frequencies = torch.bincount(categorical[:, 0], minlength=3) / len(categorical)
    torch.testing.assert_close(frequencies, params[0, :3].softmax(0), atol=0.01, rtol=0)
    assert abs(continuous.mean() - 2.0) < 0.01
    assert abs(continuous.std() - 0.5) < 0.01


def test_a_mask_that_allows_nothing_counts_as_no_mask(dist: ActionDistribution) -> None:
    params = _params(dist, 4).requires_grad_()
    nothing = torch.zeros(4, dist.action.logits, dtype=torch.bool)
    categorical, continuous, _ = dist.sample(params, nothing, torch.Generator().manual_seed(0))
    log_prob, entropy = dist.log_prob_and_entropy(params, categorical, continuous, nothing)
    torch.testing.assert_close(log_prob, dist.log_prob(params, categorical, continuous))
    torch.testing.assert_close(dist.kl_from_uniform(params, nothing), dist.kl_from_uniform(params))
    (log_prob + entropy).sum().backward()
    assert params.grad.isfinite().all()


def test_gradients_stay_finite_and_zero_where_masked() -> None:
    dist = ActionDistribution(ActionSpec.from_space(spaces.Discrete(4)))
    params = torch.tensor([[0.3, -200.0, 50.0, 1e4]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    empty = torch.zeros(1, 0)
    log_prob, entropy = dist.log_prob_and_entropy(params, torch.tensor([[1]]), empty, mask)
    (log_prob + entropy + dist.kl_from_uniform(params, mask)).sum().backward()
    assert params.grad.isfinite().all()
    assert params.grad[0, 3] == 0
    assert params.grad[0, 2] != 0


def _numba_sample(
    dist: ActionDistribution, params: torch.Tensor, mask: torch.Tensor | None, seed: int
) -> tuple[np.ndarray, ...]:
    rng, rows = np.random.default_rng(seed), len(params)
    categorical = np.empty((rows, len(dist.action.sizes)), np.int32)
    continuous, log_prob = np.empty((rows, dist.action.continuous), np.float32), np.empty(rows, np.float32)
    sample_rows(
        params.numpy(),
        np.empty((0, 0), bool) if mask is None else mask.numpy(),
        np.asarray(dist.action.sizes, np.int64),
        rng.random((rows, len(dist.action.sizes)), np.float32),
        rng.standard_normal((rows, dist.action.continuous), np.float32),
        categorical,
        continuous,
        log_prob,
    )
    return categorical, continuous, log_prob


@pytest.mark.parametrize("mask_kind", ["none", "random", "nothing"])
def test_cpu_sampler_agrees_with_the_distribution(dist: ActionDistribution, mask_kind: str) -> None:
    params = 3 * _params(dist, 300)
    params[:, dist.action.logits :].div_(3)
    mask = {
        "none": None,
        "random": _mask(dist, 300),
        "nothing": torch.zeros(300, dist.action.logits, dtype=torch.bool),
    }[mask_kind]
    categorical, continuous, log_prob = _numba_sample(dist, params, mask, seed=0)
    expected = dist.log_prob(params, torch.from_numpy(categorical), torch.from_numpy(continuous), mask)
    np.testing.assert_allclose(log_prob, expected.numpy(), rtol=1e-5, atol=1e-5)
    if mask_kind == "random" and dist.action.sizes:
        for k, part in enumerate(mask.split(dist.action.sizes, -1)):
            assert part.gather(-1, torch.from_numpy(categorical[:, k : k + 1]).long()).all()


def test_cpu_sampler_draws_of_very_many_categories_what_the_plain_one_does() -> None:
    dist = ActionDistribution(ActionSpec.from_space(spaces.Discrete(100_000)))
    params = torch.randn(16, 100_000, generator=torch.Generator().manual_seed(0)).numpy()
    drawn = []
    for kind in (Sampler, CompiledSampler):
        categorical, log_prob = np.empty((16, 1), np.int32), np.empty(16, np.float32)
        kind(dist, seed=1)(params, None, categorical, np.empty((16, 0), np.float32), log_prob)
        drawn.append((categorical, log_prob))
    (plain, plain_log_prob), (compiled, log_prob) = drawn
    np.testing.assert_array_equal(compiled, plain)
    np.testing.assert_allclose(log_prob, plain_log_prob, rtol=1e-5, atol=1e-5)


def test_cpu_sampler_frequencies() -> None:
    dist = _categories_and_normal(3, 2)
    params = torch.tensor([0.5, 1.5, -1.0, 0.0, 9.0, 2.0, math.log(0.5)]).repeat(40_000, 1)
    mask = torch.tensor([True, True, True, True, False]).repeat(40_000, 1)
    categorical, continuous, _ = _numba_sample(dist, params, mask, seed=1)
    frequencies = np.bincount(categorical[:, 0], minlength=3) / len(categorical)
    np.testing.assert_allclose(frequencies, params[0, :3].softmax(0).numpy(), atol=0.01)
    assert (categorical[:, 1] == 0).all()
    assert abs(continuous.mean() - 2.0) < 0.01
    assert abs(continuous.std() - 0.5) < 0.01


def test_cpu_sampler_at_the_edges_of_the_uniform() -> None:
    """The largest float below 1 and 0 itself pick possible categories, also when the outer ones have no probability."""
    params = np.array([[-500.0, 1.0, 1.0, -500.0]] * 2, np.float32)
    uniforms = np.array([[0.0], [np.nextafter(np.float32(1), np.float32(0))]], np.float32)
    categorical, continuous, log_prob = (
        np.empty((2, 1), np.int32),
        np.empty((2, 0), np.float32),
        np.empty(2, np.float32),
    )
    normals = np.empty((2, 0), np.float32)
    sample_rows(params, np.empty((0, 0), bool), np.array([4]), uniforms, normals, categorical, continuous, log_prob)
    assert categorical[:, 0].tolist() == [1, 2]
    np.testing.assert_allclose(log_prob, math.log(0.5), atol=1e-6)
