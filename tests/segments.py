"""Random segments with both kinds of episode end, for the tests of the estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

Estimator = Callable[..., tuple[np.ndarray, np.ndarray]]


class Segments(NamedTuple):
    """The inputs of V-trace in its order, ``[T, B]``; those of GAE are all but the first."""

    log_ratios: np.ndarray
    rewards: np.ndarray
    values: np.ndarray
    bootstrap_value: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_values: np.ndarray

    def part(self, begin: int, end: int, bootstrap_value: np.ndarray) -> Segments:
        """The steps from `begin` to `end`, with what follows them."""
        cut = Segments(*(array[begin:end] if array.ndim == 2 else array for array in self))
        return cut._replace(bootstrap_value=bootstrap_value)


def random_segments(seed: int, steps: int, rows: int, ends: float = 0.15, dtype: Any = np.float64) -> Segments:
    """Off-policy data in which a share `ends` of the steps terminates and as many are truncated; final values are NaN
    elsewhere."""
    rng = np.random.default_rng(seed)
    kind = rng.random((steps, rows))
    truncated = (kind >= ends) & (kind < 2 * ends)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale, shape).astype(dtype)

    final_values = np.where(truncated, normal(steps, rows), np.nan).astype(dtype)
    return Segments(
        normal(steps, rows, scale=0.7),
        normal(steps, rows),
        normal(steps, rows),
        normal(rows),
        kind < ends,
        truncated,
        final_values,
    )


def on_tensors(estimator: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Estimator:
    """An estimator of tensors as one of arrays."""

    def call(*args: Any, **settings: float) -> tuple[np.ndarray, np.ndarray]:
        first, second = estimator(*(torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args), **settings)
        return first.numpy(), second.numpy()

    return call
