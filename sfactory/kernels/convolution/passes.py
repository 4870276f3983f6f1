"""Compiled passes of convolutions with ReLU in bfloat16: all layers of one image forward, all of a few images backward.

A convolution of stride s is one of stride 1 over blocks of s x s pixels with all their channels, so each layer writes
its output in the blocks of the next. An image's blocks, row by row, are its *positions*. A tap of the kernel is then a
shift by so many positions, and its share of the output one product of matrices, ``[positions, channels] @ [channels,
outputs]``. At the right edge a shift wraps into the next
row: outputs there have no place and are dropped, and their gradients are zero.

Products are done by the processor's matrix tiles where it has them, for 32 positions at a time wherever rows of the
image end; otherwise by dot products of pairs, for as many positions of one row as have a place.

All numbers of 16 bits are bfloat16, which NumPy and Numba have no type for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from sfactory.kernels.convolution import dots, tiles, vectors
from sfactory.kernels.convolution.pixel_blocks import fill_blocks

products = tiles if tiles.exist() else dots
"""How this processor multiplies matrices."""
SIDE = 32
"""Most columns of the products that are done at once."""
TOGETHER = 4 if products is tiles else 1
"""Images that go back through all layers together: few enough for the second-level cache; tiles want long products."""
_SCRATCH = SIDE * 4
"""Bytes of a row of a product."""


class Strips(NamedTuple):
    """Products that together are a layer's output, or its input's gradient.

    Attributes:
        rows: Of each product.
        table: int64 ``[products, 4]``: the position of its first row, how many of its rows count, and the first row of
            the kernel that reaches them and the one after the last.
    """

    rows: int
    table: np.ndarray


class Layer(NamedTuple):
    """A convolution of stride 1 over an image's positions.

    Attributes:
        width: Positions of a row.
        positions: Of an image.
        channels: Of a position.
        down, across: Taps of the kernel.
        outputs: Channels of the output.
        reach: The shift of the last tap.
        forward: Of an image's output.
        back: Of the gradient of the input of :data:`TOGETHER` images.
        runs: Number of runs of positions, a row of the image apart, that have all those images' outputs.
        run: Positions of a run.
        places: int64 ``[positions, outputs / 32]``: where in the output, as the next layer reads it, 32 channels of a
            position go, or -1.
        blanks: int64 ``[...]``: where 32 channels of it must be zero.
        places_before: int64 ``[TOGETHER * positions, channels / 32]``: where 32 channels of a position lie in the
            previous layer's grid.
    """

    width: int
    positions: int
    channels: int
    down: int
    across: int
    outputs: int
    reach: int
    forward: Strips
    back: Strips
    runs: int
    run: int
    places: np.ndarray
    blanks: np.ndarray
    places_before: np.ndarray


class Work(NamedTuple):
    """What a layer's way back works in, for images that go together, and its gradients.

    Attributes:
        grid: ``[reach + TOGETHER * positions and more, outputs]``: the gradient of the output at its positions, zero at
            all others.
        by_outputs: ``[outputs, TOGETHER * positions and more]``: the same without the first zeros.
        even, odd: ``[half of them, channels, 2]``: pairs of the input's positions that begin with an even or an odd
            one.
        of_weight: float32 ``[taps, outputs, channels]``.
        of_bias: float32 ``[outputs]``.
    """

    grid: np.ndarray
    by_outputs: np.ndarray
    even: np.ndarray
    odd: np.ndarray
    of_weight: np.ndarray
    of_bias: np.ndarray


@njit(cache=True, nogil=True)
def _multiply(rows, left, channels, layer, begin, end, weight, column, product):
    """``[rows, taps * channels] @ [taps * channels, 32]`` of positions from address `left` on; the kernel's rows from
    `begin` to `end`."""
    step, right_step, length = channels * 2, weight.shape[1] * 4, layer.across * channels
    left_part, right_part = layer.width * step, length // 2 * right_step
    right = weight.ctypes.data + column * 4 + begin * right_part
    products.multiply(
        rows, end - begin, length, left + begin * left_part, step, left_part, right, right_step, right_part, product
    )


@njit(cache=True, nogil=True)
def _convolve(source, layer, weight, bias, target, product):
    """One image through one layer, from address to address."""
    for strip in layer.forward.table:
        left = source + strip[0] * layer.channels * 2
        for column in range(0, layer.outputs, SIDE):
            _multiply(layer.forward.rows, left, layer.channels, layer, strip[2], strip[3], weight, column, product)
            for row in range(strip[1]):
                place = layer.places[strip[0] + row, column // SIDE]
                if place >= 0:
                    vectors.activate(product + row * _SCRATCH, bias.ctypes.data + column * 4, target + place * 2)
    for place in layer.blanks:
        vectors.clear(target + place * 2)


@njit(cache=True, nogil=True)
def _fill(images, layout, first, count, layer, blocks):
    """Write the blocks of some images one after the other; gives their address."""
    source, target, apart = images.ctypes.data + first * images.shape[1], blocks.ctypes.data, layer.channels * 2
    for k in range(count):
        fill_blocks(
            source + k * images.shape[1], layout, target + k * layer.positions * apart, 2, layer.width * apart, apart
        )
    return target


@njit(cache=True, nogil=True)
def forward(images, layout, blocks, layers, weights, biases, outputs, scratch, kept):
    """
    Args:
        images: uint8 ``[N, bytes]``, as they are stored, in `layout`.
        blocks: ``[2, positions, channels]`` of the first layer, zero where an image has no channels; the last are only
            read.
        weights: For each layer ``[taps * channels / 2, outputs, 2]``, in pairs of channels.
        biases: float32 ``[outputs]``.
        outputs: ``[N, size]``, or ``[1, size]`` to write all over each other.
        scratch: float32 ``[32, 32]``.
        kept: 64 bytes for :func:`sfactory.kernels.convolution.tiles.begin`.
    """
    products.begin(kept.ctypes.data)
    for image in range(len(images)):
        source = _fill(images, layout, image, 1, layers[0], blocks)
        for i in range(len(layers)):
            target = outputs[i].ctypes.data + image % len(outputs[i]) * outputs[i].shape[1] * 2
            _convolve(source, layers[i], weights[i], biases[i], target, scratch.ctypes.data)
            source = target
    products.end(kept.ctypes.data)


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
def _transpose(grid, head, by_outputs):
    """``[positions, outputs]`` of a grid, from row `head` on, to ``[outputs, positions]``."""
    columns, step = grid.shape[1], by_outputs.shape[1] * 2
    for position in range(0, len(grid) - head - 31, 32):
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
        for channel in range(0, channels, 16):
            vectors.pair(first + channel * 2, second + channel * 2, to + channel * 4)
        to += channels * 4


@njit(cache=True, nogil=True)
def _add_to_weight(layer, work):
    """Add for each tap the products of gradients ``[outputs, positions]`` and inputs ``[positions, channels]`` that are
    shifted by it."""
    left_step, right_step, row = work.by_outputs.shape[1] * 2, layer.channels * 4, layer.width
    for tap in range(layer.down * layer.across):
        shift = tap // layer.across * row + tap % layer.across
        inputs = (work.odd if shift % 2 else work.even).ctypes.data + shift // 2 * right_step
        for output in range(0, layer.outputs, SIDE):
            left = work.by_outputs.ctypes.data + output * left_step
            for channel in range(0, layer.channels, SIDE):
                columns, right = min(SIDE, layer.channels - channel), inputs + channel * 4
                total = work.of_weight.ctypes.data + ((tap * layer.outputs + output) * layer.channels + channel) * 4
                products.add_product(
                    columns,
                    layer.runs,
                    layer.run,
                    left,
                    left_step,
                    row * 2,
                    right,
                    right_step,
                    row // 2 * right_step,
                    total,
                    right_step,
                )


@njit(cache=True, nogil=True)
def _add_to_bias(work):
    """Add the sums of gradients over positions."""
    rows, columns = work.grid.shape
    for output in range(0, columns, SIDE):
        vectors.add_rows(work.grid.ctypes.data + output * 2, columns * 2, rows, work.of_bias.ctypes.data + output * 4)


@njit(cache=True, nogil=True)
def _pass_back(source, length, layer, weight, grid, grid_before, product):
    """The gradient of a layer's input, which lies from address `source` on: cut off where that is zero, in the previous
    layer's grid."""
    columns = layer.outputs
    for strip in layer.back.table:
        if strip[0] >= length:
            break
        # The last tap, which comes first in `weight`, looks furthest back.
        left = grid.ctypes.data + strip[0] * columns * 2
        for channel in range(0, layer.channels, SIDE):
            _multiply(layer.back.rows, left, columns, layer, strip[2], strip[3], weight, channel, product)
            for row in range(strip[0], strip[0] + strip[1]):
                to = grid_before.ctypes.data + layer.places_before[row, channel // SIDE] * 2
                vectors.round_and_cut_off(
                    product + (row - strip[0]) * _SCRATCH, source + (row * layer.channels + channel) * 2, to
                )


@njit(cache=True, nogil=True)
def backward(images, layout, blocks, outputs, gradient, layers, weights, works, scratch, kept):
    """Add to the gradients in `works`.

    Args:
        images, layout: As for :func:`forward`.
        blocks: Likewise ``[TOGETHER + 1, positions, channels]``.
        outputs: Of each layer, ``[N, size]``.
        gradient: Of the last one, likewise.
        weights: Of each layer ``[taps * outputs / 2, channels, 2]``, in pairs of outputs, the last tap first; of the
            first layer nothing is read.
        scratch, kept: As for :func:`forward`.
    """
    products.begin(kept.ctypes.data)
    top = len(layers) - 1
    for first in range(0, len(images), TOGETHER):
        count = min(TOGETHER, len(images) - first)
        of_output, output = gradient[first : first + count].reshape(-1), outputs[top][first : first + count].reshape(-1)
        if not of_output.any():  # as where a segment ends, with an observation that has a value, but no loss
            continue
        if count < TOGETHER:
            for i in range(len(works)):
                works[i].grid[:] = 0
        _spread(of_output, output, count, layers[top], works[top].grid)
        for i in range(top, -1, -1):
            layer, work = layers[i], works[i]
            length = count * layer.positions
            if i > 0:
                source = outputs[i - 1].ctypes.data + first * outputs[i - 1].shape[1] * 2
            else:
                source = _fill(images, layout, first, count, layer, blocks)
            _transpose(work.grid, layer.reach, work.by_outputs)
            _pair(source, length, layer.channels, 0, work.even)
            _pair(source, length, layer.channels, 1, work.odd)
            _add_to_weight(layer, work)
            _add_to_bias(work)
            if i > 0:
                _pass_back(source, length, layer, weights[i], work.grid, works[i - 1].grid, scratch.ctypes.data)
    products.end(kept.ctypes.data)
