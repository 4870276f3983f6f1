"""Losses of the actor-critic: pure functions of tensors ``[T, B]``, whose scale is the mean over valid samples.

``appo`` and ``ppo`` share PPO's clipped surrogate (Schulman et al. 2017, equation 7), ``impala`` is the policy gradient of Espeholt
et al. 2018. Under ``appo`` and ``impala`` the advantages are V-trace's (:mod:`sfactory.vtrace`), under ``ppo`` those of GAE.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sfactory.config import LossConfig
from sfactory.losses_cpu import ADVANTAGE_EPS, fused_loss


@dataclass(frozen=True)
class Targets:
    """What the new policy and value are held against; constants, without gradients.

    Attributes:
        advantages: float ``[T, B]``.
        returns: float ``[T, B]``; value targets in the critic's own (normalised) units.
        old_values: float ``[T, B]``; the behaviour's values in the same units, read only with value clipping.
        behaviour_log_prob: float ``[T, B]``; log mu(a_t|x_t).
        valid: bool ``[T, B]``; samples to learn from. The entries of all other samples are never used, whatever they hold.
    """

    advantages: Tensor
    returns: Tensor
    old_values: Tensor
    behaviour_log_prob: Tensor
    valid: Tensor


@dataclass(frozen=True)
class LossStats:
    """Means over the valid samples of a minibatch: 0-d tensors on its device, without gradients.

    Attributes:
        loss: What is minimised.
        policy_loss: Of the surrogate alone.
        value_loss: Before its coefficient.
        entropy: Of the policy; with ``exploration="kl"`` the KL divergence from the uniform policy.
        kl: KL divergence of the new policy from the behaviour, estimated as the mean of (ratio - 1) - log ratio (Schulman 2020).
        ratio_mean: Of the importance weight pi(a_t|x_t) / mu(a_t|x_t).
        ratio_min: The smallest.
        ratio_max: The largest.
        clip_fraction: Share of samples whose ratio is further than the clip range from 1.
        explained_variance: 1 - variance of (return - value) / variance of the return; 0 where returns do not vary.
        adv_mean: Of the advantages, before normalisation.
        adv_std: Standard deviation of the advantages, before normalisation.
        valid_fraction: Share of samples that are valid.
    """

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    kl: Tensor
    ratio_mean: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    clip_fraction: Tensor
    explained_variance: Tensor
    adv_mean: Tensor
    adv_std: Tensor
    valid_fraction: Tensor

    def stacked(self) -> Tensor:
        """All statistics as one vector in the order of the fields, so that reading them costs one transfer."""
        return torch.stack([getattr(self, field.name) for field in dataclasses.fields(self)])


def policy_loss_ppo(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's clipped surrogate, negated, for each sample.

    min(ratio A, clamp(ratio, 1 - clip, 1 + clip) A) is written as min(ratio A, A + clip |A|), which is the same number.

    Args:
        log_ratio: float ``[T, B]``; log pi(a_t|x_t) - log mu(a_t|x_t).
        advantages: float ``[T, B]``; for ``appo`` V-trace's adv_t as it is, so that a stale sample counts with its truncated weight
            and its ratio both.
        clip: Clip range of the ratio.
    """
    limit = torch.add(advantages, advantages.abs(), alpha=clip)
    return -torch.minimum(log_ratio.exp() * advantages, limit)


