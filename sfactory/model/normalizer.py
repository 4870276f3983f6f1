"""Running moments: of observations, inside the model, and of returns, whose unit the critic has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.spaces import Leaf

OBSERVATION_LIMIT = 10.0
PIXEL_LIMIT = 5
PIXEL_STEPS = 25
"""Steps of a normalised pixel in a standard deviation."""
_EPSILON = 1e-8
_PIXEL_EPSILON = 1e-5
"""Of a pixel's variance, in squares of its largest value: a deviation of 0.8 where that is 255."""
_PICTURES_APART = 16
"""Time steps from a picture whose pixels count in their moments to the next: those between are much like it."""


def merge_moments(mean: Tensor, var: Tensor, count: Tensor, values: Tensor, valid: Tensor) -> None:
    """Merge a batch into running moments, in place and without a sync (Chan et al. 1979, the parallel update).

    Values are centred on the running mean before they are squared, and the variance moves by its difference from the
    batch's, so float32 suffices, also after 10^8 batches. An element whose mean or variance in the batch is not finite
    stays as it is: what is once in the moments stays there. A batch without any other element, or without valid rows,
    changes nothing.

    Args:
        mean: ``[*shape]``, updated.
        var: ``[*shape]``, population variance, updated.
        count: ``[]``, number of samples so far, updated.
        values: ``[..., *shape]``; what stands in rows that are not valid does not matter.
        valid: bool ``[...]``.
    """
    flat = values.detach().reshape(-1, *mean.shape).to(mean.dtype)
    weight = valid.reshape(-1, *(1 for _ in mean.shape)).to(mean.dtype)
    added = weight.sum()
    share = added.clamp(min=1.0)
    offset = torch.where(weight > 0, flat - mean, 0.0)
    shift = offset.sum(0) / share
    batch_var = ((offset - shift).square() * weight).sum(0) / share
    total = count + added
    portion = added / total.clamp(min=1.0)
    merged = torch.lerp(var, batch_var + shift.square() * (1 - portion), portion)
    usable = (added > 0) & merged.isfinite() & shift.isfinite()
    var.copy_(torch.where(usable, merged, var))
    mean.copy_(torch.where(usable, mean + shift * portion, mean))
    count.copy_(torch.where(usable.any(), total, count))


