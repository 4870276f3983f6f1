"""The loss of :mod:`sfactory.losses` with its gradients and sums in one compiled pass over CPU memory.

Some seventy small tensor operations cost more than a small network on a CPU; this costs as much as a few of them. The
gradients are written out, and the tests hold them to those that autograd finds for :func:`sfactory.losses.chunk_loss`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from sfactory.losses import (
    CLIPPED,
    COUNT,
    ERROR,
    ERROR_SQUARES,
    EXPLORATION,
    KL,
    POLICY,
    RETURNS,
    RETURNS_SQUARES,
    VALUE,
)


@njit(cache=True, nogil=True)
def loss_and_gradients(
    log_prob, value, exploration, advantages, returns, old_values, old_log_prob, valid, count,
    surrogate, clip, value_clip, value_coef, exploration_coef, of_log_prob, of_value, of_exploration, sums,
):  # fmt: skip
    """Fill the gradients of log_prob, value and exploration, and `sums` as :func:`sfactory.losses.chunk_loss` gives
    them.

    Args:
        log_prob to valid: Flat arrays, as in :func:`sfactory.losses.chunk_loss`.
        count: Number of valid samples of the whole minibatch.
        surrogate: PPO's clipped surrogate, else the plain policy gradient.
        exploration_coef: Weight of `exploration` in the loss.
    """
    scale = 1.0 / max(count, 1.0)
    policy_sum = value_sum = exploration_sum = kl_sum = 0.0
    error_sum = error_squares = returns_sum = returns_squares = 0.0
    clipped, samples = 0, 0
    for i in range(valid.size):
        if not valid[i]:
            of_log_prob[i] = of_value[i] = of_exploration[i] = 0.0
            continue
        samples += 1
        log_ratio = np.float64(log_prob[i] - old_log_prob[i])
        excess = math.exp(log_ratio) - 1.0
        kl_sum += excess - log_ratio
        clipped += abs(excess) > clip
        advantage = np.float64(advantages[i])
        if surrogate:
            beyond = advantage >= 0.0 and excess > clip
            limit = advantage + clip * abs(advantage)
            gain = limit if beyond else (1.0 + excess) * advantage
            policy_sum -= min(gain, limit)
            slope = 0.0 if beyond or gain > limit else gain
        else:
            policy_sum -= log_prob[i] * advantage
            slope = advantage
        of_log_prob[i] = -slope * scale
        target = np.float64(returns[i])
        returns_sum += target
        returns_squares += target * target
        error = value[i] - target
        error_sum += error
        error_squares += error * error
        square, pull = error * error, error
        if value_clip > 0:
            change = np.float64(value[i] - old_values[i])
            clipped_error = error - change + min(max(change, -value_clip), value_clip)
            # Within the clip range both errors are the same but for rounding, and so are their gradients.
            if abs(change) > value_clip and clipped_error * clipped_error > square:
                square, pull = clipped_error * clipped_error, 0.0
        value_sum += 0.5 * square
        of_value[i] = value_coef * pull * scale
        exploration_sum += exploration[i]
        of_exploration[i] = exploration_coef * scale
    sums[POLICY] = policy_sum
    sums[VALUE] = value_sum
    sums[EXPLORATION] = exploration_sum
    sums[KL] = kl_sum
    sums[CLIPPED] = clipped
    sums[ERROR] = error_sum
    sums[ERROR_SQUARES] = error_squares
    sums[RETURNS] = returns_sum
    sums[RETURNS_SQUARES] = returns_squares
    sums[COUNT] = samples
