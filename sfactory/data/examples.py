"""Small chunks of made-up experience, on which user code and kernels are tried before a run begins."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sfactory.data.batch import Batch
from sfactory.spaces import ActionSpec, Leaf, ObservationSpec

STEPS, COLUMNS = 3, 4


def example_batch(observation: ObservationSpec, action: ActionSpec, state_size: int, masked: bool = False) -> Batch:
    """A batch ``[3, 4]`` with ends of both kinds and inactive rows.

    The first column's mask allows nothing, which counts as everything; all others allow the action that was taken.
    """
    generator = torch.Generator().manual_seed(0)
    k = len(action.sizes)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def chance(share: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < share

    categorical = torch.zeros(STEPS, COLUMNS, k, dtype=torch.int32)
    for i, size in enumerate(action.sizes):
        categorical[..., i] = torch.randint(0, size, (STEPS, COLUMNS), generator=generator)
    mask = None
    if masked and k:
        mask, begin = chance(0.6, STEPS + 1, COLUMNS, action.logits), 0
        for i, size in enumerate(action.sizes):
            mask[:-1].scatter_(2, (begin + categorical[..., i : i + 1]).long(), True)
            begin += size
        mask[:, 0] = False
    terminated, truncated = chance(0.2, STEPS, COLUMNS), chance(0.3, STEPS, COLUMNS)
    return Batch(
        obs=tuple(_observations(leaf, generator) for leaf in observation.leaves),
        mask=mask,
        first=chance(0.2, STEPS + 1, COLUMNS),
        active=chance(0.8, STEPS + 1, COLUMNS),
        reward=normal(STEPS, COLUMNS),
        terminated=terminated,
        truncated=truncated,
        final_change=torch.where(chance(0.5, STEPS, COLUMNS), normal(STEPS, COLUMNS), math.nan),
        log_prob=0.3 * normal(STEPS, COLUMNS) - math.log(max(2, action.logits)),
        categorical=categorical,
        continuous=normal(STEPS, COLUMNS, action.continuous),
        rnn_state=normal(COLUMNS, state_size),
        owner=torch.zeros(COLUMNS, dtype=torch.int32),
    )


def _observations(leaf: Leaf, generator: torch.Generator) -> Tensor:
    """``[T+1, B, *leaf.shape]`` in the leaf's dtype."""
    shape = (STEPS + 1, COLUMNS, *leaf.shape)
    if leaf.sizes:
        sizes = torch.tensor(leaf.sizes).reshape(leaf.shape)
        return (torch.rand(shape, generator=generator) * sizes).to(getattr(torch, leaf.dtype.name))
    if leaf.dtype == "uint8":
        return torch.randint(0, int(leaf.high) + 1, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator)
