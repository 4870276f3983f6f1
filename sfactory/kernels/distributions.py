"""Log-probability, entropy and their gradients for :mod:`sfactory.distributions`, each in one compiled pass over rows
in CPU memory."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from sfactory.distributions import FORBIDDEN, HALF_LOG_2PI

_HALF_LOG_2PI = np.float32(HALF_LOG_2PI)
_FORBIDDEN = np.float32(FORBIDDEN)


@njit(cache=True, nogil=True)
def densities(
    params, categorical, continuous, mask, sizes, from_uniform, log_probs, probabilities, entropies, log_prob,
    exploration
):  # fmt: skip
    """Fill the last five arrays.

    Args:
        params: float32 ``[N, P]``, P = logits + 2 D.
        categorical: int32 ``[N, K]``.
        continuous: float32 ``[N, D]``, before squashing.
        mask: bool ``[N, logits]`` of allowed categories, or of size zero if there is no mask. A component whose mask
            allows nothing counts as fully allowed.
        sizes: int32 ``[K]``, categories of each component.
        from_uniform: Whether `exploration` is the KL divergence of the components from uniform policies, else the
            entropy.
        log_probs, probabilities: float32 ``[N, logits]``, of the categories; for :func:`density_gradients`.
        entropies: float32 ``[N, K]``, of the components; for :func:`density_gradients`.
        log_prob: float32 ``[N]``, of the actions.
        exploration: float32 ``[N]``.
    """
    rows, dims = continuous.shape
    logits = log_probs.shape[1]
    masked = mask.size > 0
    for row in range(rows):
        total, spread = 0.0, np.float32(0)
        begin = 0
        for k in range(sizes.size):
            end = begin + sizes[k]
            restricted, allowed = False, 0
            if masked:
                for i in range(begin, end):
                    restricted |= mask[row, i]
            highest = np.float32(-np.inf)
            for i in range(begin, end):
                fine = not restricted or mask[row, i]
                allowed += fine
                log_probs[row, i] = params[row, i] if fine else _FORBIDDEN
                highest = max(highest, log_probs[row, i])
            mass, moment = np.float32(0), np.float32(0)
            for i in range(begin, end):
                excess = log_probs[row, i] - highest
                weight = math.exp(excess)
                log_probs[row, i], probabilities[row, i] = excess, weight
                mass += weight
                moment += weight * excess
            log_mass = math.log(mass)
            for i in range(begin, end):
                log_probs[row, i] -= log_mass
                probabilities[row, i] /= mass
            entropies[row, k] = log_mass - moment / mass
            spread += np.float32(math.log(allowed)) - entropies[row, k] if from_uniform else entropies[row, k]
            total += log_probs[row, begin + categorical[row, k]]
            begin = end
        for d in range(dims):
            log_std = params[row, logits + dims + d]
            z = (continuous[row, d] - params[row, logits + d]) * math.exp(-log_std)
            total -= np.float32(0.5) * z * z + log_std + _HALF_LOG_2PI
            if not from_uniform:
                spread += log_std + np.float32(0.5) + _HALF_LOG_2PI
        log_prob[row], exploration[row] = total, spread


@njit(cache=True, nogil=True)
def density_gradients(
    params, categorical, continuous, log_probs, probabilities, entropies, sizes, from_uniform, of_log_prob,
    of_exploration, gradient
):  # fmt: skip
    """Fill `gradient` ``[N, P]`` from the gradients of log_prob and exploration, ``[N]``; the others as
    :func:`densities` has them."""
    rows, dims = continuous.shape
    logits = log_probs.shape[1]
    for row in range(rows):
        weight, pull = of_log_prob[row], of_exploration[row]
        of_entropy = -pull if from_uniform else pull
        begin = 0
        for k in range(sizes.size):
            for i in range(begin, begin + sizes[k]):
                gradient[row, i] = -probabilities[row, i] * (
                    weight + of_entropy * (log_probs[row, i] + entropies[row, k])
                )
            gradient[row, begin + categorical[row, k]] += weight
            begin += sizes[k]
        for d in range(dims):
            inverse = math.exp(-params[row, logits + dims + d])
            z = (continuous[row, d] - params[row, logits + d]) * inverse
            gradient[row, logits + d] = weight * z * inverse
            gradient[row, logits + dims + d] = weight * (z * z - np.float32(1)) + (
                np.float32(0) if from_uniform else pull
            )
