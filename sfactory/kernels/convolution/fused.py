"""Convolutions with ReLU in bfloat16, one after the other: all layers of an image while it is in the processor's
cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sfactory.kernels.convolution import passes as kernels
from sfactory.kernels.convolution.onednn import Convolution
from sfactory.kernels.convolution.passes import SIDE, TOGETHER, products
from sfactory.kernels.convolution.pixel_blocks import block_layout, stored_images
from sfactory.kernels.convolution.tables import fused_layers, workspace, zeros


class _Orders(NamedTuple):
    """Where the elements of a weight ``[outputs, C, K, K]`` lie in it, for the products; its size stands for a zero.

    Attributes:
        forward: Of ``[taps * channels / 2, outputs, 2]``.
        backward: Of ``[taps * outputs / 2, channels, 2]``, with the last tap first.
        gradient: The other way: where the weight's elements lie in ``[taps, outputs, channels]``.
    """

    forward: np.ndarray
    backward: np.ndarray
    gradient: Tensor

    @classmethod
    def of(cls, weight: torch.Size, stride: int, channels: int) -> _Orders:
        """
        Args:
            channels: With those that the images do not have.
        """
        size = weight.numel()
        elements = F.pad(torch.arange(size).view(weight), (0, 0, 0, 0, 0, channels - weight[1]), value=size)
        blocks = elements.unflatten(3, (-1, stride)).unflatten(2, (-1, stride)).permute(2, 4, 3, 5, 1, 0)
        matrices = blocks.flatten(2, 4).flatten(0, 1)  # [taps, channels, outputs]

        def pairs(matrices: Tensor) -> np.ndarray:
            return matrices.flatten(0, 1).unflatten(0, (-1, 2)).transpose(1, 2).flatten().int().numpy()

        by_outputs = matrices.transpose(1, 2).flatten()
        return cls(pairs(matrices), pairs(matrices.flip(0).transpose(1, 2)), by_outputs.argsort()[:size])


class FusedPlan:
    """What convolutions with ReLU, one after the other, do with images of one shape, the first over blocks of 4 x 4
    pixels.

    Args:
        shape: Of an image, ``(C, H, W)``, or ``(H, W, C)`` if `hwc`.
        signed: Whether images are int8, else uint8.
        kernels: Of each layer, the shape of its weight and its stride.

    Raises:
        ValueError: If they do not fit: the first stride must be 1, others divide their kernels, outputs be multiples of
            32, and positions at least as many.
    """

    def __init__(
        self, shape: tuple[int, int, int], hwc: bool, signed: bool, kernels: Sequence[tuple[torch.Size, int]]
    ) -> None:
        strides = [stride for _, stride in kernels]
        if strides[0] != 1:
            raise ValueError("the blocks overlap or lie apart")
        self._stored, self._pixels = torch.Size(shape), block_layout(shape, hwc, signed)
        self._dtype = torch.int8 if signed else torch.uint8
        channels = -(-self._pixels.channels // products.COLUMNS) * products.COLUMNS
        self._layers, self._shape = fused_layers((channels, self._pixels.down, self._pixels.across), kernels)
        self._sizes = [*(layer.positions * layer.channels for layer in self._layers[1:]), math.prod(self._shape)]
        self._orders = [
            _Orders.of(*kernel, layer.channels // kernel[1] ** 2)
            for kernel, layer in zip(kernels, self._layers, strict=True)
        ]

    def pack(self, weights: Sequence[Tensor]) -> tuple[np.ndarray, ...]:
        """The layers' weights ``[outputs, C, K, K]`` for :meth:`forward`."""
        return tuple(
            _pack(weight, orders.forward, len(weight)) for weight, orders in zip(weights, self._orders, strict=True)
        )

    def forward(
        self, x: Tensor, weights: tuple[np.ndarray, ...], biases: tuple[np.ndarray, ...], keep: bool
    ) -> list[Tensor]:
        """The outputs of all layers, bfloat16 ``[N, size]``, in the blocks of the next, whose products may read beyond
        the last image.

        Args:
            x: ``[N, ...]``, images of eight bits.
            weights: By :meth:`pack`.
            biases: float32.
            keep: All outputs; otherwise of the last layer only, the others are those of the last image.

        Raises:
            ValueError: If the images have another shape or dtype than the plan's.
        """
        if x.dtype != self._dtype or x.shape[1:] != self._stored:
            meant, found = f"{self._dtype} {tuple(self._stored)}", f"{x.dtype} {tuple(x.shape[1:])}"
            raise ValueError(f"images must be {meant}, not {found}".replace("torch.", ""))
        counts = [len(x) if keep else 1] * (len(self._sizes) - 1) + [len(x)]
        outputs = [
            torch.empty(count + 1, size, dtype=torch.bfloat16)[:count]
            for count, size in zip(counts, self._sizes, strict=True)
        ]
        arrays = self._layers, weights, biases, tuple(map(_bits, outputs)), zeros(SIDE, SIDE), np.zeros(64, np.uint8)
        kernels.forward(stored_images(x), self._pixels, self._blocks(1), *arrays)
        return outputs

    def image(self, output: Tensor) -> Tensor:
        """The last layer's output as ``[N, C, H, W]``."""
        channels, height, width = self._shape
        return output.view(-1, height, width, channels).permute(0, 3, 1, 2)

    def _blocks(self, images: int) -> np.ndarray:
        first = self._layers[0]
        return zeros(images + 1, first.positions, first.channels, dtype=torch.int16)

    def backward(
        self, gradient: Tensor, x: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradients of each layer's weight and bias in turn, float32 in their shapes.

        Args:
            gradient: bfloat16 ``[N, C, H, W]``, of the last layer's output.
            x, outputs: What :meth:`forward` was given, and all that it made of it.
            weights: As they were then, ``[outputs, C, K, K]``.
        """
        works = tuple(map(workspace, self._layers))
        _, *later = zip(weights, self._orders, self._layers, strict=True)
        packed = (
            np.zeros((0, 0, 2), np.int16),
            *(_pack(weight, orders.backward, layer.channels) for weight, orders, layer in later),
        )
        of_last = _bits(gradient.permute(0, 2, 3, 1)).reshape(len(x), -1)
        arrays = of_last, self._layers, packed, works, zeros(SIDE, SIDE), np.zeros(64, np.uint8)
        kernels.backward(stored_images(x), self._pixels, self._blocks(TOGETHER), tuple(map(_bits, outputs)), *arrays)
        found = []
        for weight, orders, work in zip(weights, self._orders, works, strict=True):
            of_weight, of_bias = torch.from_numpy(work.of_weight), torch.from_numpy(work.of_bias)
            found += [of_weight.view(-1)[orders.gradient].view(weight.shape), of_bias]
        return found


@njit(cache=True, nogil=True)
def _gather(numbers, order, out):
    """Bring float32 numbers, given by their bits, into an order, rounded to bfloat16; an index beyond them gives 0."""
    for i in range(len(order)):
        k = order[i]
        bits = numbers[k] if k < len(numbers) else np.int32(0)
        not_a_number = bits & 0x7FFFFFFF > 0x7F800000
        out[i] = 0x7FC0 if not_a_number else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _pack(weight: Tensor, order: np.ndarray, columns: int) -> np.ndarray:
    """A weight's elements in an order of :class:`_Orders`: ``[pairs, columns, 2]``."""
    out = torch.empty(len(order), dtype=torch.int16).numpy()
    _gather(weight.detach().reshape(-1).view(torch.int32).numpy(), order, out)
    return out.reshape(-1, columns, 2)


def _bits(x: Tensor) -> np.ndarray:
    """A bfloat16 tensor's elements as they are, for Numba."""
    return x.detach().contiguous().view(torch.int16).numpy()


@cache
def _plan(
    shape: tuple[int, int, int], hwc: bool, signed: bool, kernels: tuple[tuple[torch.Size, int], ...]
) -> FusedPlan | None:
    try:
        return FusedPlan(shape, hwc, signed, kernels)
    except ValueError:
        return None


def fused_plan(
    shape: Sequence[int], hwc: bool, layers: Sequence[Convolution], dtype: torch.dtype, signed: bool = False
) -> FusedPlan | None:
    """The :class:`FusedPlan` for convolutions, or None where they do not fit, or this machine has no products of
    bfloat16.

    Args:
        shape, hwc, signed: Of images, as in :class:`FusedPlan`.
        layers: With weights in float32, the first over blocks of pixels.
        dtype: In which to compute.
    """
    plain = all(
        set(layer.padding) == {0} and len(set(layer.stride)) == 1 and layer.weight.dtype == torch.float32
        for layer in layers
    )
    if not plain or dtype != torch.bfloat16 or not products.at_hand():
        return None
    return _plan(tuple(shape), hwc, signed, tuple((layer.weight.shape, layer.stride[0]) for layer in layers))


class FusedWeights:
    """Convolutions with ReLU whose present weights lie ready for the products; without a gradient."""

    def __init__(self, plan: FusedPlan, layers: Sequence[Convolution]) -> None:
        self._plan = plan
        self._weights = plan.pack([layer.weight for layer in layers])
        self._biases = tuple(layer.bias.detach().clone().numpy() for layer in layers)

    def __call__(self, x: Tensor) -> Tensor:
        return self._plan.image(self._plan.forward(x, self._weights, self._biases, keep=False)[-1])


class FusedConvolutions(Function):
    """Convolutions with ReLU of stored images by a plan, with gradients for each layer's weight and bias, which
    alternate, in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, plan: FusedPlan, *operands: Tensor) -> Tensor:
        weights, biases = operands[::2], operands[1::2]
        outputs = plan.forward(x, plan.pack(weights), tuple(bias.detach().numpy() for bias in biases), keep=True)
        ctx.plan = plan
        ctx.save_for_backward(x, *outputs, *weights)
        return plan.image(outputs[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *arrays = ctx.saved_tensors
        count = len(arrays) // 2
        return None, None, *ctx.plan.backward(gradient, x, arrays[:count], arrays[count:])
