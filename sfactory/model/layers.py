"""Layers that the encoders share: how raw observations enter a network, and linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfactory.model.initialization import orthogonal
from sfactory.model.precision import compute_dtype
from sfactory.spaces import Leaf

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


class Dense(nn.Linear):
    """A linear layer with orthogonal initial weights."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        orthogonal(self)


class PixelConv(nn.Conv2d):
    """The first convolution of an image encoder: takes the observation as it is stored.

    Pixels have eight bits until here and are converted once, to the dtype in which the convolution runs. Division by
    the largest pixel value, or by the steps of a normalised one, happens in the weights. An image of categories has a
    plane for each of them, one-hot. Both layouts enter in channels-last memory order, in which all later layers then
    run.

    Attributes:
        leaf: The image that it reads.
        categories: Of each of its entries; 0 where they are quantities.
        scale: By which pixels are multiplied.
    """

    def __init__(
        self, leaf: Leaf, out_channels: int, kernel_size: int, stride: int | tuple[int, int], padding: int = 0
    ) -> None:
        categories = leaf.sizes[0] if leaf.sizes else 0
        super().__init__(leaf.channels * max(1, categories), out_channels, kernel_size, stride, padding)
        orthogonal(self)
        self.leaf, self.categories = leaf, categories
        self.scale = _scale(leaf)

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(self.weight)
        if self.categories:
            x = self.planes(x, dtype)
        elif self.leaf.channels_last:
            x = x.permute(0, 3, 1, 2).to(dtype)
        else:
            x = x.to(dtype, memory_format=torch.channels_last)
        return F.conv2d(x, self.weight * self.scale, self.bias, self.stride, self.padding)

    def planes(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Categories as stored, one-hot: ``[N, channels * categories, H, W]``."""
        x = x if self.leaf.channels_last else x.permute(0, 2, 3, 1)
        hot = x.unsqueeze(-1) == torch.arange(self.categories, device=x.device, dtype=x.dtype)
        return hot.flatten(3).to(dtype).permute(0, 3, 1, 2)


class FlatInput(nn.Module):
    """Leaves as float32 ``[N, out_features]``: first all numbers, uint8 divided by the largest value and floats as they
    are, then all categories, one-hot, divided by the root of their number: K entries that seldom change would else move
    a unit of the next layer K times as far as a single one in each step of the optimizer, and saturate it.

    Attributes:
        numbers, categories: The leaves of each kind, by their positions.
        entries: Categories of all entries together.
        offsets: int64, where the categories of each entry begin among them.
        hot: float32 scalar that stands for a category. Saved with the model unless it is 1, so that weights trained
            with another scale are not loaded by mistake.
    """

    offsets: Tensor
    hot: Tensor

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        super().__init__()
        self.numbers = [i for i, leaf in enumerate(leaves) if not leaf.sizes]
        self.categories = [i for i, leaf in enumerate(leaves) if leaf.sizes]
        sizes = [size for i in self.categories for size in leaves[i].sizes]
        self.scales, self.entries = [_scale(leaves[i]) for i in self.numbers], sum(sizes)
        self.out_features = sum(math.prod(leaves[i].shape) for i in self.numbers) + self.entries
        offsets = torch.tensor([0, *accumulate(sizes[:-1])]) if sizes else torch.zeros(0, dtype=torch.int64)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("hot", torch.tensor(max(1, len(sizes)) ** -0.5), persistent=len(sizes) > 1)

    def forward(self, *obs: Tensor) -> Tensor:
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in obs]
        parts = [
            flat[i] if scale == 1.0 and flat[i].is_floating_point() else flat[i].float() * scale
            for i, scale in zip(self.numbers, self.scales, strict=True)
        ]
        if self.entries:
            codes = torch.cat([flat[i] for i in self.categories], -1) + self.offsets
            hot = torch.zeros(codes.shape[0], self.entries, device=codes.device)
            parts.append(hot.scatter_(1, codes, self.hot.expand(codes.shape)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _scale(leaf: Leaf) -> float:
    """What a leaf's numbers are multiplied by."""
    return 1.0 / leaf.high if leaf.dtype in ("uint8", "int8") and not leaf.sizes else 1.0
