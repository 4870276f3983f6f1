"""Shrinks pictures to the size that a policy sees, straight into the array that it reads."""

from __future__ import annotations

import numpy as np
from numba import njit


class Resampler:
    """Makes planar pictures uint8 ``[C, h, w]`` of interleaved ones ``[H, W, C]``.

    Every output pixel is the mean of the input area that it covers, which is what OpenCV calls INTER_AREA; or, for pictures whose values
    are names rather than amounts, the input pixel at the centre of that area.

    Args:
        source: Height, width and channels of the input.
        target: Height and width of the output; not above those of the input.
        nearest: Take the pixel at the centre.
    """

    def __init__(self, source: tuple[int, int, int], target: tuple[int, int], nearest: bool = False) -> None:
        make = _centre_taps if nearest else _area_taps
        rows, row_weights = _in_threes(*make(source[0], target[0]))
        columns, column_weights = _in_threes(*make(source[1], target[1]))
        places = columns[:, None] * source[2] + np.arange(source[2])[:, None]
        # unsigned: no look at whether an index counts from the end
        self._taps = rows.astype(np.uint64), row_weights, places.astype(np.uint64), column_weights

    def __call__(self, image: np.ndarray, out: np.ndarray) -> None:
        _resample(image, *self._taps, out)

    def push(self, images: np.ndarray, stacks: np.ndarray) -> None:
        """Append a picture of one channel to each of N stacks, and drop their oldest.

        Args:
            images: uint8 ``[N, H, W, 1]``.
            stacks: uint8 ``[N, K, h, w]``, oldest first; changed in place.
        """
        _push(images, *self._taps, stacks)


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


def _in_threes(starts: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The input index and the weight ``[taps, target]`` of each tap, with taps of weight 0 up to a multiple of three."""
    taps = len(weights)
    missing = -taps % 3
    pixels = starts + np.minimum(np.arange(taps + missing), taps - 1)[:, None]
    return pixels, np.pad(weights, ((0, missing), (0, 0)))


@njit(cache=True, nogil=True, fastmath=True)
def _resample(image, rows, row_weights, places, column_weights, out):
    """Three taps at a time, so that sums are seldom read and written.

    Args:
        rows: ``[taps, h]``.
        places: ``[taps, C, w]`` in a line of interleaved channels.
    """
    wide = image.shape[1] * image.shape[2]
    line, sums = np.empty(wide, np.float32), np.empty(out.shape[2], np.float32)
    flat = image.reshape(image.shape[0], wide)
    for y in range(out.shape[1]):
        line[:] = 0.0
        for tap in range(0, len(rows), 3):
            a, b, c = flat[rows[tap, y]], flat[rows[tap + 1, y]], flat[rows[tap + 2, y]]
            of_a, of_b, of_c = row_weights[tap, y], row_weights[tap + 1, y], row_weights[tap + 2, y]
            for x in range(wide):
                line[x] += of_a * a[x] + of_b * b[x] + of_c * c[x]
        for channel in range(out.shape[0]):
            sums[:] = 0.5  # rounds when it is cut off
            for tap in range(0, len(places), 3):
                left, middle, right = places[tap, channel], places[tap + 1, channel], places[tap + 2, channel]
                of_l, of_m, of_r = column_weights[tap], column_weights[tap + 1], column_weights[tap + 2]
                for x in range(len(sums)):
                    sums[x] += of_l[x] * line[left[x]] + of_m[x] * line[middle[x]] + of_r[x] * line[right[x]]
            for x in range(len(sums)):
                out[channel, y, x] = np.uint8(np.int32(sums[x]))


@njit(cache=True, nogil=True)
def _push(images, rows, row_weights, places, column_weights, stacks):
    newest = stacks.shape[1] - 1
    for i in range(len(stacks)):
        for k in range(newest):
            stacks[i, k] = stacks[i, k + 1]
        _resample(images[i], rows, row_weights, places, column_weights, stacks[i, newest:])
