"""Layers that the encoders share: how raw observations enter a network, and linear layers."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfactory.kernels.convolution.onednn import Convolution, LoweredLinear
from sfactory.kernels.convolution.pixel_blocks import BLOCK, BLOCK_TYPES, block_weight, is_eager_cpu, pixel_blocks
from sfactory.kernels.tanh import tanh_
from sfactory.model.initialization import orthogonal
from sfactory.model.precision import Lowered, compute_dtype
from sfactory.spaces import Leaf


class _FastTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        y = tanh_(x.clone(memory_format=torch.contiguous_format))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(gradient, *ctx.saved_tensors)


class Tanh(nn.Module):
    """The hyperbolic tangent, by :func:`sfactory.kernels.tanh.tanh_` for float32 on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return _FastTanh.apply(x) if x.device.type == "cpu" and x.dtype == torch.float32 else torch.tanh(x)


ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


class Dense(Lowered, nn.Linear):
    """A linear layer with an orthogonal start."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        orthogonal(self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.lowered is None else self.lowered(x)

    def _cast_weights(self, dtype: torch.dtype) -> LoweredLinear:
        return LoweredLinear.of(self.weight, self.bias, dtype)


class PixelConv(nn.Conv2d):
    """The first convolution of an image encoder: takes the observation as it is stored.

    Pixels stay uint8 until here and are converted once, to the dtype in which the convolution runs. Division by the
    largest pixel value happens in the weights. Both image layouts enter in channels-last memory order, in which all
    later layers then run.
    """

    def __init__(self, leaf: Leaf, out_channels: int, kernel_size: int, stride: int, padding: int = 0) -> None:
        super().__init__(
            leaf.shape[2] if leaf.channels_last else leaf.shape[0], out_channels, kernel_size, stride, padding
        )
        orthogonal(self)
        self.hwc = leaf.channels_last
        self.scale = 1.0 / leaf.high if leaf.dtype == "uint8" else 1.0
        by_blocks = stride == BLOCK and padding == 0 and not any(side % BLOCK for side in (kernel_size, *leaf.sides))
        self._by_blocks = by_blocks and leaf.dtype == "uint8"
        self.stored_shape = leaf.shape

    def pixels(self, x: Tensor) -> Tensor:
        """What :attr:`convolution` takes: ``[N, C, H, W]``, by blocks if it is, in the dtype in which to compute."""
        dtype = compute_dtype(self.weight)
        if self.in_blocks:
            return pixel_blocks(x, self.hwc, dtype)
        return x.permute(0, 3, 1, 2).to(dtype) if self.hwc else _to_channels_last(x, dtype)

    @property
    def convolution(self) -> Convolution:
        """The operands besides the pixels; on the CPU over blocks if possible."""
        weight = self.weight if self.scale == 1.0 else self.weight * self.scale
        if self.in_blocks:
            return Convolution(block_weight(weight, self.hwc), self.bias, (1, 1), (0, 0))
        return Convolution(weight, self.bias, self.stride, self.padding)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.pixels(x), *self.convolution)

    @property
    def in_blocks(self) -> bool:
        """Whether :attr:`convolution` is one over blocks of pixels."""
        return self._by_blocks and is_eager_cpu(self.weight) and compute_dtype(self.weight) in BLOCK_TYPES


def _to_channels_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``[N, C, H, W]`` to a dtype and to channels-last order."""
    if x.device.type != "cpu" or x.shape[1] > 16:
        return x.to(dtype, memory_format=torch.channels_last)
    # One strided pass for each channel takes a third of the time of torch's own conversion of uint8 on the CPU.
    out = torch.empty(x.shape, dtype=dtype, memory_format=torch.channels_last)
    for channel in range(x.shape[1]):
        out[:, channel] = x[:, channel]
    return out


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
        x = x.reshape(len(x), -1)
        if self.offsets is not None:
            return torch.zeros(len(x), self.out_features, device=x.device).scatter_(1, x + self.offsets, 1.0)
        if x.dtype == torch.uint8:
            x = x.float()
        return x if self.scale == 1.0 else x * self.scale