class PixelNormalizer(nn.Module):
    """An image's pixels, each with its running mean removed and divided by its running standard deviation.

    What never changes becomes 0, and what seldom does stands out, such as a ball on a background. The result has eight
    bits as the image has: the 25th parts of a deviation, clamped to five of those. Before the first update pixels are
    divided by their largest value alone.

    Args:
        leaf: The image, uint8.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.high = float(leaf.high)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(leaf.shape))
        self.register_buffer("var", torch.full(leaf.shape, self.high**2))

    @staticmethod
    def fits(leaf: Leaf) -> bool:
        """Whether a leaf is an image of pixels, not of categories."""
        return leaf.is_image and leaf.dtype == "uint8" and not leaf.sizes

    def forward(self, x: Tensor) -> Tensor:
        """Images uint8 ``[..., *leaf.shape]`` to int8 of that shape."""
        scale, offset = self.scale_and_offset()
        limit = PIXEL_LIMIT * PIXEL_STEPS
        return x.float().mul_(scale).add_(offset).round_().clamp_(-limit, limit).to(torch.int8)

    def scale_and_offset(self) -> tuple[Tensor, Tensor]:
        """What pixels are multiplied with, and what is then added to them; ``[*leaf.shape]`` each."""
        scale = PIXEL_STEPS * (self.var + _PIXEL_EPSILON * self.high**2).rsqrt()
        return scale, -self.mean * scale

    def update(self, x: Tensor, valid: Tensor) -> None:
        """Merge a batch ``[T, B, *leaf.shape]`` into the moments; bool ``valid [T, B]`` says which images count."""
        merge_moments(self.mean, self.var, self.count, x[::_PICTURES_APART], valid[::_PICTURES_APART])


class ObservationNormalizer(nn.Module):
    """Float leaves with their running mean and standard deviation removed, clamped to [-10, 10]; images by a
    :class:`PixelNormalizer`; other leaves pass unchanged.

    The moments are float32 buffers, so that they travel with the parameters. Before the first update the values pass as
    they are.

    Args:
        leaves: Of the observation.
        floats: Whether float leaves are normalised.
        images: Whether images of pixels are.

    Attributes:
        leaves: As they are afterwards.
    """

    count: Tensor

    def __init__(self, leaves: Sequence[Leaf], floats: bool = True, images: bool = False) -> None:
        super().__init__()
        self.floats = tuple(floats and leaf.dtype == "float32" for leaf in leaves)
        pixels = [images and PixelNormalizer.fits(leaf) for leaf in leaves]
        self.register_buffer("count", torch.zeros(()))
        for i, leaf in enumerate(leaves):
            if self.floats[i]:
                self.register_buffer(f"mean_{i}", torch.zeros(leaf.shape))
                self.register_buffer(f"var_{i}", torch.ones(leaf.shape))
        self.pixels = nn.ModuleDict({str(i): PixelNormalizer(leaf) for i, leaf in enumerate(leaves) if pixels[i]})
        self.leaves = tuple(
            dataclasses.replace(leaf, dtype=np.dtype(np.int8), high=PIXEL_STEPS) if pixels[i] else leaf
            for i, leaf in enumerate(leaves)
        )

    def forward(self, obs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Normalise leaves ``[..., *leaf.shape]`` with any leading dimensions."""
        return tuple(self._normalized(i, x) for i, x in enumerate(obs))

    def _normalized(self, index: int, x: Tensor) -> Tensor:
        if str(index) in self.pixels:
            return self.pixels[str(index)](x)
        if not self.floats[index]:
            return x
        mean, scale = self.mean_and_scale(index)
        return ((x - mean) * scale).clamp(-OBSERVATION_LIMIT, OBSERVATION_LIMIT)

    def mean_and_scale(self, index: int) -> tuple[Tensor, Tensor]:
        """What is subtracted from float leaf number `index`, and what it is then multiplied with."""
        mean, var = self._moments(index)
        return mean, (var + _EPSILON).rsqrt()

    def _moments(self, index: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"mean_{index}"), getattr(self, f"var_{index}")

    @torch.no_grad()
    def update(self, obs: tuple[Tensor, ...], valid: Tensor) -> None:
        """Merge a batch into the moments. Only the learner calls this.

        Args:
            obs: Leaves ``[T, B, *leaf.shape]``.
            valid: bool ``[T, B]``; other rows do not count.
        """
        before = self.count.clone()
        for i, is_float in enumerate(self.floats):
            if is_float:
                count = before.clone()
                merge_moments(*self._moments(i), count, obs[i], valid)
                self.count.copy_(torch.maximum(self.count, count))
        for index, pixels in self.pixels.items():
            assert isinstance(pixels, PixelNormalizer)
            pixels.update(obs[int(index)], valid)


class RunningMeanStd(nn.Module):
    """Running mean and standard deviation of one quantity, as float64 scalars on a device; the host never waits for
    them.

    Before the first update the mean is 0 and the standard deviation 1.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("var", torch.ones((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """float64 ``[]``, at least 1e-4."""
        return self.var.sqrt().clamp(min=1e-4)

    @torch.no_grad()
    def update(self, values: Tensor, valid: Tensor) -> None:
        """Merge values ``[...]`` where bool ``valid [...]``."""
        merge_moments(self.mean, self.var, self.count, values, valid)


class ValueUnit(nn.Module):
    """The unit of a model's values, which travels with its weights: a return is ``std`` times the value plus ``mean``.
    The learner keeps the exact moments."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Leaves the unit as it is where a checkpoint of an earlier sfactory has none."""
        for name, buffer in self.named_buffers():
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *args)
