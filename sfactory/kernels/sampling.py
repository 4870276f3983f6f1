"""Action sampling in one compiled pass over the rows, results written in place."""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from sfactory.distributions import HALF_LOG_2PI, ActionDistribution, Distribution, Sampler

_HALF_LOG_2PI = np.float32(HALF_LOG_2PI)


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
            mass = 0.0  # float64: of many categories the sum of float32 is off
            for i in range(begin, end):
                weights[i] = math.exp(params[row, i] - highest) if not restricted or mask[row, i] else np.float32(0.0)
                mass += weights[i]
            threshold = uniforms[row, k] * mass
            chosen = begin
            below = 0.0
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


def initialize() -> None:
    """Call one compiled function, so that processes forked later need not initialise numba (0.3 s each)."""
    sample_rows(
        np.zeros((1, 2), np.float32), np.zeros((0, 0), bool), np.full(1, 2, np.int32), np.zeros((1, 1), np.float32),
        np.zeros((1, 0), np.float32), np.zeros((1, 1), np.int32), np.zeros((1, 0), np.float32), np.zeros(1, np.float32),
    )  # fmt: skip


class CompiledSampler(Sampler):
    """:class:`Sampler` for :class:`ActionDistribution`, which takes the same random numbers."""

    def __init__(self, distribution: Distribution, seed: int) -> None:
        assert isinstance(distribution, ActionDistribution)
        super().__init__(distribution, seed)
        self._sizes = np.array(distribution.action.sizes, np.int32)
        self._uniforms, self._normals = torch.empty(0, len(self._sizes)), torch.empty(0, distribution.action.continuous)
        self._no_mask = np.zeros((0, 0), bool)

    def __call__(
        self,
        params: NDArray[np.float32],
        mask: NDArray[np.bool_] | None,
        categorical: NDArray[np.int32],
        continuous: NDArray[np.float32],
        log_prob: NDArray[np.float32],
    ) -> None:
        if len(params) != len(self._uniforms):
            self._uniforms, self._normals = (
                x.new_empty(len(params), x.shape[1]) for x in (self._uniforms, self._normals)
            )
        if self._uniforms.numel():
            self._uniforms.uniform_(generator=self._generator)
        if self._normals.numel():
            self._normals.normal_(generator=self._generator)
        sample_rows(
            params, self._no_mask if mask is None else mask, self._sizes, self._uniforms.numpy(),
            self._normals.numpy(), categorical, continuous, log_prob,
        )  # fmt: skip
