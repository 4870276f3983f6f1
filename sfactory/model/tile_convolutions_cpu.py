"""Convolutions with ReLU in bfloat16 on the processor's matrix tiles: all layers of one image forward, all of a few images backward.

A convolution of stride s is one of stride 1 over blocks of s x s pixels with all their channels, so each layer writes its output in the
blocks of the next. An image's blocks, row by row, are its *positions*. A tap of the kernel is then a shift by so many positions, and its
share of the output one product of matrices, ``[positions, channels] @ [channels, outputs]``. At the right edge a shift wraps into the next
row: outputs there have no place and are dropped, and their gradients are zero.

All numbers of 16 bits are bfloat16, which NumPy and Numba have no type for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sfactory.model import tiles_cpu as tiles
from sfactory.model import vectors_cpu as vectors
from sfactory.model.onednn import Convolution
from sfactory.model.pixel_blocks_cpu import block_layout, fill_blocks, stored_images

SIDE = 32
"""Rows and columns of the products that are done at once: two tiles each."""
TOGETHER = 4
"""Images that go back through all layers together: few enough for the second-level cache, and enough for long products."""
NOWHERE = np.zeros((0, 0), np.int64)
"""The places of a layer that has none, or none yet."""


class _Layer(NamedTuple):
    """A convolution of stride 1 over an image's positions.

    Attributes:
        width: Positions of a row.
        positions: Of an image.
        channels: Of a position.
        down, across: Taps of the kernel.
        outputs: Channels of the output.
        reach: The shift of the last tap.
        places: int64 ``[positions - reach, outputs / 32]``: where in the output, as the next layer reads it, 32 channels of a position go,
            or -1.
        places_before: int64 ``[TOGETHER * positions, channels / 32]``: where 32 channels of a position lie in the previous layer's grid.
    """

    width: int
    positions: int
    channels: int
    down: int
    across: int
    outputs: int
    reach: int
    places: np.ndarray
    places_before: np.ndarray

    @property
    def output_sides(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.positions // self.width - self.down + 1, self.width - self.across + 1


class _Work(NamedTuple):
    """What a layer's way back works in, for images that go together, and its gradients.

    Attributes:
        grid: ``[reach + TOGETHER * positions and more, outputs]``: the gradient of the output at its positions, zero at all others.
        by_outputs: ``[outputs, TOGETHER * positions and more]``: the same without the first zeros.
        even, odd: ``[half of them, channels, 2]``: pairs of the input's positions that begin with an even or an odd one, channels as
            :func:`sfactory.model.vectors_cpu.pair` has them.
        of_weight: float32 ``[taps, outputs, channels]``, channels likewise.
        of_bias: float32 ``[outputs, 16]``, all columns alike.
    """

    grid: np.ndarray
    by_outputs: np.ndarray
    even: np.ndarray
    odd: np.ndarray
    of_weight: np.ndarray
    of_bias: np.ndarray


@njit(cache=True, nogil=True)
def _load_square(address, step):
    """Two by two tiles, 0 to 3, from lines of 32 float32 that are `step` bytes apart."""
    tiles.load(0, address, step)
    tiles.load(1, address + 64, step)
    tiles.load(2, address + 16 * step, step)
    tiles.load(3, address + 16 * step + 64, step)


@njit(cache=True, nogil=True)
def _store_square(address, step):
    """The same tiles to such lines."""
    tiles.store(0, address, step)
    tiles.store(1, address + 64, step)
    tiles.store(2, address + 16 * step, step)
    tiles.store(3, address + 16 * step + 64, step)


@njit(cache=True, nogil=True)
def _add_product(left, left_step, right, right_step, length):
    """Add ``[32, length] @ [length, 32]`` to the square of tiles; the second lies in pairs. Gives where its next rows would be."""
    for _ in range(0, length, SIDE):
        tiles.load(4, left, left_step)
        tiles.load(6, right, right_step)
        tiles.load(7, right + 64, right_step)
        tiles.dot(0, 4, 6)
        tiles.dot(1, 4, 7)
        tiles.load(5, left + 16 * left_step, left_step)
        tiles.dot(2, 5, 6)
        tiles.dot(3, 5, 7)
        left += SIDE * 2
        right += SIDE // 2 * right_step
    return right


@njit(cache=True, nogil=True)
def _multiply(left, channels, width, down, across, weight, column, product):
    """``[32 positions, taps * channels] @ [taps * channels, 32 outputs]`` of positions that lie from address `left` on."""
    step, right = channels * 2, weight.ctypes.data + column * 4
    tiles.zero(0)
    tiles.zero(1)
    tiles.zero(2)
    tiles.zero(3)
    for y in range(down):
        right = _add_product(left + y * width * step, step, right, weight.shape[1] * 4, across * channels)
    _store_square(product, SIDE * 4)


@njit(cache=True, nogil=True)
def _convolve(source, layer, weight, bias, target, product):
    """One image through one layer, from address to address."""
    rows = len(layer.places)
    for tile in range(0, rows, SIDE):
        first = max(0, min(tile, rows - SIDE))  # the last tiles do some rows again, or the only ones reach beyond the image
        for column in range(0, layer.outputs, SIDE):
            left = source + first * layer.channels * 2
            _multiply(left, layer.channels, layer.width, layer.down, layer.across, weight, column, product)
            for row in range(min(SIDE, rows)):
                place = layer.places[first + row, column // SIDE]
                if place >= 0:
                    vectors.activate(product + row * SIDE * 4, bias.ctypes.data + column * 4, target + place * 2)


@njit(cache=True, nogil=True)
def _fill(images, layout, first, count, blocks):
    """Write the blocks of some images one after the other; gives their address."""
    positions, channels = blocks.shape[1:]
    source, target = images.ctypes.data + first * images.shape[1], blocks.ctypes.data
    for k in range(count):
        fill_blocks(source + k * images.shape[1], layout, target + k * positions * channels * 2, 2, channels * 2)
    return target


@njit(cache=True, nogil=True)
def _forward(images, layout, blocks, layers, weights, biases, outputs, scratch, kept):
    """
    Args:
        images: uint8 ``[N, bytes]``, as they are stored, in `layout`.
        blocks: ``[2, positions, channels]`` of the first layer, zero where an image has no channels; the last are only read.
        weights: For each layer ``[taps * channels / 2, outputs, 2]``, in pairs of channels.
        biases: float32 ``[outputs]``.
        outputs: ``[N, size]``, or ``[1, size]`` to write all over each other.
        scratch: float32 ``[32, 32]``.
        kept: 64 bytes, for what the tiles' shapes were before.
    """
    tiles.keep_configuration(kept.ctypes.data)
    tiles.configure(tiles.SQUARE.ctypes.data)
    for image in range(len(images)):
        source = _fill(images, layout, image, 1, blocks)
        for i in range(len(layers)):
            target = outputs[i].ctypes.data + image % len(outputs[i]) * outputs[i].shape[1] * 2
            _convolve(source, layers[i], weights[i], biases[i], target, scratch.ctypes.data)
            source = target
    tiles.configure(kept.ctypes.data)


@njit(cache=True, nogil=True)
def _spread(gradient, output, images, layer, grid):
    """Bring the gradient of some images' output, cut off where that is zero, to its positions."""
    size, columns = len(gradient) // images, layer.outputs
    for image in range(images):
        first = layer.reach + image * layer.positions
        for row in range(len(layer.places)):
            for part in range(columns // SIDE):
                if layer.places[row, part] >= 0:
                    place = (image * size + layer.places[row, part]) * 2
                    to = grid.ctypes.data + ((first + row) * columns + part * SIDE) * 2
                    vectors.cut_off(gradient.ctypes.data + place, output.ctypes.data + place, to)


@njit(cache=True, nogil=True)
def _transpose(grid, head, length, by_outputs):
    """``[length, outputs]`` of a grid, from row `head` on, to ``[outputs, length]``; up to 31 positions more, which are zero."""
    columns, step = grid.shape[1], by_outputs.shape[1] * 2
    for position in range(0, length, 32):
        for column in range(0, columns, 16):
            source = grid.ctypes.data + ((head + position) * columns + column) * 2
            vectors.transpose(source, columns * 2, by_outputs.ctypes.data + column * step + position * 2, step)


@njit(cache=True, nogil=True)
def _pair(source, positions, channels, begin, pairs):
    """Lay positions ``begin + 2k`` and ``begin + 2k + 1`` side by side; a last one that is alone beside itself."""
    step, last = channels * 2, source + (positions - 1) * channels * 2
    to = pairs.ctypes.data
    for position in range(begin, positions, 2):
        first = source + position * step
        second = min(first + step, last)
        for channel in range(0, channels, 32):
            vectors.pair(first + channel * 2, second + channel * 2, to + channel * 4)
        to += channels * 4


@njit(cache=True, nogil=True)
def _add_to_weight(length, layer, work):
    """Add for each tap the products of gradients ``[outputs, positions]`` and inputs ``[positions, channels]`` that are shifted by it."""
    left_step, step = work.by_outputs.shape[1] * 2, layer.channels * 4
    for tap in range(layer.down * layer.across):
        shift = tap // layer.across * layer.width + tap % layer.across
        inputs = (work.odd if shift % 2 else work.even).ctypes.data + shift // 2 * step
        for output in range(0, layer.outputs, SIDE):
            for channel in range(0, layer.channels, SIDE):
                total = work.of_weight.ctypes.data + (tap * layer.outputs + output) * step + channel * 4
                _load_square(total, step)
                _add_product(work.by_outputs.ctypes.data + output * left_step, left_step, inputs + channel * 4, step, length)
                _store_square(total, step)


@njit(cache=True, nogil=True)
def _add_to_bias(length, work, ones):
    """Add the sums of gradients ``[outputs, positions]`` over positions: their products with ones."""
    step = work.by_outputs.shape[1] * 2
    tiles.load(7, ones.ctypes.data, 64)
    for output in range(0, len(work.by_outputs), 16):
        total = work.of_bias.ctypes.data + output * 64
        tiles.load(0, total, 64)
        for position in range(0, length, SIDE):
            tiles.load(4, work.by_outputs.ctypes.data + output * step + position * 2, step)
            tiles.dot(0, 4, 7)
        tiles.store(0, total, 64)


@njit(cache=True, nogil=True)
def _pass_back(source, length, layer, weight, grid, grid_before, product):
    """The gradient of a layer's input, which lies from address `source` on: cut off where that is zero, in the previous layer's grid."""
    columns = layer.outputs
    for tile in range(0, length, SIDE):
        first = min(tile, length - SIDE)
        for channel in range(0, layer.channels, SIDE):
            left = grid.ctypes.data + first * columns * 2  # the last tap, which comes first in `weight`, looks furthest back
            _multiply(left, columns, layer.width, layer.down, layer.across, weight, channel, product)
            for row in range(first, first + SIDE):
                to = grid_before.ctypes.data + layer.places_before[row, channel // SIDE] * 2
                vectors.round_and_cut_off(product + (row - first) * SIDE * 4, source + (row * layer.channels + channel) * 2, to)


@njit(cache=True, nogil=True)
def _backward(images, layout, blocks, outputs, gradient, layers, weights, works, ones, scratch, kept):
    """Add to the gradients in `works`.

    Args:
        images, layout: As for :func:`_forward`.
        blocks: Likewise ``[TOGETHER + 1, positions, channels]``.
        outputs: Of each layer, ``[N, size]``.
        gradient: Of the last one, likewise.
        weights: Of each layer ``[taps * outputs / 2, channels, 2]``, in pairs of outputs, the last tap first.
        ones: A tile of them.
        scratch: float32 ``[32, 32]``.
        kept: 64 bytes, for what the tiles' shapes were before.
    """
    tiles.keep_configuration(kept.ctypes.data)
    tiles.configure(tiles.SQUARE.ctypes.data)
    top = len(layers) - 1
    for first in range(0, len(images), TOGETHER):
        count = min(TOGETHER, len(images) - first)
        if count < TOGETHER:
            for i in range(len(works)):
                works[i].grid[:] = 0
        some = slice(first, first + count)
        _spread(gradient[some].reshape(-1), outputs[top][some].reshape(-1), count, layers[top], works[top].grid)
        for i in range(top, -1, -1):
            layer, work = layers[i], works[i]
            length = count * layer.positions
            if i > 0:
                source = outputs[i - 1].ctypes.data + first * outputs[i - 1].shape[1] * 2
            else:
                source = _fill(images, layout, first, count, blocks)
            _transpose(work.grid, layer.reach, length, work.by_outputs)
            _pair(source, length, layer.channels, 0, work.even)
            _pair(source, length, layer.channels, 1, work.odd)
            _add_to_weight(length, layer, work)
            _add_to_bias(length, work, ones)
            if i > 0:
                _pass_back(source, length, layer, weights[i], work.grid, works[i - 1].grid, scratch.ctypes.data)
    tiles.configure(kept.ctypes.data)


class _Orders(NamedTuple):
    """Where the elements of a weight ``[outputs, C, K, K]`` lie in it, for the products; its size stands for a zero.

    Attributes:
        forward: Of ``[taps * channels / 2, outputs, 2]``.
        backward: Of ``[taps * outputs / 2, channels, 2]``, with the last tap first.
        gradient: The other way: where the weight's elements lie in ``[taps, outputs, channels]``, channels as in :class:`_Work`.
    """

    forward: np.ndarray
    backward: np.ndarray
    gradient: Tensor

    @classmethod
    def of(cls, weight: torch.Size, stride: int, channels: int) -> _Orders:
        """
        Args:
            channels: With those that the images do not have, to a multiple of 32.
        """
        size = weight.numel()
        elements = F.pad(torch.arange(size).view(weight), (0, 0, 0, 0, 0, channels - weight[1]), value=size)
        blocks = elements.unflatten(3, (-1, stride)).unflatten(2, (-1, stride)).permute(2, 4, 3, 5, 1, 0)
        matrices = blocks.flatten(2, 4).flatten(0, 1)  # [taps, channels, outputs]

        def pairs(matrices: Tensor) -> np.ndarray:
            return matrices.flatten(0, 1).unflatten(0, (-1, 2)).transpose(1, 2).flatten().int().numpy()

        by_outputs = matrices.transpose(1, 2).unflatten(2, (-1, 32))[..., vectors.PAIRED].flatten()
        return cls(pairs(matrices), pairs(matrices.flip(0).transpose(1, 2)), by_outputs.argsort()[:size])


class TilePlan:
    """What convolutions with ReLU, one after the other, do with images of one shape, the first over blocks of 4 x 4 pixels.

    Args:
        shape: Of a stored uint8 image, ``(C, H, W)``, or ``(H, W, C)`` if `hwc`.
        kernels: Of each layer, the shape of its weight and its stride.

    Raises:
        ValueError: If tiles do not fit: they need a first stride of 1, others that divide kernels, outputs in multiples of 32, and as many
            positions.
    """

    def __init__(self, shape: tuple[int, int, int], hwc: bool, kernels: Sequence[tuple[torch.Size, int]]) -> None:
        strides = [stride for _, stride in kernels]
        if strides[0] != 1:
            raise ValueError("the blocks overlap or lie apart")
        self._stored, self._layout = torch.Size(shape), block_layout(shape, hwc)
        channels = -(-self._layout.channels // SIDE) * SIDE
        layers, sides = [], (self._layout.down, self._layout.across)
        for weight, stride in kernels:
            layers.append(_layer((channels, *sides), weight, stride))
            channels, sides = weight[0], layers[-1].output_sides
        self._shape = channels, *sides
        places = [_places(layer, stride) for layer, stride in zip(layers, [*strides[1:], 1], strict=True)]
        before = [NOWHERE, *(_places_before(*pair, stride) for pair, stride in zip(pairwise(layers), strides[1:], strict=True))]
        self._layers = tuple(
            layer._replace(places=out, places_before=back) for layer, out, back in zip(layers, places, before, strict=True)
        )
        self._sizes = [*(layer.positions * layer.channels for layer in layers[1:]), math.prod(self._shape)]
        self._orders = [_Orders.of(*kernel, layer.channels // kernel[1] ** 2) for kernel, layer in zip(kernels, layers, strict=True)]

    def pack(self, weights: Sequence[Tensor]) -> tuple[np.ndarray, ...]:
        """The layers' weights ``[outputs, C, K, K]`` for :meth:`forward`."""
        return tuple(_pack(weight, orders.forward, len(weight)) for weight, orders in zip(weights, self._orders, strict=True))

    def forward(self, x: Tensor, weights: tuple[np.ndarray, ...], biases: tuple[np.ndarray, ...], keep: bool) -> list[Tensor]:
        """The outputs of all layers, bfloat16 ``[N, size]``, in the blocks of the next, whose products may read beyond the last image.

        Args:
            x: uint8 ``[N, ...]``, stored images.
            weights: By :meth:`pack`.
            biases: float32.
            keep: All outputs; otherwise of the last layer only, the others are those of the last image.

        Raises:
            ValueError: If the images have another shape than the plan's.
        """
        if x.dtype != torch.uint8 or x.shape[1:] != self._stored:
            raise ValueError(f"images must be uint8 {tuple(self._stored)}, not {str(x.dtype)[6:]} {tuple(x.shape[1:])}")
        counts = [len(x) if keep else 1] * (len(self._sizes) - 1) + [len(x)]
        outputs = [torch.empty(count + 1, size, dtype=torch.bfloat16)[:count] for count, size in zip(counts, self._sizes, strict=True)]
        arrays = self._layers, weights, biases, tuple(map(_bits, outputs)), _zeros(SIDE, SIDE), np.zeros(64, np.uint8)
        _forward(stored_images(x), self._layout, self._blocks(1), *arrays)
        return outputs

    def image(self, output: Tensor) -> Tensor:
        """The last layer's output as ``[N, C, H, W]``."""
        channels, height, width = self._shape
        return output.view(-1, height, width, channels).permute(0, 3, 1, 2)

    def _blocks(self, images: int) -> np.ndarray:
        first = self._layers[0]
        return _zeros(images + 1, first.positions, first.channels, dtype=torch.int16)

    def backward(self, gradient: Tensor, x: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of each layer's weight and bias in turn, float32 in their shapes.

        Args:
            gradient: bfloat16 ``[N, C, H, W]``, of the last layer's output.
            x, outputs: What :meth:`forward` was given, and all that it made of it.
            weights: As they were then, ``[outputs, C, K, K]``.
        """
        works = tuple(map(_work, self._layers))
        by_layer = zip(weights, self._orders, self._layers, strict=True)
        packed = tuple(_pack(weight, orders.backward, layer.channels) for weight, orders, layer in by_layer)
        of_last, ones = _bits(gradient.permute(0, 2, 3, 1)).reshape(len(x), -1), _bits(torch.ones(16, SIDE, dtype=torch.bfloat16))
        arrays = of_last, self._layers, packed, works, ones, _zeros(SIDE, SIDE), np.zeros(64, np.uint8)
        _backward(stored_images(x), self._layout, self._blocks(TOGETHER), tuple(map(_bits, outputs)), *arrays)
        found = []
        for weight, orders, work in zip(weights, self._orders, works, strict=True):
            of_weight, of_bias = torch.from_numpy(work.of_weight), torch.from_numpy(work.of_bias)
            found += [of_weight.view(-1)[orders.gradient].view(weight.shape), of_bias[:, 0].contiguous()]
        return found


def _layer(shape: tuple[int, int, int], weight: torch.Size, stride: int) -> _Layer:
    """A convolution of images of a shape ``(C, H, W)``, without its places."""
    channels, height, width = shape
    outputs, _, down, across = weight
    if down % stride or across % stride or channels * stride**2 % SIDE or outputs % SIDE:
        raise ValueError("strides or channels do not fit")
    height, width, down, across = (number // stride for number in (height, width, down, across))
    reach = (down - 1) * width + across - 1
    if height * width < SIDE:
        raise ValueError("fewer positions than a product has")
    return _Layer(width, height * width, channels * stride**2, down, across, outputs, reach, NOWHERE, NOWHERE)


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


def _places(layer: _Layer, stride: int) -> np.ndarray:
    """Of a layer's outputs, which the next one reads in blocks of stride x stride, without those of no whole block; see :class:`_Layer`."""
    rows, columns = (side // stride for side in layer.output_sides)
    y, x = np.divmod(np.arange(layer.positions - layer.reach), layer.width)
    first = ((y // stride * columns + x // stride) * stride**2 + y % stride * stride + x % stride) * layer.outputs
    inside = (y < rows * stride) & (x < columns * stride)
    return np.where(inside[:, None], first[:, None] + np.arange(0, layer.outputs, SIDE), -1)


def _places_before(before: _Layer, layer: _Layer, stride: int) -> np.ndarray:
    """Of the input of a layer, which reads the previous one's outputs in blocks of stride x stride; see :class:`_Layer`."""
    image, position = np.divmod(np.arange(TOGETHER * layer.positions)[:, None], layer.positions)
    y, x = np.divmod(position, layer.width)
    part, channel = np.divmod(np.arange(0, layer.channels, SIDE), before.outputs)
    row, column = y * stride + part // stride, x * stride + part % stride
    return (before.reach + image * before.positions + row * before.width + column) * before.outputs + channel


def _work(layer: _Layer) -> _Work:
    length = -(-TOGETHER * layer.positions // SIDE) * SIDE
    apart = length + SIDE * (length // SIDE % 2 == 0)  # rows at powers of two would share few lines of the cache
    pairs = [_zeros((length + layer.reach) // 2 + 1, layer.channels, 2, dtype=torch.int16) for _ in range(2)]
    gradients = _zeros(layer.down * layer.across, layer.outputs, layer.channels), _zeros(layer.outputs, 16)
    grid, by_outputs = ((layer.reach + length, layer.outputs), (layer.outputs, apart))
    return _Work(_zeros(*grid, dtype=torch.int16), _zeros(*by_outputs, dtype=torch.int16), *pairs, *gradients)


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """From torch, whose memory begins at multiples of 64."""
    return torch.zeros(shape, dtype=dtype).numpy()


def _bits(x: Tensor) -> np.ndarray:
    """A bfloat16 tensor's elements as they are, for Numba."""
    return x.detach().contiguous().view(torch.int16).numpy()


@cache
def _plan(shape: tuple[int, int, int], hwc: bool, kernels: tuple[tuple[torch.Size, int], ...]) -> TilePlan | None:
    try:
        return TilePlan(shape, hwc, kernels)
    except ValueError:
        return None


def tile_plan(shape: tuple[int, int, int], hwc: bool, layers: Sequence[Convolution], dtype: torch.dtype) -> TilePlan | None:
    """The :class:`TilePlan` for convolutions, or None where this machine has no tiles or they do not fit.

    Args:
        shape, hwc: Of stored images.
        layers: With weights in float32, the first over blocks of pixels.
        dtype: In which to compute; tiles do so in bfloat16.
    """
    plain = all(set(layer.padding) == {0} and len(set(layer.stride)) == 1 and layer.weight.dtype == torch.float32 for layer in layers)
    if not plain or dtype != torch.bfloat16 or not tiles.at_hand():
        return None
    return _plan(tuple(shape), hwc, tuple((layer.weight.shape, layer.stride[0]) for layer in layers))


class TileWeights:
    """Convolutions with ReLU whose present weights lie ready for the tiles; without a gradient."""

    def __init__(self, plan: TilePlan, layers: Sequence[Convolution]) -> None:
        self._plan = plan
        self._weights = plan.pack([layer.weight for layer in layers])
        self._biases = tuple(layer.bias.detach().clone().numpy() for layer in layers)

    def __call__(self, x: Tensor) -> Tensor:
        return self._plan.image(self._plan.forward(x, self._weights, self._biases, keep=False)[-1])


class TileConvolutions(Function):
    """Convolutions with ReLU of stored images by a plan, with gradients for each layer's weight and bias, which alternate, in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, plan: TilePlan, *operands: Tensor) -> Tensor:
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
