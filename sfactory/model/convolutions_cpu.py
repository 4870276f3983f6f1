"""Convolutions with ReLU on the CPU, and pixels in the order in which the first of them is fastest.

A convolution of stride 4 whose kernel has 4 or 8 pixels a side is one of stride 1 over blocks of 4 x 4 pixels, with a kernel of 1 or 2
blocks. A block has 16 channels for each of the image's, which fill the processor's matrix units where the image's own do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

BLOCK = 4
"""Pixels on a side of a block, and pixels of a machine word, by which they are moved."""
IMAGES_AT_ONCE = 8
"""So few that they are still in the cache when they are converted."""


@njit(cache=True, nogil=True)
def _move(words, blocks):
    """Copy an array of five dimensions; on a strided view faster than NumPy, which goes through both as the input lies."""
    images, height, width, outer, inner = blocks.shape
    for i in range(images):
        for y in range(height):
            for x in range(width):
                for a in range(outer):
                    for b in range(inner):
                        blocks[i, y, x, a, b] = words[i, y, x, a, b]


def pixel_blocks(x: Tensor, hwc: bool, dtype: torch.dtype) -> Tensor:
    """Images as blocks of 4 x 4 pixels.

    Args:
        x: uint8 ``[N, C, H, W]``, or ``[N, H, W, C]`` if `hwc`; both sides multiples of 4.

    Returns:
        ``[N, 16 C, H/4, W/4]`` of the dtype, in channels-last order. Channels of a block: those of the image, each with its rows of the
        block, or if `hwc` rows of pixels, each with its channels.
    """
    channels, height, width = (x.shape[3], *x.shape[1:3]) if hwc else x.shape[1:]
    height, width = height // BLOCK, width // BLOCK
    out = torch.empty((len(x), height, width, channels * BLOCK * BLOCK), dtype=dtype)
    moved = torch.empty((min(len(x), IMAGES_AT_ONCE), *out.shape[1:]), dtype=torch.uint8)
    words = _words(x.contiguous())
    if hwc:
        words = words.reshape(-1, height, BLOCK, width, channels).transpose(0, 1, 3, 2, 4)
    else:
        words = words.reshape(-1, channels, height, BLOCK, width).transpose(0, 2, 4, 1, 3)
    blocks = _words(moved).reshape(-1, *words.shape[1:])
    for begin in range(0, len(x), IMAGES_AT_ONCE):
        end = min(begin + IMAGES_AT_ONCE, len(x))
        _move(words[begin:end], blocks[: end - begin])
        out[begin:end] = moved[: end - begin]
    return out.permute(0, 3, 1, 2)


def _words(x: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor as words of four."""
    return x.numpy().reshape(-1).view(np.uint32)


def block_weight(weight: Tensor, hwc: bool) -> Tensor:
    """The weight ``[O, 16 C, K/4, K/4]`` for :func:`pixel_blocks` of a convolution with weight ``[O, C, K, K]`` and stride 4."""
    out, channels, side, _ = weight.shape
    split = weight.view(out, channels, side // BLOCK, BLOCK, side // BLOCK, BLOCK)
    order = (0, 3, 5, 1, 2, 4) if hwc else (0, 1, 3, 5, 2, 4)
    return split.permute(order).reshape(out, channels * BLOCK * BLOCK, side // BLOCK, side // BLOCK)


class Convolution(NamedTuple):
    """The operands of a convolution besides its input."""

    weight: Tensor
    bias: Tensor
    stride: Sequence[int]
    padding: Sequence[int]


def relu_convolutions(x: Tensor, layers: Sequence[Convolution]) -> Tensor:
    """Convolutions one after the other, each with ReLU.

    Args:
        x: ``[N, C, H, W]``, in the dtype in which all of them compute.
    """
    if not _fusible(x):
        for layer in layers:
            x = F.relu_(F.conv2d(x, *layer))
        return x
    weights = (tensor.to(x.dtype) for layer in layers for tensor in (layer.weight, layer.bias))
    return _ReLUConvolutions.apply(x, [(layer.stride, layer.padding) for layer in layers], *weights)


def is_eager_cpu(x: Tensor) -> bool:
    """Whether compiled kernels can work on a tensor: torch.compile, which makes its own, cannot look into them."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _fusible(x: Tensor) -> bool:
    """Whether oneDNN computes convolution and ReLU in one pass there; torch has this operation for its own compiler."""
    if not is_eager_cpu(x) or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        return False
    return x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _ReLUConvolutions(Function):
    """Keeps one array of a layer instead of two, and cuts the gradient off where it lies: large activations are limited by memory."""

    @staticmethod
    def forward(ctx, x: Tensor, geometry: Sequence[tuple[Sequence[int], Sequence[int]]], *weights: Tensor) -> Tensor:
        """
        Args:
            geometry: Stride and padding of each layer.
            weights: Weight and bias of each.
        """
        arrays = [x]
        for (stride, padding), weight, bias in zip(geometry, weights[::2], weights[1::2], strict=True):
            layer = arrays[-1], weight, bias, padding, stride, (1, 1), 1
            arrays.append(torch.ops.mkldnn._convolution_pointwise(*layer, "relu", (), ""))
        ctx.geometry = geometry
        ctx.save_for_backward(*arrays, *weights[::2])
        return arrays[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.geometry)
        arrays, weights = ctx.saved_tensors[: count + 1], ctx.saved_tensors[count + 1 :]
        gradient, of_weights = torch.ops.aten.threshold_backward(gradient, arrays[-1], 0), []
        for i in reversed(range(count)):
            (stride, padding), weight = ctx.geometry[i], weights[i]
            wanted = i > 0 or ctx.needs_input_grad[0], True, True
            layer = weight, (len(weight),), stride, padding, (1, 1), False, (0, 0), 1
            gradient, *found = torch.ops.aten.convolution_backward(gradient, arrays[i], *layer, wanted)
            of_weights[:0] = found
            if i > 0:
                gradient = _cut_off(gradient, arrays[i])
        return gradient, None, *of_weights


def _cut_off(gradient: Tensor, activation: Tensor) -> Tensor:
    """Zero a gradient where ReLU gave zero, in place if both lie alike."""
    last = [t.permute(0, 2, 3, 1) for t in (gradient, activation)]
    if not all(t.is_contiguous() for t in last):
        return torch.ops.aten.threshold_backward(gradient, activation, 0)
    bits = torch.int16 if gradient.dtype == torch.bfloat16 else torch.int32  # a number is positive if its bits are, read as an integer
    _zero_where_not_positive(*(t.view(bits).numpy().reshape(-1) for t in last))
    return gradient


@njit(cache=True, nogil=True)
def _zero_where_not_positive(gradient, activation):
    for i in range(gradient.size):
        if activation[i] <= 0:
            gradient[i] = 0
