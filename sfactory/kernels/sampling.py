"""Action sampling on the CPU: one compiled pass over the rows, results written in place.

The same distribution as :mod:`sfactory.distributions`; log-probabilities agree with its ``log_prob`` to 1e-5.
"""

from __future__ import annotations

import math

import numba
import numpy as np

_HALF_LOG_2PI = np.float32(0.5 * math.log(2 * math.pi))


@numba.njit(cache=True, nogil=True)
def sample_rows(
    params: np.ndarray,
    mask: np.ndarray,
    sizes: np.ndarray,
    uniforms: np.ndarray,
    normals: np.ndarray,
    categorical: np.ndarray,
    continuous: np.ndarray,
    log_prob: np.ndarray,
) -> None:
    """Draw one action for each row by inverting each component's cumulative distribution, and record its
    log-probability.

    Args:
        params: float32 ``[N, P]``, P = logits + 2 D: logits, means, log standard deviations.
        mask: bool ``[N, logits]`` of allowed categories, or of size zero if there is no mask. A component whose mask
            allows nothing counts as fully allowed.
        sizes: int ``[K]``, categories of each component.
        uniforms: float32 ``[N, K]`` in [0, 1).
        normals: float32 ``[N, D]``, standard normal.
        categorical: int32 ``[N, K]``, written.
        continuous: float32 ``[N, D]``, written; before squashing.
        log_prob: float32 ``[N]``, written.
    """
    rows, dims = normals.shape
    logits = params.shape[1] - 2 * dims
    masked = mask.size > 0
    weights = np.empty(logits, np.float32)
    for row in range(rows):
        total = np.float32(0.0)
        begin = 0
        for k in range(sizes.shape[0]):
            end = begin + sizes[k]
            restricted = False
            if masked:
                for i in range(begin, end):
                    restricted |= mask[row, i]
            highest = np.float32(-np.inf)
            for i in range(begin, end):
                if (not restricted or mask[row, i]) and params[row, i] > highest:
                    highest = params[row, i]
            mass = np.float32(0.0)
            for i in range(begin, end):
                weights[i] = math.exp(params[row, i] - highest) if not restricted or mask[row, i] else np.float32(0.0)
                mass += weights[i]
            threshold = uniforms[row, k] * mass
            chosen = begin
            below = np.float32(0.0)
            for i in range(begin, end):
                chosen = i
                below += weights[i]
                if below > threshold:  # some i always does: u < 1, and the same sum in the same order gave the mass
                    break
            categorical[row, k] = chosen - begin
            total += params[row, chosen] - highest - math.log(mass)
            begin = end
        for d in range(dims):
            log_std = params[row, logits + dims + d]
            z = normals[row, d]
            continuous[row, d] = params[row, logits + d] + math.exp(log_std) * z
            total -= np.float32(0.5) * z * z + log_std + _HALF_LOG_2PI
        log_prob[row] = total
