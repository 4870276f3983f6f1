from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sfactory.config import LossConfig
from sfactory.data.batch import Targets
from sfactory.kernels.losses import loss_and_gradients
from sfactory.losses import (
    EXPLORATION,
    POLICY,
    SUMS,
    VALUE,
    LossStats,
    batch_stats,
    chunk_loss,
    exploration_coef,
    loss_stats,
    weighted_advantages,
)
from sfactory.objective import ALGOS

Loss = Callable[..., tuple[Tensor, LossStats]]


def total_loss(
    config: LossConfig, algo: str, log_prob: Tensor, value: Tensor, exploration: Tensor, targets: Targets
) -> tuple[Tensor, LossStats]:
    """The loss of one chunk that is the whole minibatch, and its statistics."""
    loss, sums = chunk_loss(config, ALGOS[algo].surrogate, log_prob, value, exploration, targets, targets.valid.sum())
    return loss, loss_stats(config, sums)


def compiled_loss(
    config: LossConfig, algo: str, log_prob: Tensor, value: Tensor, exploration: Tensor, targets: Targets
) -> Any:
    """:func:`total_loss` by the compiled passes, as a tensor with their gradients."""
    taken = (targets.advantages, targets.returns, targets.old_values, targets.old_log_prob, targets.valid)
    flat = [tensor.detach().reshape(-1).numpy() for tensor in (log_prob, value, exploration, *taken)]
    gradients, sums = [torch.empty_like(value).detach() for _ in range(3)], torch.empty(SUMS, dtype=torch.float64)
    settings, count = (config.clip, config.value_clip, config.value_coef, exploration_coef(config)), targets.valid.sum()
    loss_and_gradients(
        *flat, float(count), ALGOS[algo].surrogate, *map(float, settings),
        *(gradient.reshape(-1).numpy() for gradient in gradients), sums.numpy(),
    )  # fmt: skip
    shifts = (
        ((x - x.detach()) * gradient) for x, gradient in zip((log_prob, value, exploration), gradients, strict=True)
    )
    weighted = sums[POLICY] + config.value_coef * sums[VALUE] + exploration_coef(config) * sums[EXPLORATION]
    loss = weighted / count.clamp(min=1) + sum(torch.where(targets.valid, shift, 0.0).sum() for shift in shifts)
    return loss, loss_stats(config, sums)


LOSSES = {"compiled": compiled_loss, "torch": total_loss}


@pytest.fixture(params=list(LOSSES))
def compute(request: pytest.FixtureRequest) -> Loss:
    return LOSSES[request.param]


@dataclasses.dataclass
class Case:
    """Inputs of a loss in float64, some of the samples invalid."""

    log_prob: Tensor
    value: Tensor
    exploration: Tensor
    targets: Targets

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.log_prob, self.value, self.exploration

    def gradients(self, compute: Loss, config: LossConfig, algo: str) -> tuple[Tensor, ...]:
        loss, _ = compute(config, algo, *self.inputs, self.targets)
        return torch.autograd.grad(loss, self.inputs)


