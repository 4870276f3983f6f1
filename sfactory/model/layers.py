"""Layers that the encoders share: how raw observations enter a network, and linear layers."""

from __future__ import annotations

import math
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

    Pixels stay uint8 until here and are converted once, to the dtype in which the convolution runs. Division by the
    largest pixel value happens in the weights. Both image layouts enter in channels-last memory order, in which all
    later layers then run.

    Attributes:
        leaf: The image that it reads.
        scale: By which pixels are multiplied.
    """

    def __init__(self, leaf: Leaf, out_channels: int, kernel_size: int, stride: int, padding: int = 0) -> None:
        channels = leaf.shape[2] if leaf.channels_last else leaf.shape[0]
        super().__init__(channels, out_channels, kernel_size, stride, padding)
        orthogonal(self)
        self.leaf = leaf
        self.scale = 1.0 / leaf.high if leaf.dtype == "uint8" else 1.0

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(self.weight)
        if self.leaf.channels_last:
            x = x.permute(0, 3, 1, 2).to(dtype)
        else:
            x = x.to(dtype, memory_format=torch.channels_last)
        return F.conv2d(x, self.weight * self.scale, self.bias, self.stride, self.padding)


class FlatInput(nn.Module):
    """A leaf as float32 ``[N, out_features]``: categories one-hot, uint8 divided by the largest value, floats as they
    are."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.scale = 1.0 / leaf.high if leaf.dtype == "uint8" else 1.0
        self.out_features = sum(leaf.sizes) if leaf.sizes else math.prod(leaf.shape)
        offsets = torch.tensor([0, *accumulate(leaf.sizes[:-1])]) if leaf.sizes else None
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], -1)
        if self.offsets is not None:
            return torch.zeros(x.shape[0], self.out_features, device=x.device).scatter_(1, x + self.offsets, 1.0)
        if x.dtype == torch.uint8:
            x = x.float()
        return x if self.scale == 1.0 else x * self.scale
