"""Pixels normalised in one pass."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from sfactory.kernels.pixels import FastPixelNormalizer
from sfactory.model.normalizer import PixelNormalizer
from sfactory.spaces import ObservationSpec


@pytest.mark.parametrize("shape", [(4, 84, 84), (37, 41, 3)])
@pytest.mark.parametrize("updates", [0, 1])
def test_every_bit_is_that_of_the_plain_normaliser(shape: tuple[int, int, int], updates: int) -> None:
    (leaf,) = ObservationSpec.from_space(gym.spaces.Box(0, 255, shape, np.uint8)).leaves
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 256, (16, 3, *shape), dtype=torch.uint8, generator=generator)
    x[:, :, 0] //= 64
    normalizer = PixelNormalizer(leaf)
    for _ in range(updates):
        normalizer.update(x, torch.ones(16, 3, dtype=torch.bool))
    expected = normalizer(x)
    assert expected.unique().numel() > 20
    normalizer.__class__ = FastPixelNormalizer
    for images in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        found = normalizer(images)
        assert found.dtype == torch.int8 and torch.equal(found, expected)
    assert torch.equal(normalizer(x[5]), expected[5])
