"""Losses of the actor-critic: pure functions of tensors ``[T, B]``, whose scale is the mean over valid samples.

``appo`` and ``ppo`` share PPO's clipped surrogate (Schulman et al. 2017, equation 7), ``impala`` is the policy gradient
of Espeholt et al. 2018. The surrogate is clipped around the *proximal* policy, the weights with which a batch is begun
(Hilton et al. 2022, "Batch size-invariance for policy optimization"): the policy that sampled may be many updates
older, and enters by the weights of V-trace alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sfactory.config import Config, LossConfig
from sfactory.data.batch import Targets

ADVANTAGE_EPS = 1e-8
"""Added to the standard deviation by which advantages are divided."""
(
    POLICY, VALUE, EXPLORATION, KL, CLIPPED, ERROR, ERROR_SQUARES, RETURNS, RETURNS_SQUARES, COUNT,
) = range(SUMS := 10)  # fmt: skip
"""Entries of the sums of a chunk: what is minimised without its weights, the terms of the KL divergence, samples beyond
the clip range, value - return and its square, returns and their squares, valid samples. Sums of a user's own loss terms
follow."""
_RESOLUTION = 1e-12
"""Variance of the returns, as a share of their mean square, below which it is rounding."""


class _Stacked:
    def stacked(self) -> Tensor:
        """All statistics ``[..., fields]`` in the order of the fields, so that reading them costs one transfer."""
        return torch.stack(list(vars(self).values()), -1)


@dataclass(frozen=True)
class LossStats(_Stacked):
    """Means over the valid samples of minibatches: float64 ``[...]`` on their device, without gradients.

    Attributes:
        loss: What is minimised.
        policy_loss: Of the surrogate alone.
        value_loss: Before its coefficient.
        entropy: Of the policy; with ``exploration="kl"`` the KL divergence from the uniform policy.
        kl: KL divergence of the new policy from the proximal one, estimated as the mean of (ratio - 1) - log ratio
            (Schulman 2020).
        clip_fraction: Share of samples whose ratio, pi(a_t|x_t) / pi_prox(a_t|x_t), is further than the clip range from
            1.
        explained_variance: 1 - variance of (return - value) / variance of the return; 0 where returns do not vary.
    """

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    explained_variance: Tensor


@dataclass(frozen=True)
class BatchStats(_Stacked):
    """Of a batch when it is begun, over its valid samples: float64 ``[...]`` on their device, without gradients.

    Attributes:
        behaviour_kl: KL divergence of the proximal policy from the behaviour policy mu, which sampled; estimated as
            ``LossStats.kl`` is.
        weight_max: The largest importance weight pi_prox(a_t|x_t) / mu(a_t|x_t), before any truncation.
        valid_fraction: Share of samples that are valid.
    """

    behaviour_kl: Tensor
    weight_max: Tensor
    valid_fraction: Tensor


@dataclass(frozen=True)
class TermSamples:
    """What a user's own loss terms are made of: a chunk of a minibatch. Samples that are not valid hold anything.

    Attributes:
        obs: One tensor ``[T, B, *leaf.shape]`` per leaf of the observation, in its stored dtype.
        mask: bool ``[T, B, logits]``, or None.
        first: bool ``[T, B]``; an episode begins.
        categorical, continuous: Actions, int32 ``[T, B, K]`` and float32 ``[T, B, D]``.
        reward: ``[T, B]``, the environment's own.
        params: Policy parameters ``[T, B, P]``, with gradient.
        value: ``[T, B]``, with gradient, in the units of `targets.returns`.
        log_prob: log pi(a_t|x_t) ``[T, B]``, with gradient.
        auxiliary: What the model's ``unroll`` gave besides, ``[T, B, ...]`` each, with gradient.
        targets: Constants ``[T, B]``, the valid samples among them.
    """

    obs: tuple[Tensor, ...]
    mask: Tensor | None
    first: Tensor
    categorical: Tensor
    continuous: Tensor
    reward: Tensor
    params: Tensor
    value: Tensor
    log_prob: Tensor
    auxiliary: Mapping[str, Tensor]
    targets: Targets


Terms = Callable[[TermSamples, Config], Mapping[str, Tensor]]
"""A user's own loss terms by name, ``[T, B]`` each, for every sample."""