def make_case(steps: int = 6, rows: int = 5, invalid: float = 0.3, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(steps, rows, generator=generator, dtype=torch.float64)

    log_prob, value, exploration = normal() - 1, normal(), normal().abs()
    valid = torch.rand(steps, rows, generator=generator) >= invalid
    targets = Targets(2 * normal() + 0.5, normal(), value + normal(0.3), log_prob + normal(0.3), normal(0.3), valid)
    for tensor in (log_prob, value, exploration):
        tensor.requires_grad_()
    return Case(log_prob, value, exploration, targets)


def expected_loss(case: Case, config: LossConfig, algo: str) -> dict[str, Any]:
    """The textbook formulas on the valid samples alone."""
    keep = case.targets.valid
    log_prob, value, exploration = (tensor[keep] for tensor in case.inputs)
    t = case.targets
    scaled, returns, old, old_log_prob = (x[keep] for x in (t.advantages, t.returns, t.old_values, t.old_log_prob))
    ratio = (log_prob - old_log_prob).exp()
    if algo == "impala":
        policy = -(log_prob * scaled).mean()
    else:
        policy = -torch.min(ratio * scaled, ratio.clamp(1 - config.clip, 1 + config.clip) * scaled).mean()
    squared = (value - returns) ** 2
    if config.value_clip:
        clipped = old + (value - old).clamp(-config.value_clip, config.value_clip)
        squared = torch.max(squared, (clipped - returns) ** 2)
    bonus = exploration.mean() if config.exploration == "entropy" else -exploration.mean()
    value_mean = 0.5 * squared.mean()
    return {
        "loss": policy + config.value_coef * value_mean - config.entropy_coef * bonus,
        "policy_loss": policy,
        "value_loss": value_mean,
        "entropy": exploration.mean(),
        "kl": (ratio - 1 - ratio.log()).mean(),
        "clip_fraction": ((ratio - 1).abs() > config.clip).double().mean(),
        "explained_variance": 1 - (returns - value).var() / returns.var(),
    }


CONFIGS = {
    "default": LossConfig(),
    "entropy bonus": LossConfig(entropy_coef=0.03),
    "value clip": LossConfig(value_clip=0.2, value_coef=1.3, clip=0.1),
    "kl": LossConfig(exploration="kl", entropy_coef=0.1),
}


@pytest.mark.parametrize("algo", ["appo", "impala", "ppo"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_loss_gradients_and_statistics_are_the_textbooks(compute: Loss, config: LossConfig, algo: str) -> None:
    case = make_case()
    loss, stats = compute(config, algo, *case.inputs, case.targets)
    expected = expected_loss(case, config, algo)
    torch.testing.assert_close(loss, expected["loss"], rtol=1e-6, atol=1e-8)
    for name, value in expected.items():
        torch.testing.assert_close(
            getattr(stats, name).double(), value.detach(), rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )
    wanted = torch.autograd.grad(expected["loss"], case.inputs, allow_unused=True, materialize_grads=True)
    for actual, gradient in zip(torch.autograd.grad(loss, case.inputs), wanted, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("algo", ["appo", "impala"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_invalid_samples_change_nothing(compute: Loss, algo: str, garbage: float) -> None:
    config = CONFIGS["value clip"]
    case = make_case()
    _, clean = compute(config, algo, *case.inputs, case.targets)
    clean_gradients = case.gradients(compute, config, algo)
    invalid = ~case.targets.valid
    for tensor in case.inputs:
        tensor.data[invalid] = garbage
    for name in ("advantages", "returns", "old_values", "old_log_prob"):
        getattr(case.targets, name)[invalid] = garbage
    _, stats = compute(config, algo, *case.inputs, case.targets)
    assert torch.equal(stats.stacked(), clean.stacked())
    for gradient, expected in zip(case.gradients(compute, config, algo), clean_gradients, strict=True):
        assert torch.equal(gradient, expected)
        assert not gradient[invalid].any()


def test_the_scale_is_the_mean_over_valid_samples(compute: Loss) -> None:
    case = make_case(invalid=0.0)
    config = LossConfig(entropy_coef=0.1)
    loss, _ = compute(config, "appo", *case.inputs, case.targets)
    twice = dataclasses.asdict(case.targets)
    padded = {name: torch.cat((tensor, torch.zeros_like(tensor))) for name, tensor in twice.items()}
    padded_loss, _ = compute(config, "appo", *(torch.cat((x, x)) for x in case.inputs), Targets(**padded))
    torch.testing.assert_close(padded_loss, loss)


def test_without_a_valid_sample_nothing_is_learned(compute: Loss) -> None:
    case = make_case(invalid=2.0)
    loss, stats = compute(LossConfig(entropy_coef=0.1), "appo", *case.inputs, case.targets)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.isfinite(stats.stacked()).all()
    assert not any(tensor.grad.any() for tensor in case.inputs)


def test_equal_advantages_and_returns_stay_finite(compute: Loss) -> None:
    case = make_case()
    targets = dataclasses.replace(case.targets, advantages=torch.zeros(6, 5), returns=torch.zeros(6, 5))
    loss, stats = compute(LossConfig(), "appo", *case.inputs, targets)
    loss.backward()
    assert stats.policy_loss.item() == 0.0
    assert stats.explained_variance.item() == 0.0
    assert torch.isfinite(case.log_prob.grad).all()


def test_at_lag_zero_the_policy_is_unchanged_in_every_statistic(compute: Loss) -> None:
    case = make_case()
    targets = dataclasses.replace(case.targets, old_log_prob=case.log_prob.detach().clone())
    _, stats = compute(LossConfig(), "appo", *case.inputs, targets)
    assert stats.kl.item() == stats.clip_fraction.item() == 0.0


def test_a_ratio_that_all_valid_samples_have_shows_in_the_statistics(compute: Loss) -> None:
    case = make_case()
    targets = dataclasses.replace(case.targets, old_log_prob=case.log_prob.detach() - 0.5)
    _, stats = compute(LossConfig(), "appo", *case.inputs, targets)
    assert stats.kl.item() == pytest.approx(math.exp(0.5) - 1 - 0.5, abs=1e-9)
    assert stats.clip_fraction.item() == 1.0


def test_a_sample_beyond_the_clip_range_has_no_policy_gradient(compute: Loss) -> None:
    log_prob = torch.tensor([[0.5, 0.5, -0.5, -0.5]], requires_grad=True)
    zero = torch.zeros(1, 4)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    targets = Targets(advantages, zero, zero, zero, zero, torch.ones(1, 4, dtype=torch.bool))
    loss, _ = compute(LossConfig(), "ppo", log_prob, zero, zero, targets)
    loss.backward()
    assert (log_prob.grad[0] != 0).tolist() == [False, True, True, False]


def test_a_ratio_that_overflows_has_no_gradient_where_the_clip_ends_it(compute: Loss) -> None:
    log_prob = torch.tensor([[100.0, 100.0, 0.0]], requires_grad=True)
    zero = torch.zeros(1, 3)
    targets = Targets(torch.tensor([[1.0, 0.0, 1.0]]), zero, zero, zero, zero, torch.ones(1, 3, dtype=torch.bool))
    loss, _ = compute(LossConfig(), "ppo", log_prob, zero, zero, targets)
    loss.backward()
    assert log_prob.grad[0].tolist() == pytest.approx([0.0, 0.0, -1 / 3])


@pytest.mark.parametrize("shift", [-torch.inf, -800.0, -0.5, 0.1, 0.5, 100.0, 800.0, torch.inf, torch.nan])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0, torch.nan])
def test_at_the_ends_of_the_ratio_s_range_the_kernel_is_the_plain_loss(advantage: float, shift: float) -> None:
    zero, found = torch.zeros(1, 1), []
    targets = Targets(torch.full((1, 1), advantage), zero, zero, zero, zero, torch.ones(1, 1, dtype=torch.bool))
    for compute in (compiled_loss, total_loss):
        log_prob = torch.full((1, 1), shift, requires_grad=True)
        loss, stats = compute(LossConfig(), "ppo", log_prob, zero, zero, targets)
        loss.backward()
        found.append((stats.policy_loss.float(), log_prob.grad, stats.clip_fraction))
    for compiled, plain in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, equal_nan=True)


@pytest.mark.parametrize("size", [1e-3, 1e-8])
def test_within_the_clip_range_of_the_value_its_gradient_is_its_error(compute: Loss, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    value = (size * torch.randn(1, 1000, generator=generator)).requires_grad_()
    old_values, zero = 0.1 * torch.rand(1, 1000, generator=generator), torch.zeros(1, 1000)
    targets = Targets(zero, zero, old_values, zero, zero, torch.ones(1, 1000, dtype=torch.bool))
    loss, _ = compute(LossConfig(value_clip=0.2, value_coef=1000.0), "ppo", zero, value, zero, targets)
    loss.backward()
    torch.testing.assert_close(value.grad, value.detach(), rtol=1e-5, atol=0.0)


def test_a_nan_in_a_valid_sample_is_not_hidden(compute: Loss) -> None:
    case = make_case(invalid=0.0)
    case.log_prob.data[2, 2] = float("nan")
    assert compute(LossConfig(), "appo", *case.inputs, case.targets)[0].isnan()


def test_the_gradient_scales_with_what_follows_the_loss(compute: Loss) -> None:
    case = make_case()
    single = case.gradients(compute, LossConfig(), "appo")
    loss, stats = compute(LossConfig(), "appo", *case.inputs, case.targets)
    for gradient, expected in zip(torch.autograd.grad(3.0 * loss, case.inputs), single, strict=True):
        torch.testing.assert_close(gradient, 3.0 * expected)
    assert not stats.stacked().requires_grad


def test_a_wrong_shape_is_named() -> None:
    case = make_case()
    targets = dataclasses.replace(case.targets, returns=torch.zeros(5))
    with pytest.raises(ValueError, match=r"returns has shape \(5,\) and value has \(6, 5\)"):
        total_loss(LossConfig(), "appo", *case.inputs, targets)


def test_advantages_are_normalised_over_the_valid_samples_before_their_weight_multiplies_them() -> None:
    generator = torch.Generator().manual_seed(1)
    advantages, weights = 3 * torch.randn(6, 5, generator=generator) + 2, torch.rand(6, 5, generator=generator)
    valid = torch.rand(6, 5, generator=generator) > 0.3
    advantages[~valid] = float("nan")
    found = weighted_advantages(LossConfig(), advantages, weights, valid)
    kept = advantages[valid].double()
    torch.testing.assert_close(found[valid], ((kept - kept.mean()) / kept.std(correction=0)).float() * weights[valid])
    assert not found[~valid].any()
    raw = weighted_advantages(LossConfig(normalize_advantage=False), advantages, weights, valid)
    torch.testing.assert_close(raw[valid], advantages[valid] * weights[valid])


def test_the_statistics_of_a_batch_are_those_of_its_valid_weights() -> None:
    log_weights = torch.tensor([[0.5, -2.0, float("nan"), 0.0]])
    valid = torch.tensor([[True, True, False, True]])
    stats = batch_stats(log_weights, valid)
    weights = log_weights[valid].double().exp()
    torch.testing.assert_close(stats.weight_max, weights.max())
    torch.testing.assert_close(stats.behaviour_kl, (weights - 1 - weights.log()).mean())
    nothing = batch_stats(log_weights, torch.zeros_like(valid))
    assert stats.valid_fraction == 0.75
    assert nothing.stacked().tolist() == [0, 1, 0]
