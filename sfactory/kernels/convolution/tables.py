"""From the shapes of convolutions to the tables by which :mod:`sfactory.kernels.convolution.passes` works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sfactory.kernels.convolution.passes import SIDE, TOGETHER, Layer, Strips, Work, products

BY_ROWS = products.ROWS[-1] < SIDE
"""Whether each product is a part of one row of an image, as short ones can be; long ones are of positions as they
come."""

_NOWHERE = np.zeros((0, 0), np.int64)
"""The places of a layer that has none."""


class _Grid(NamedTuple):
    """The blocks of an image that a convolution reads, and the convolution of stride 1 over them.

    Attributes:
        height, width: Blocks of an image.
        pitch: Positions of a row: its blocks, and one more where rows must begin at even positions.
        channels: Of a block.
        stride: Pixels on its side.
        down, across: Taps of the kernel.
        outputs: Channels of the output.
    """

    height: int
    width: int
    pitch: int
    channels: int
    stride: int
    down: int
    across: int
    outputs: int

    @classmethod
    def of(cls, shape: tuple[int, int, int], weight: torch.Size, stride: int) -> _Grid:
        """For images ``(C, H, W)`` and a weight ``[outputs, C, K, K]``."""
        channels, height, width = shape
        outputs, _, down, across = weight
        if down % stride or across % stride or channels * stride**2 % products.COLUMNS or outputs % SIDE:
            raise ValueError("strides or channels do not fit")
        height, width, down, across = (number // stride for number in (height, width, down, across))
        if height * width < SIDE:
            raise ValueError("fewer positions than a product has")
        return cls(
            height, width, width + (width % 2 if BY_ROWS else 0), channels * stride**2, stride, down, across, outputs
        )

    @property
    def positions(self) -> int:
        return self.height * self.pitch

    @property
    def reach(self) -> int:
        """The shift of the last tap."""
        return (self.down - 1) * self.pitch + self.across - 1

    @property
    def output_shape(self) -> tuple[int, int, int]:
        return self.outputs, self.height - self.down + 1, self.width - self.across + 1


def fused_layers(
    shape: tuple[int, int, int], kernels: Sequence[tuple[torch.Size, int]]
) -> tuple[tuple[Layer, ...], tuple[int, int, int]]:
    """The layers of convolutions one after the other, and the shape ``(C, H, W)`` of the last one's output.

    Args:
        shape: Of the first one's input, likewise, with channels in multiples of :data:`products.COLUMNS`.
        kernels: Of each, the shape of its weight and its stride.

    Raises:
        ValueError: If they do not fit: strides must divide kernels, outputs be multiples of 32, and positions at least
            as many.
    """
    grids = []
    for weight, stride in kernels:
        grids.append(_Grid.of(shape, weight, stride))
        shape = grids[-1].output_shape
    neighbours = zip([None, *grids[:-1]], grids, [*grids[1:], None], strict=True)
    return tuple(_layer(*three) for three in neighbours), shape


def _layer(before: _Grid | None, grid: _Grid, after: _Grid | None) -> Layer:
    _, height, width = grid.output_shape
    if BY_ROWS:
        all_rows = np.tile([0, grid.down], (height, 1))
        forward, back = (
            _strips_of_rows(grid, width, all_rows),
            _strips_of_rows(grid, grid.width, _rows_that_reach(grid)),
        )
        runs = height, width + width % 2
    else:
        length = TOGETHER * grid.positions
        forward, back, runs = _strips(grid, grid.positions - grid.reach), _strips(grid, length), (1, length)
    places, blanks = _places(grid, after)
    places_before = _NOWHERE if before is None else _places_before(before, grid)
    sizes = grid.pitch, grid.positions, grid.channels, grid.down, grid.across, grid.outputs, grid.reach
    return Layer(*sizes, forward, back, *runs, places, blanks, places_before)


def _strips(grid: _Grid, positions: int) -> Strips:
    """Of positions one after the other; the last products do some of them again, or the only one reaches beyond
    them."""
    first = np.minimum(np.arange(0, positions, SIDE), max(0, positions - SIDE))
    return Strips(SIDE, np.stack(np.broadcast_arrays(first, min(SIDE, positions), 0, grid.down), axis=1))


def _strips_of_rows(grid: _Grid, width: int, taps: np.ndarray) -> Strips:
    """Of so many positions of each row of an image, for which there are the first row of the kernel and the one after
    the last."""
    least, most = products.ROWS[0], products.ROWS[-1]
    rows = max(least, -(-width // -(-width // most)))
    first = np.minimum(np.arange(0, width, rows), max(0, width - rows))
    begins = np.arange(len(taps))[:, None] * grid.pitch + first
    each = np.broadcast_arrays(begins, min(rows, width), taps[:, :1], taps[:, 1:])
    return Strips(rows, np.stack(each, axis=2).reshape(-1, 4))


def _rows_that_reach(grid: _Grid) -> np.ndarray:
    """For each row of a convolution's input the rows of the kernel, the last one first, by which it gets into the
    output: from, to."""
    _, height, _ = grid.output_shape
    y = np.arange(grid.height)
    return np.stack((np.maximum(0, grid.down - 1 - y), np.minimum(grid.down, grid.down - 1 - y + height)), axis=1)


def _places(grid: _Grid, after: _Grid | None) -> tuple[np.ndarray, np.ndarray]:
    """Of a layer's outputs, in the blocks of the next, without those of no whole block; and what is blank there: see
    :class:`Layer`."""
    _, height, width = grid.output_shape
    stride, rows, columns, pitch = (
        (1, height, width, width) if after is None else (after.stride, after.height, after.width, after.pitch)
    )
    y, x = np.divmod(np.arange(grid.positions), grid.pitch)
    first = ((y // stride * pitch + x // stride) * stride**2 + y % stride * stride + x % stride) * grid.outputs
    inside = (y < rows * stride) & (x < columns * stride)
    places = np.where(inside[:, None], first[:, None] + np.arange(0, grid.outputs, SIDE), -1)
    channels = grid.outputs * stride**2
    blank = (np.arange(rows)[:, None] * pitch + np.arange(columns, pitch)).reshape(-1, 1) * channels + np.arange(
        0, channels, SIDE
    )
    return places, blank.reshape(-1)


def _places_before(before: _Grid, grid: _Grid) -> np.ndarray:
    """Of the input of a layer, which reads the previous one's outputs in blocks; see :class:`Layer`."""
    image, position = np.divmod(np.arange(TOGETHER * grid.positions)[:, None], grid.positions)
    y, x = np.divmod(position, grid.pitch)
    part, channel = np.divmod(np.arange(0, grid.channels, SIDE), before.outputs)
    row, column = y * grid.stride + part // grid.stride, x * grid.stride + part % grid.stride
    return (before.reach + image * before.positions + row * before.pitch + column) * before.outputs + channel


def workspace(layer: Layer) -> Work:
    length = -(-TOGETHER * layer.positions // SIDE) * SIDE
    apart = length + SIDE * (length // SIDE % 2 == 0)  # rows at powers of two would share few lines of the cache
    # Products may read beyond it.
    grid = zeros(layer.reach + length + SIDE, layer.outputs, dtype=torch.int16)[: layer.reach + length]
    even, odd = (zeros((length + layer.reach) // 2 + 1, layer.channels, 2, dtype=torch.int16) for _ in range(2))
    of_weight, of_bias = zeros(layer.down * layer.across, layer.outputs, layer.channels), zeros(layer.outputs)
    return Work(grid, zeros(layer.outputs, apart, dtype=torch.int16), even, odd, of_weight, of_bias)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """From torch, whose memory begins at multiples of 64."""
    return torch.zeros(shape, dtype=dtype).numpy()
