"""Pixels normalised in one pass (:class:`sfactory.model.normalizer.PixelNormalizer`)."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sfactory.model.normalizer import PIXEL_LIMIT, PIXEL_STEPS, PixelNormalizer

_LIMIT = PIXEL_LIMIT * PIXEL_STEPS


@njit(cache=True, nogil=True)
def _normalize(images, scale, offset, limit, out):
    """Images uint8 ``[N, size]`` to int8 of that shape; the others float32 ``[size]`` and a scalar."""
    for n in range(len(images)):
        for i in range(len(scale)):
            step = np.rint(np.float32(images[n, i]) * scale[i] + offset[i])
            out[n, i] = np.int8(min(max(step, -limit), limit))


class FastPixelNormalizer(PixelNormalizer):
    """A :class:`PixelNormalizer` without an array between the pixels and what they become."""

    def forward(self, x: Tensor) -> Tensor:
        scale, offset = (values.flatten().numpy() for values in self.scale_and_offset())
        images = x.contiguous().view(-1, len(scale))
        out = torch.empty(images.shape, dtype=torch.int8)
        _normalize(images.numpy(), scale, offset, np.float32(_LIMIT), out.numpy())
        return out.view(x.shape)
