"""Shrinks pictures to the size that a policy sees, straight into the array that it reads."""

from __future__ import annotations

import numpy as np
from numba import njit


class Resampler:
    """Makes planar pictures uint8 ``[C, h, w]`` of interleaved ones ``[H, W, C]``.

    Every output pixel is the mean of the input area that it covers, which is what OpenCV calls INTER_AREA; or, for pictures whose values
    are names rather than amounts, the input pixel at the centre of that area.

    Args:
        source: Height and width of the input.
        target: Height and width of the output; not above those of the input.
        nearest: Take the pixel at the centre.
    """

    def __init__(self, source: tuple[int, int], target: tuple[int, int], nearest: bool = False) -> None:
        make = _centre_taps if nearest else _area_taps
        self._rows, self._columns = make(source[0], target[0]), make(source[1], target[1])

    def __call__(self, image: np.ndarray, out: np.ndarray) -> None:
        _resample(image, *self._rows, *self._columns, out)


def _area_taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """First input index int64 ``[target]`` and weights float32 ``[taps, target]`` of each output pixel, along one dimension."""
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


@njit(cache=True, nogil=True, fastmath=True)
def _resample(image, row_starts, row_weights, column_starts, column_weights, out):
    height, width = len(row_starts), len(column_starts)
    channels = image.shape[2]
    wide = image.shape[1] * channels
    line = np.empty(wide, np.float32)
    sums = np.empty(width, np.float32)
    flat = image.reshape(image.shape[0], wide)
    for y in range(height):
        line[:] = 0.0
        for tap in range(len(row_weights)):
            weight = row_weights[tap, y]
            source = flat[row_starts[y] + tap]
            for x in range(wide):
                line[x] += weight * source[x]
        for c in range(channels):
            sums[:] = 0.5  # rounds when it is cut off
            for tap in range(len(column_weights)):
                shift = tap * channels + c
                for x in range(width):
                    sums[x] += column_weights[tap, x] * line[column_starts[x] * channels + shift]
            for x in range(width):
                out[c, y, x] = np.uint8(np.int32(sums[x]))
