"""Convolutions with ReLU on the CPU: by the fastest of the ways that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sfactory.kernels.convolution import onednn
from sfactory.kernels.convolution.fused import FusedConvolutions, FusedPlan, FusedWeights, fused_plan
from sfactory.kernels.convolution.onednn import Convolution
from sfactory.kernels.convolution.pixel_blocks import BLOCK, BLOCK_TYPES, block_weight, pixel_blocks
from sfactory.model.layers import PixelConv
from sfactory.model.precision import compute_dtype


def relu_convolutions(x: Tensor, convolutions: Sequence[nn.Conv2d]) -> Tensor:
    """Convolutions one after the other, each with ReLU: fused if that fits, else :func:`relu_convolutions_in_turn`.

    Args:
        x: Images as the first reads them.
        convolutions: The first is a :class:`PixelConv`.

    Returns:
        ``[N, C, H, W]``, in the dtype in which the convolutions compute.
    """
    first, layers = cast(PixelConv, convolutions[0]), _layers(convolutions)
    plan = _fused_plan(first, layers, compute_dtype(first.weight))
    if plan is None:
        return relu_convolutions_in_turn(pixels(first, x), layers)
    if not torch.is_grad_enabled():
        return FusedWeights(plan, layers)(x)
    return FusedConvolutions.apply(x, plan, *(tensor for layer in layers for tensor in (layer.weight, layer.bias)))


def lower_convolutions(convolutions: Sequence[nn.Conv2d], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """:func:`relu_convolutions` of images with a copy of the present weights in a dtype; without a gradient."""
    first, layers = cast(PixelConv, convolutions[0]), _layers(convolutions)
    plan = _fused_plan(first, layers, dtype)
    if plan is not None:
        return FusedWeights(plan, layers)
    lowered = [layer.lowered(dtype) for layer in layers]
    return lambda x: relu_convolutions_in_turn(pixels(first, x), lowered)


def in_blocks(first: PixelConv) -> bool:
    """Whether a first convolution is computed over blocks of pixels, in the dtype of the moment."""
    leaf, side = first.leaf, first.kernel_size[0]
    fits = first.stride[0] == BLOCK and first.padding[0] == 0 and not any(s % BLOCK for s in (side, *leaf.sides))
    return fits and leaf.dtype in ("uint8", "int8") and not leaf.sizes and compute_dtype(first.weight) in BLOCK_TYPES


def pixels(first: PixelConv, x: Tensor) -> Tensor:
    """What :func:`operands` are applied to: ``[N, C, H, W]``, by blocks if possible, in the dtype of the moment."""
    dtype = compute_dtype(first.weight)
    if in_blocks(first):
        return pixel_blocks(x, first.leaf.channels_last, dtype)
    if first.categories:
        return first.planes(x, dtype)
    return x.permute(0, 3, 1, 2).to(dtype) if first.leaf.channels_last else _to_channels_last(x, dtype)


def operands(first: PixelConv) -> Convolution:
    """A first convolution's operands besides the :func:`pixels`."""
    layer = _convolution(first)
    weight = layer.weight if first.scale == 1.0 else layer.weight * first.scale
    if in_blocks(first):
        return Convolution(block_weight(weight, first.leaf.channels_last), layer.bias, (1, 1), (0, 0))
    return layer._replace(weight=weight)


def _convolution(layer: nn.Conv2d) -> Convolution:
    """Of a layer with a bias and a padding by numbers."""
    return Convolution(layer.weight, cast(Tensor, layer.bias), layer.stride, cast(tuple[int, ...], layer.padding))


def _to_channels_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``[N, C, H, W]`` to a dtype and to channels-last order."""
    if x.shape[1] > 16:
        return x.to(dtype, memory_format=torch.channels_last)
    # One strided pass for each channel takes a third of the time of torch's own conversion of uint8 on the CPU.
    out = torch.empty(x.shape, dtype=dtype, memory_format=torch.channels_last)
    for channel in range(x.shape[1]):
        out[:, channel] = x[:, channel]
    return out


def _layers(convolutions: Sequence[nn.Conv2d]) -> list[Convolution]:
    first, *others = convolutions
    return [operands(cast(PixelConv, first)), *map(_convolution, others)]


def _fused_plan(first: PixelConv, layers: Sequence[Convolution], dtype: torch.dtype) -> FusedPlan | None:
    leaf = first.leaf
    return fused_plan(leaf.shape, leaf.channels_last, layers, dtype, leaf.dtype == "int8") if in_blocks(first) else None


def relu_convolutions_in_turn(x: Tensor, layers: Sequence[Convolution]) -> Tensor:
    """Convolutions one after the other, each with ReLU, by oneDNN or else by torch.

    Args:
        x: ``[N, C, H, W]``, in the dtype in which all of them compute.
    """
    fusible = onednn.computes(x.dtype)
    if fusible and torch.is_grad_enabled():
        weights = (tensor.to(x.dtype) for layer in layers for tensor in (layer.weight, layer.bias))
        return _ReLUConvolutions.apply(x, [(layer.stride, layer.padding) for layer in layers], *weights)
    for layer in layers:
        x = layer.with_relu(x) if fusible else F.relu_(F.conv2d(x, *layer))
    return x


class _ReLUConvolutions(Function):
    """Keeps one array of a layer instead of two, and cuts the gradient off where it lies: large activations are limited
    by memory."""

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
        gradient = torch.ops.aten.threshold_backward(gradient, arrays[-1], 0)
        of_weights: list[Tensor] = []
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
    # A number is positive if its bits are, read as an integer.
    bits = torch.int16 if gradient.dtype == torch.bfloat16 else torch.int32
    _zero_where_not_positive(*(t.view(bits).numpy().reshape(-1) for t in last))
    return gradient


@njit(cache=True, nogil=True)
def _zero_where_not_positive(gradient, activation):
    for i in range(gradient.size):
        if activation[i] <= 0:
            gradient[i] = 0
