"""Convolutions with ReLU on the CPU, and pixels in the order in which the first of them is fastest.

A convolution of stride 4 whose kernel has 4 or 8 pixels a side is one of stride 1 over blocks of 4 x 4 pixels, with a kernel of 1 or 2
blocks. A block has 16 channels for each of the image's, which fill the processor's matrix units where the image's own do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sfactory.model import onednn
from sfactory.model import vectors_cpu as vectors
from sfactory.model.onednn import Convolution
from sfactory.model.tile_convolutions_cpu import TileConvolutions, TileWeights, tile_plan

BLOCK = 4
"""Pixels on a side of a block."""
BLOCK_TYPES = torch.bfloat16, torch.float32
"""Dtypes of blocks."""


@njit(cache=True, nogil=True)
def _fill_blocks(pixels, lines, steps, words, blocks):
    """
    Args:
        pixels: uint8 ``[N, size]``.
        lines: Bytes from a row of blocks to the next.
        steps: Bytes from a block to the next in its row.
        words: int64 ``[4 C]``: where in an image the first block's pixels are, four at each.
        blocks: ``[N, H/4, W/4, 16 C]``, in numbers of 16 bits for bfloat16 or of 32 for float32.
    """
    images, down, across, _ = blocks.shape
    target, size = blocks.ctypes.data, 16 * blocks.itemsize
    for n in range(images):
        for y in range(down):
            for x in range(across):
                block = pixels.ctypes.data + n * pixels.shape[1] + y * lines + x * steps
                for i in range(0, len(words), 4):
                    first, second, third, fourth = block + words[i], block + words[i + 1], block + words[i + 2], block + words[i + 3]
                    if size == 32:
                        vectors.pixels_to_bfloat16(first, second, third, fourth, target)
                    else:
                        vectors.pixels_to_float32(first, second, third, fourth, target)
                    target += size


def pixel_blocks(x: Tensor, hwc: bool, dtype: torch.dtype) -> Tensor:
    """Images as blocks of 4 x 4 pixels.

    Args:
        x: uint8 ``[N, C, H, W]``, or ``[N, H, W, C]`` if `hwc`; both sides multiples of 4.
        dtype: bfloat16 or float32.

    Returns:
        ``[N, 16 C, H/4, W/4]`` of the dtype, in channels-last order. Channels of a block: those of the image, each with its rows of the
        block, or if `hwc` rows of pixels, each with its channels.
    """
    channels, height, width = (x.shape[3], *x.shape[1:3]) if hwc else x.shape[1:]
    out = torch.empty((len(x), height // BLOCK, width // BLOCK, channels * BLOCK * BLOCK), dtype=dtype)
    line, step = (width * channels, BLOCK * channels) if hwc else (width, BLOCK)
    rows = np.arange(BLOCK)[:, None] * line
    words = rows + np.arange(0, step, BLOCK) if hwc else np.arange(channels)[:, None, None] * (height * width) + rows
    bits = out.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
    _fill_blocks(x.contiguous().view(len(x), -1).numpy(), BLOCK * line, step, words.reshape(-1), bits)
    return out.permute(0, 3, 1, 2)


def block_weight(weight: Tensor, hwc: bool) -> Tensor:
    """The weight ``[O, 16 C, K/4, K/4]`` for :func:`pixel_blocks` of a convolution with weight ``[O, C, K, K]`` and stride 4."""
    out, channels, side, _ = weight.shape
    split = weight.view(out, channels, side // BLOCK, BLOCK, side // BLOCK, BLOCK)
    order = (0, 3, 5, 1, 2, 4) if hwc else (0, 1, 3, 5, 2, 4)
    return split.permute(order).reshape(out, channels * BLOCK * BLOCK, side // BLOCK, side // BLOCK)


def relu_convolutions(x: Tensor, layers: Sequence[Convolution]) -> Tensor:
    """Convolutions one after the other, each with ReLU: on the processor's tiles if they fit, else by oneDNN, else by torch.

    Args:
        x: ``[N, C, H, W]``, in the dtype in which all of them compute.
    """
    plan = tile_plan(tuple(x.shape[1:]), layers, x.dtype) if is_eager_cpu(x) and not x.requires_grad else None
    if plan is not None:
        if not torch.is_grad_enabled():
            return TileWeights(plan, layers)(x)
        return TileConvolutions.apply(x, plan, *(tensor for layer in layers for tensor in (layer.weight, layer.bias)))
    fusible = is_eager_cpu(x) and onednn.computes(x.dtype)
    if fusible and torch.is_grad_enabled():
        weights = (tensor.to(x.dtype) for layer in layers for tensor in (layer.weight, layer.bias))
        return _ReLUConvolutions.apply(x, [(layer.stride, layer.padding) for layer in layers], *weights)
    for layer in layers:
        x = layer.with_relu(x) if fusible else F.relu_(F.conv2d(x, *layer))
    return x


def lower_convolutions(shape: tuple[int, int, int], layers: Sequence[Convolution], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """:func:`relu_convolutions` of images of a shape ``(C, H, W)`` with a copy of the present weights in a dtype; without a gradient."""
    plan = tile_plan(shape, layers, dtype)
    return partial(relu_convolutions, layers=[layer.lowered(dtype) for layer in layers]) if plan is None else TileWeights(plan, layers)


def is_eager_cpu(x: Tensor) -> bool:
    """Whether compiled kernels can work on a tensor: torch.compile, which makes its own, cannot look into them."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


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
            arrays.append(Convolution(weight, bias, stride, padding).with_relu(arrays[-1]))
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
