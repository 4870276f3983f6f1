"""The loss of :mod:`sfactory.losses` with its gradients and statistics in one compiled pass over CPU memory.

Some seventy small tensor operations cost more than a small network on a CPU; this costs as much as a few of them. The gradients are
written out, and the tests hold them to those that autograd finds for :func:`sfactory.losses.total_loss_torch`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.autograd.function import once_differentiable

from sfactory.gae import contiguous

STATISTICS = 13
ADVANTAGE_EPS = 1e-8
"""Added to the standard deviation by which advantages are divided."""


def fused_loss(
    inputs: tuple[Tensor, Tensor, Tensor], targets: tuple[Tensor, ...], settings: tuple[float | bool, ...]
) -> tuple[Tensor, Tensor]:
    """The loss, differentiable in `inputs`, and its statistics.

    Args:
        inputs: log_prob, value and exploration, float ``[T, B]`` on the CPU.
        targets: advantages, returns, old_values, behaviour_log_prob and valid, ``[T, B]`` on the CPU.
        settings: The last arguments of :func:`_loss`.

    Returns:
        The loss, 0-d, and ``[13]`` statistics in the order of :class:`sfactory.losses.LossStats`.
    """
    return _FusedLoss.apply(*inputs, targets, settings)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_prob: Tensor, value: Tensor, exploration: Tensor, targets: tuple[Tensor, ...], settings: tuple) -> Any:
        *floats, valid = (tensor.detach().numpy() for tensor in (log_prob, value, exploration, *targets))
        dtype = floats[1].dtype
        gradients = np.empty((3, *value.shape), dtype)
        statistics = np.empty(STATISTICS, dtype)
        arrays = (*contiguous(dtype, *floats), *contiguous(np.bool_, valid))
        _loss(*(array.reshape(-1) for array in arrays), gradients.reshape(3, -1), statistics, *settings)
        ctx.save_for_backward(*torch.from_numpy(gradients).unbind())
        vector = torch.from_numpy(statistics)
        ctx.mark_non_differentiable(vector)
        ctx.set_materialize_grads(False)
        return vector[0].clone(), vector

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> Any:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (*(gradient * loss_gradient if need else None for gradient, need in needed), None, None)


@njit(cache=True, nogil=True)
def _moments(x, valid):
    """Number of valid samples, and the mean and standard deviation of `x` over them."""
    count, total = 0, 0.0
    for i in range(x.size):
        if valid[i]:
            count += 1
            total += x[i]
    mean = total / max(count, 1)
    squares = 0.0
    for i in range(x.size):
        if valid[i]:
            squares += (x[i] - mean) ** 2
    return count, mean, math.sqrt(squares / max(count, 1))


@njit(cache=True, nogil=True)
def _loss(
    log_prob, value, exploration, advantages, returns, old_values, behaviour_log_prob, valid, gradients, statistics,
    surrogate, normalize, clip, value_clip, value_coef, exploration_coef,
):  # fmt: skip
    """Fill `gradients` of log_prob, value and exploration, ``[3, n]``, and `statistics`.

    All other arrays are flat. `surrogate`: PPO's clipped surrogate, else the plain policy gradient. `normalize`: advantages get mean 0
    and standard deviation 1. `exploration_coef`: weight of `exploration` in the loss.
    """
    count, adv_mean, adv_std = _moments(advantages, valid)
    _, _, returns_std = _moments(returns, valid)
    scale = 1.0 / max(count, 1)
    shift, spread = (adv_mean, adv_std + ADVANTAGE_EPS) if normalize else (0.0, 1.0)
    policy_sum = value_sum = exploration_sum = kl_sum = excess_sum = error_sum = error_squares = 0.0
    low, high, clipped = np.inf, -np.inf, 0
    for i in range(valid.size):
        if not valid[i]:
            gradients[0, i] = gradients[1, i] = gradients[2, i] = 0.0
            continue
        log_ratio = np.float64(log_prob[i] - behaviour_log_prob[i])
        excess = math.exp(log_ratio) - 1.0
        kl_sum += excess - log_ratio
        excess_sum += excess
        low, high = min(low, excess), max(high, excess)
        clipped += abs(excess) > clip
        advantage = (advantages[i] - shift) / spread
        if surrogate:
            gain, limit = (1.0 + excess) * advantage, advantage + clip * abs(advantage)
            policy_sum -= min(gain, limit)
            slope = 0.0 if gain > limit else gain
        else:
            policy_sum -= log_prob[i] * advantage
            slope = advantage
        gradients[0, i] = -slope * scale
        error = np.float64(value[i] - returns[i])
        error_sum += error
        error_squares += error * error
        square, pull = error * error, error
        if value_clip > 0:
            change = np.float64(value[i] - old_values[i])
            clipped_error = error - change + min(max(change, -value_clip), value_clip)
            if clipped_error * clipped_error > square:
                square, pull = clipped_error * clipped_error, 0.0
        value_sum += 0.5 * square
        gradients[1, i] = value_coef * pull * scale
        exploration_sum += exploration[i]
        gradients[2, i] = exploration_coef * scale
    policy_loss, value_loss, exploration_mean = policy_sum * scale, value_sum * scale, exploration_sum * scale
    residual = error_squares * scale - (error_sum * scale) ** 2
    statistics[0] = policy_loss + value_coef * value_loss + exploration_coef * exploration_mean
    statistics[1] = policy_loss
    statistics[2] = value_loss
    statistics[3] = exploration_mean
    statistics[4] = kl_sum * scale
    statistics[5] = 1.0 + excess_sum * scale
    statistics[6] = 1.0 + low if count else 1.0
    statistics[7] = 1.0 + high if count else 1.0
    statistics[8] = clipped * scale
    statistics[9] = 1.0 - residual / returns_std**2 if returns_std > 0 else 0.0
    statistics[10] = adv_mean
    statistics[11] = adv_std
    statistics[12] = count / max(valid.size, 1)
