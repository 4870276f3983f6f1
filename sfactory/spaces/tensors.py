"""Dtypes in torch, and environment actions as tensors: what :meth:`sfactory.spaces.ActionSpec.batch` computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.spaces import ActionSpec, BoxScale, spaces


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def action_parts(action: ActionSpec) -> Iterator[nn.Module]:
    """What makes each leaf of an action space of a policy's categories, int32 ``[rows, K]``, and unsquashed samples,
    float32 ``[rows, D]``: modules, in the order of the spec's parts."""
    for part in action.parts:
        if isinstance(part.space, spaces.Box):
            yield _BoxAction(part.space, part.begin, part.end, action.squash)
        else:
            yield _CategoricalAction(part.space, part.begin, part.end)


class _CategoricalAction(nn.Module):
    """Categories as a Discrete, MultiDiscrete or MultiBinary space counts them."""

    start: Tensor

    def __init__(self, space: spaces.Space, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end, self.shape = begin, end, tuple(space.shape or ())
        self.dtype = torch.int64 if isinstance(space, spaces.Discrete) else torch_dtype(cast(np.dtype, space.dtype))
        start = torch.from_numpy(np.array(getattr(space, "start", 0), np.int64))
        self.register_buffer("start", start, persistent=False)

    def forward(self, categorical: Tensor, continuous: Tensor) -> Tensor:
        values = categorical[:, self.begin : self.end].long().reshape(-1, *self.shape)
        return (values + self.start).to(self.dtype)


class _BoxAction(nn.Module):
    """Gaussian samples in a Box: as :class:`sfactory.spaces.ActionSpec` puts them there, in torch."""

    bounded: Tensor
    centre: Tensor
    half_width: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, space: spaces.Box, begin: int, end: int, squash: str) -> None:
        super().__init__()
        self.begin, self.end, self.shape, self.squash = begin, end, tuple(space.shape), squash
        self.dtype = torch_dtype(space.dtype)
        scale = BoxScale(space)
        for name in ("bounded", "centre", "half_width", "low", "high"):
            self.register_buffer(name, torch.from_numpy(np.array(getattr(scale, name))), persistent=False)

    def forward(self, categorical: Tensor, continuous: Tensor) -> Tensor:
        u = continuous[:, self.begin : self.end].reshape(-1, *self.shape)
        unit = u.tanh() if self.squash == "tanh" else u.clamp(-1.0, 1.0)
        inside = torch.where(self.bounded, self.centre + self.half_width * unit, u)
        return torch.minimum(torch.maximum(inside, self.low), self.high).to(self.dtype)