def weighted_advantages(config: LossConfig, advantages: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    """A batch's advantages as the policy loss takes them: first normalised over all valid samples, then multiplied by
    V-trace's weight.

    Normalised after the weight, a sample that the proximal policy would hardly take, whose weight is near 0, would get
    minus the mean as its advantage. Normalised within a minibatch, trajectories would lose what tells them apart.

    Args:
        advantages: float ``[T, B]``, without weights.
        weights: float ``[T, B]``; min(rho_bar_pg, pi_prox / mu).
        valid: bool ``[T, B]``.

    Returns:
        Advantages ``[T, B]``, 0 where not valid.
    """
    if config.normalize_advantage:
        count = valid.sum().clamp(min=1)
        mean = torch.where(valid, advantages, 0.0).sum(dtype=torch.float64) / count
        centred = torch.where(valid, advantages - mean.to(advantages.dtype), 0.0)
        std = (centred.square().sum(dtype=torch.float64) / count).sqrt()
        advantages = centred / (std + ADVANTAGE_EPS).to(advantages.dtype)
    # A weight of 0 silences its sample whatever the advantage is; a number that is not finite has to be seen by the
    # learner.
    return torch.where(valid, advantages * weights, 0.0)


def batch_stats(log_weights: Tensor, valid: Tensor) -> BatchStats:
    """Statistics of a batch.

    Args:
        log_weights: float ``[T, B]``; log pi_prox(a_t|x_t) - log mu(a_t|x_t).
        valid: bool ``[T, B]``.
    """
    count = valid.sum()
    scale = count.clamp(min=1).double().reciprocal()
    log_weights = torch.where(valid, log_weights, 0.0).double()
    excess = log_weights.expm1()
    return BatchStats(
        behaviour_kl=(excess - log_weights).sum() * scale,
        weight_max=torch.where(count > 0, 1.0 + torch.where(valid, excess, -torch.inf).amax(), 1.0),
        valid_fraction=count.double() / valid.numel(),
    )


def without_departures(advantages: Tensor, log_shift: Tensor, far: Tensor) -> Tensor:
    """Advantages, with 0 for samples that would push the policy further from the behaviour policy if it is far already.

    The clip bounds how far the epochs over one batch take the policy from the proximal one; this bounds how far it gets
    from the one that sampled, which may be several batches older (Honari et al. 2026, "Align and Filter").

    Args:
        advantages: float ``[T, B]``.
        log_shift: float ``[T, B]``; log pi(a_t|x_t) - log mu(a_t|x_t), without a gradient.
        far: bool ``[]``; whether the total variation between the two policies, as the mean of |pi / mu - 1| / 2 over
            the minibatch estimates it, is above its limit.
    """
    return advantages.masked_fill(far & (log_shift * advantages > 0), 0.0)


def policy_loss_ppo(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's clipped surrogate, negated, for each sample.

    min(ratio A, clamp(ratio, 1 - clip, 1 + clip) A) is written as min(ratio A, A + clip |A|), which is the same number.
    A ratio that overflows has no gradient where the clip ends it: 0, not 0 times infinity.

    Args:
        log_ratio: float ``[T, B]``; log pi(a_t|x_t) - log pi_prox(a_t|x_t).
        advantages: float ``[T, B]``; under ``appo`` they hold V-trace's importance weight pi_prox / mu.
        clip: Clip range of the ratio.
    """
    limit = torch.add(advantages, advantages.abs(), alpha=clip)
    beyond = (advantages >= 0) & (log_ratio > math.log1p(clip))
    ratio = log_ratio.masked_fill(beyond, 0.0).exp()
    return -torch.where(beyond, limit, torch.minimum(ratio * advantages, limit))


def policy_loss_impala(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """Policy-gradient loss of each sample, -log pi(a_t|x_t) adv_t; `advantages` hold V-trace's importance weight
    pi_prox / mu."""
    return -(log_prob * advantages)


def value_loss(error: Tensor, change: Tensor | None = None, clip: float = 0.0) -> Tensor:
    """Half the squared error of each sample; with `change`, PPO's larger one of that and the error of the clipped
    value.

    Args:
        error: float ``[T, B]``; value - return.
        change: float ``[T, B]``; value - the proximal policy's value.
        clip: How far the value may move from that before its gradient stops.
    """
    squared = error.square()
    if change is not None:
        clipped_error = error + (change.clamp(-clip, clip) - change)
        squared = torch.maximum(squared, clipped_error.square())
    return 0.5 * squared


def chunk_loss(
    config: LossConfig,
    surrogate: bool,
    log_prob: Tensor,
    value: Tensor,
    exploration: Tensor,
    targets: Targets,
    count: Tensor,
) -> tuple[Tensor, Tensor]:
    """A chunk's share of a minibatch's loss: policy loss + value_coef x value loss - entropy_coef x exploration bonus,
    without a host synchronisation.

    Invalid samples influence neither the loss, nor its gradients, nor the sums, whatever their entries hold. Without
    any valid sample the loss and its gradients are 0. The losses of chunks add up, and so do their sums.

    Args:
        surrogate: PPO's clipped surrogate, else the plain policy gradient.
        log_prob: float32 or float64 ``[T, B]`` with gradient; log pi(a_t|x_t).
        value: float ``[T, B]`` with gradient, in the units of `targets.returns`.
        exploration: float ``[T, B]`` with gradient; the policy's entropy, or with ``exploration="kl"`` its KL
            divergence from the uniform policy, which is made small.
        targets: Targets of the chunk.
        count: Number of valid samples of all chunks together, a tensor ``[]``.

    Returns:
        The share of the loss, a 0-d tensor to call ``backward`` on, and sums for :func:`loss_stats`, float64
        ``[SUMS]``.

    Raises:
        ValueError: If shapes do not match.
    """
    _check_shapes({"log_prob": log_prob, "exploration": exploration, **vars(targets)}, value)
    valid = targets.valid
    zero = value.new_zeros(())
    scale = count.clamp(min=1).to(value.dtype).reciprocal()
    # Selecting before any arithmetic keeps a NaN of an invalid sample out of the backward pass, where 0 x NaN is NaN.
    log_ratio = torch.where(valid, log_prob - targets.old_log_prob, zero)
    error = torch.where(valid, value - targets.returns, zero)
    change = torch.where(valid, value - targets.old_values, zero) if config.value_clip > 0 else None
    advantages = torch.where(valid, targets.advantages, zero)
    if surrogate:
        policy = policy_loss_ppo(log_ratio, advantages, config.clip)
    else:
        policy = policy_loss_impala(torch.where(valid, log_prob, zero), advantages)
    policy_sum = policy.sum()
    value_sum = value_loss(error, change, config.value_clip).sum()
    exploration_sum = torch.where(valid, exploration, zero).sum()
    loss = scale * (policy_sum + config.value_coef * value_sum + exploration_coef(config) * exploration_sum)
    with torch.no_grad():
        excess, returns = log_ratio.expm1(), torch.where(valid, targets.returns, zero).double()
        sums = torch.stack(
            (
                policy_sum.double(),
                value_sum.double(),
                exploration_sum.double(),
                (excess - log_ratio).sum().double(),
                (excess.abs() > config.clip).sum().double(),
                error.double().sum(),
                error.double().square().sum(),
                returns.sum(),
                returns.square().sum(),
                valid.sum().double(),
            )
        )
    return loss, sums


def loss_stats(config: LossConfig, sums: Tensor) -> LossStats:
    """Statistics of minibatches.

    Args:
        sums: Sums of all chunks of each, ``[..., SUMS]`` or more.

    Returns:
        Statistics ``[...]``.
    """
    count, error, returns_squares = sums[..., COUNT], sums[..., ERROR], sums[..., RETURNS_SQUARES]
    scale = count.clamp(min=1).reciprocal()
    residual = (sums[..., ERROR_SQUARES] - error.square() * scale).clamp(min=0)
    spread = returns_squares - sums[..., RETURNS].square() * scale
    varies = spread > _RESOLUTION * returns_squares
    policy, value, exploration = (sums[..., i] * scale for i in (POLICY, VALUE, EXPLORATION))
    return LossStats(
        loss=policy + config.value_coef * value + exploration_coef(config) * exploration,
        policy_loss=policy,
        value_loss=value,
        entropy=exploration,
        kl=sums[..., KL] * scale,
        clip_fraction=sums[..., CLIPPED] * scale,
        explained_variance=torch.where(varies, 1.0 - residual / spread, 0.0),
    )


def _check_shapes(tensors: dict[str, Tensor], value: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != value.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and value has {tuple(value.shape)}; both must be the same [T, "
                "B]"
            )


def exploration_coef(config: LossConfig) -> float:
    """Weight of the exploration tensor in the loss: entropy is to grow, the KL divergence from the uniform policy to
    shrink."""
    return -config.entropy_coef if config.exploration == "entropy" else config.entropy_coef