def policy_loss_impala(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """Policy-gradient loss of each sample, -log pi(a_t|x_t) adv_t; `advantages` hold V-trace's importance weight."""
    return -(log_prob * advantages)


def value_loss(error: Tensor, change: Tensor | None = None, clip: float = 0.0) -> Tensor:
    """Half the squared error of each sample; with `change`, PPO's larger one of that and the error of the clipped value.

    Args:
        error: float ``[T, B]``; value - return.
        change: float ``[T, B]``; value - the behaviour's value.
        clip: How far the value may move from the behaviour's before its gradient stops.
    """
    squared = error.square()
    if change is not None:
        clipped_error = error + (change.clamp(-clip, clip) - change)
        squared = torch.maximum(squared, clipped_error.square())
    return 0.5 * squared


def total_loss(
    config: LossConfig,
    algo: Literal["appo", "impala", "ppo"],
    log_prob: Tensor,
    value: Tensor,
    exploration: Tensor,
    targets: Targets,
) -> tuple[Tensor, LossStats]:
    """Policy loss + value_coef x value loss - entropy_coef x exploration bonus, and what a report needs.

    Invalid samples influence neither the loss, nor its gradients, nor the statistics, whatever their entries hold. Without any valid
    sample the loss and its gradients are 0.

    Args:
        log_prob: float32 or float64 ``[T, B]`` with gradient; log pi(a_t|x_t).
        value: float ``[T, B]`` with gradient, in the units of `targets.returns`.
        exploration: float ``[T, B]`` with gradient; the policy's entropy, or with ``exploration="kl"`` its KL divergence from the
            uniform policy, which is made small.

    Returns:
        The loss, a 0-d tensor to call ``backward`` on, and its statistics.

    Raises:
        ValueError: If `algo` is unknown or shapes do not match.
    """
    if algo not in ("appo", "impala", "ppo"):
        raise ValueError(f"algo is {algo!r}; use appo, impala or ppo")
    _check_shapes({"log_prob": log_prob, "exploration": exploration, **vars(targets)}, value)
    if not value.is_cpu:
        return total_loss_torch(config, algo, log_prob, value, exploration, targets)
    weights = (config.clip, config.value_clip, config.value_coef, _exploration_coef(config))
    settings = (algo != "impala", config.normalize_advantage, *map(float, weights))
    constants = (targets.advantages, targets.returns, targets.old_values, targets.behaviour_log_prob, targets.valid)
    loss, statistics = fused_loss((log_prob, value, exploration), constants, settings)
    return loss, LossStats(*statistics.unbind())


def total_loss_torch(
    config: LossConfig,
    algo: Literal["appo", "impala", "ppo"],
    log_prob: Tensor,
    value: Tensor,
    exploration: Tensor,
    targets: Targets,
) -> tuple[Tensor, LossStats]:
    """:func:`total_loss` in tensor operations, for any device; without a host synchronisation."""
    valid = targets.valid
    zero = value.new_zeros(())
    count = valid.sum()
    scale = count.clamp(min=1).to(value.dtype).reciprocal_()
    # Selecting before any arithmetic keeps a NaN of an invalid sample out of the backward pass, where 0 x NaN is NaN.
    log_ratio = torch.where(valid, log_prob - targets.behaviour_log_prob, zero)
    error = torch.where(valid, value - targets.returns, zero)
    change = torch.where(valid, value - targets.old_values, zero) if config.value_clip > 0 else None
    deviation, adv_mean = _centred(targets.advantages, valid, scale)
    adv_std = torch.linalg.vector_norm(deviation) * scale.sqrt()
    advantages = torch.where(valid, targets.advantages, zero)
    if config.normalize_advantage:
        advantages = deviation / (adv_std + ADVANTAGE_EPS)
    if algo == "impala":
        policy = policy_loss_impala(torch.where(valid, log_prob, zero), advantages)
    else:
        policy = policy_loss_ppo(log_ratio, advantages, config.clip)
    policy_mean = policy.sum() * scale
    value_mean = value_loss(error, change, config.value_clip).sum() * scale
    exploration_mean = torch.where(valid, exploration, zero).sum() * scale
    loss = policy_mean + config.value_coef * value_mean + _exploration_coef(config) * exploration_mean
    with torch.no_grad():
        stats = LossStats(
            loss=loss.detach(),
            policy_loss=policy_mean.detach(),
            value_loss=value_mean.detach(),
            entropy=exploration_mean.detach(),
            **_ratio_stats(log_ratio, valid, scale, config.clip),
            explained_variance=_explained_variance(error, targets.returns, valid, scale),
            adv_mean=adv_mean,
            adv_std=adv_std,
            valid_fraction=count / valid.numel(),
        )
    return loss, stats


def _check_shapes(tensors: dict[str, Tensor], value: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} and value has {tuple(value.shape)}; both must be the same [T, B]")


def _exploration_coef(config: LossConfig) -> float:
    """Weight of the exploration tensor in the loss: entropy is to grow, the KL divergence from the uniform policy to shrink."""
    return -config.entropy_coef if config.exploration == "entropy" else config.entropy_coef


def _centred(x: Tensor, valid: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`x` minus its mean over the valid samples, 0 where invalid, and that mean. `scale` is 1 / number of valid samples."""
    zero = x.new_zeros(())
    mean = torch.where(valid, x, zero).sum() * scale
    return torch.where(valid, x - mean, zero), mean


def _ratio_stats(log_ratio: Tensor, valid: Tensor, scale: Tensor, clip: float) -> dict[str, Tensor]:
    """The statistics of :class:`LossStats` that describe the importance weights; `log_ratio` is 0 where invalid."""
    excess = log_ratio.expm1()
    mean = excess.sum() * scale
    low, high = torch.where(valid, excess, mean).aminmax()
    return {
        "kl": (excess - log_ratio).sum() * scale,
        "ratio_mean": 1.0 + mean,
        "ratio_min": 1.0 + low,
        "ratio_max": 1.0 + high,
        "clip_fraction": (excess.abs() > clip).sum() * scale,
    }


def _explained_variance(error: Tensor, returns: Tensor, valid: Tensor, scale: Tensor) -> Tensor:
    residual = torch.linalg.vector_norm(_centred(error, valid, scale)[0])
    total = torch.linalg.vector_norm(_centred(returns, valid, scale)[0])
    return torch.where(total > 0, 1.0 - (residual / total).square(), 0.0)
