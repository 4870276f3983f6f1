"""Images of eight bits in blocks of 4 x 4 pixels, over which a first convolution on the CPU is fastest.

A convolution of stride 4 whose kernel has 4 or 8 pixels a side is one of stride 1 over blocks of 4 x 4 pixels, with a
kernel of 1 or 2 blocks. A block has 16 channels for each of the image's, which fill the processor's vectors and matrix
units where the image's own do not.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sfactory.kernels.convolution import vectors

BLOCK = 4
"""Pixels on a side of a block."""
BLOCK_TYPES = torch.bfloat16, torch.float32
"""Dtypes of blocks."""


class BlockLayout(NamedTuple):
    """Where the pixels of an image's blocks are stored.

    Attributes:
        channels: Of a block: those of the image, each with its rows of the block, or in (H, W, C) rows of pixels, each
            with its channels.
        down, across: Blocks of an image.
        line: Bytes from a row of blocks to the next.
        step: Bytes from a block to the next in its row.
        words: int64 ``[channels / 4]``: where in an image the first block's pixels are, four at each.
        signed: Whether pixels are int8, else uint8.
    """

    channels: int
    down: int
    across: int
    line: int
    step: int
    words: np.ndarray
    signed: bool


@cache
def block_layout(shape: tuple[int, int, int], hwc: bool, signed: bool) -> BlockLayout:
    """Of images ``(C, H, W)``, or ``(H, W, C)`` if `hwc`, int8 if `signed`, else uint8; both sides multiples of 4."""
    channels, height, width = (shape[2], *shape[:2]) if hwc else shape
    line, step = (width * channels, BLOCK * channels) if hwc else (width, BLOCK)
    rows = np.arange(BLOCK)[:, None] * line
    words = rows + np.arange(0, step, BLOCK) if hwc else np.arange(channels)[:, None, None] * (height * width) + rows
    blocks = channels * BLOCK**2, height // BLOCK, width // BLOCK
    return BlockLayout(*blocks, BLOCK * line, step, words.reshape(-1), signed)


@njit(cache=True, nogil=True)
def fill_blocks(image, layout, target, size, line, apart):
    """Write an image's blocks, from address to address.

    Args:
        size: Bytes of a number: 2 for bfloat16, 4 for float32.
        line: Bytes from a row of blocks to the next.
        apart: Bytes from a block to the next.
    """
    words = layout.words
    for y in range(layout.down):
        for x in range(layout.across):
            block, to = image + y * layout.line + x * layout.step, target + y * line + x * apart
            for i in range(0, len(words), 4):
                first, second, third, fourth = (
                    block + words[i],
                    block + words[i + 1],
                    block + words[i + 2],
                    block + words[i + 3],
                )
                if layout.signed:
                    if size == 2:
                        vectors.int8_to_bfloat16(first, second, third, fourth, to)
                    else:
                        vectors.int8_to_float32(first, second, third, fourth, to)
                elif size == 2:
                    vectors.uint8_to_bfloat16(first, second, third, fourth, to)
                else:
                    vectors.uint8_to_float32(first, second, third, fourth, to)
                to += 16 * size


@njit(cache=True, nogil=True)
def _fill_all(images, layout, blocks):
    """Images ``[N, size]``, by their bits uint8, to blocks ``[N, down, across, channels]``."""
    apart = layout.channels * blocks.itemsize
    line = layout.across * apart
    for n in range(len(images)):
        image, target = images.ctypes.data + n * images.shape[1], blocks.ctypes.data + n * layout.down * line
        fill_blocks(image, layout, target, blocks.itemsize, line, apart)


def pixel_blocks(x: Tensor, hwc: bool, dtype: torch.dtype) -> Tensor:
    """Images as blocks of 4 x 4 pixels.

    Args:
        x: uint8 or int8 ``[N, C, H, W]``, or ``[N, H, W, C]`` if `hwc`; both sides multiples of 4.
        dtype: bfloat16 or float32.

    Returns:
        ``[N, 16 C, H/4, W/4]`` of the dtype, in channels-last order, channels as in :class:`BlockLayout`.
    """
    layout = block_layout(tuple(x.shape[1:]), hwc, x.dtype == torch.int8)
    out = torch.empty((len(x), layout.down, layout.across, layout.channels), dtype=dtype)
    bits = out.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
    _fill_all(stored_images(x), layout, bits)
    return out.permute(0, 3, 1, 2)


def stored_images(x: Tensor) -> np.ndarray:
    """uint8 or int8 ``[N, ...]`` as ``[N, size]``, by their bits uint8."""
    return x.contiguous().view(len(x), -1).view(torch.uint8).numpy()


def block_weight(weight: Tensor, hwc: bool) -> Tensor:
    """The weight ``[O, 16 C, K/4, K/4]`` for :func:`pixel_blocks` of a convolution with weight ``[O, C, K, K]`` and
    stride 4."""
    out, channels, side, _ = weight.shape
    split = weight.view(out, channels, side // BLOCK, BLOCK, side // BLOCK, BLOCK)
    order = (0, 3, 5, 1, 2, 4) if hwc else (0, 1, 3, 5, 2, 4)
    return split.permute(order).reshape(out, channels * BLOCK * BLOCK, side // BLOCK, side // BLOCK)
