"""Shrinks pictures to the size that a policy sees, straight into the array that it reads."""

from __future__ import annotations

import numpy as np
from numba import njit


class Resampler:
    """Makes planar pictures uint8 ``[C, h, w]`` of interleaved ones ``[H, W, C]``.

    Every output pixel is the mean of the input area that it covers, which is what OpenCV calls INTER_AREA; or, for
    pictures whose values are names rather than amounts, the input pixel at the centre of that area.

    Args:
        source: Height, width and channels of the input.
        target: Height and width of the output; not above those of the input.
        nearest: Take the pixel at the centre.
    """

    def __init__(self, source: tuple[int, int, int], target: tuple[int, int], nearest: bool = False) -> None:
        self._taps = taps(source, target, nearest)

    def __call__(self, image: np.ndarray, out: np.ndarray) -> None:
        _resample(image, *self._taps, out)


def taps(source: tuple[int, int, int], target: tuple[int, int], nearest: bool = False) -> tuple[np.ndarray, ...]:
    """What enters each output pixel: the input's rows ``[taps, h]``, their weights ``[taps, h]``, the places in a line
    of interleaved channels ``[taps, C, w]``, and their weights ``[taps, w]``; numbers of taps are multiples of three.
    Arguments as of :class:`Resampler`.
    """
    make = _centre_taps if nearest else _area_taps
    rows, row_weights = _in_threes(*make(source[0], target[0]))
    columns, column_weights = _in_threes(*make(source[1], target[1]))
    places = columns[:, None] * source[2] + np.arange(source[2])[:, None]
    # unsigned: no look at whether an index counts from the end
    return rows.astype(np.uint64), row_weights, places.astype(np.uint64), column_weights


def _area_taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """First input index int64 ``[target]`` and weights float32 ``[taps, target]`` of each output pixel, along one
    dimension."""
    ratio = source / target
    begins = np.arange(target) * ratio
    firsts = np.floor(begins + 1e-6).astype(np.int64)
    taps = int((np.ceil(begins + ratio - 1e-6) - firsts).max())
    starts = np.minimum(firsts, source - taps)
    pixels = starts + np.arange(taps)[:, None]
    covered = np.minimum(pixels + 1, begins + ratio) - np.maximum(pixels, begins)
    return starts, (np.clip(covered, 0, 1) / ratio).astype(np.float32)


def _centre_taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for the one pixel at the centre."""
    centres = (np.arange(target) + 0.5) * source / target
    return np.minimum(centres.astype(np.int64), source - 1), np.ones((1, target), np.float32)


def _in_threes(starts: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The input index and the weight ``[taps, target]`` of each tap, with taps of weight 0 up to a multiple of
    three."""
    taps = len(weights)
    missing = -taps % 3
    pixels = starts + np.minimum(np.arange(taps + missing), taps - 1)[:, None]
    return pixels, np.pad(weights, ((0, missing), (0, 0)))


@njit(cache=True, nogil=True, fastmath=True)
def _resample(image, rows, row_weights, places, column_weights, out):
    wide = image.shape[1] * image.shape[2]
    line, sums = np.empty(wide, np.float32), np.empty(out.shape[2], np.float32)
    flat = image.reshape(image.shape[0], wide)
    for y in range(out.shape[1]):
        join_lines(flat, rows, row_weights, y, line)
        for channel in range(out.shape[0]):
            shrink_line(line, places, channel, column_weights, sums, out[channel, y])


@njit(nogil=True, fastmath=True, inline="always")
def join_lines(lines, rows, weights, y, line):
    """The weighted sum of the source's lines that make line `y` of a picture; three at a time, so that sums are seldom
    read and written.

    Args:
        lines: uint8 ``[H, W * C]``.
        rows, weights: ``[taps, h]``.
        line: float32 ``[W * C]``, filled.
    """
    line[:] = 0.0
    for tap in range(0, len(rows), 3):
        a, b, c = lines[rows[tap, y]], lines[rows[tap + 1, y]], lines[rows[tap + 2, y]]
        of_a, of_b, of_c = weights[tap, y], weights[tap + 1, y], weights[tap + 2, y]
        for x in range(len(line)):
            line[x] += of_a * a[x] + of_b * b[x] + of_c * c[x]


@njit(nogil=True, fastmath=True, inline="always")
def shrink_line(line, places, channel, weights, sums, out):
    """Make a line of a picture from what :func:`join_lines` gave.

    Args:
        line: float32 ``[W * C]``.
        places: ``[taps, C, w]``.
        weights: ``[taps, w]``.
        sums: float32 ``[w]``, room to work in.
        out: uint8 ``[w]``, of that channel.
    """
    sums[:] = 0.5  # rounds when it is cut off
    for tap in range(0, len(places), 3):
        left, middle, right = places[tap, channel], places[tap + 1, channel], places[tap + 2, channel]
        of_l, of_m, of_r = weights[tap], weights[tap + 1], weights[tap + 2]
        for x in range(len(sums)):
            sums[x] += of_l[x] * line[left[x]] + of_m[x] * line[middle[x]] + of_r[x] * line[right[x]]
    for x in range(len(out)):
        out[x] = np.uint8(np.int32(sums[x]))
