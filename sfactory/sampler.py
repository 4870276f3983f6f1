"""Drawing the actions of a group of rows into its slot."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sfactory.distributions import Distribution


class Sampler:
    """Draws actions by an action distribution.

    Args:
        distribution: Of the model's actions.
        seed: Seed for action sampling.
    """

    def __init__(self, distribution: Distribution, seed: int) -> None:
        self._distribution, self._generator = distribution, torch.Generator().manual_seed(seed)

    def __call__(
        self,
        params: NDArray[np.float32],
        mask: NDArray[np.bool_] | None,
        categorical: NDArray[np.int32],
        continuous: NDArray[np.float32],
        log_prob: NDArray[np.float32],
    ) -> None:
        """Draw one action for each row, and write it with its log-probability.

        Args:
            params: ``[N, P]``, the policy's parameters.
            mask: ``[N, logits]``, allowed categories, or None.
            categorical: ``[N, K]``, written.
            continuous: ``[N, D]``, written; before squashing.
            log_prob: ``[N]``, written.
        """
        allowed = None if mask is None else torch.from_numpy(mask)
        drawn = self._distribution.sample(torch.from_numpy(params), allowed, self._generator)
        for out, tensor in zip((categorical, continuous, log_prob), drawn, strict=True):
            out[...] = tensor.numpy()
