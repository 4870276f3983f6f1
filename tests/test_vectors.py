"""Operations of compiled code on numbers at an address, on every processor."""

from __future__ import annotations

import numpy as np
from numba import njit

from sfactory.model import vectors_cpu as vectors


def test_lines_are_transposed_and_paired() -> None:
    @njit
    def transpose(source, target):
        vectors.transpose(source.ctypes.data, source.shape[1] * 2, target.ctypes.data, target.shape[1] * 2)

    @njit
    def pair(first, second, target):
        vectors.pair(first.ctypes.data, second.ctypes.data, target.ctypes.data)

    numbers, turned = np.random.default_rng(0).integers(0, 2**16, (32, 32), np.uint16), np.zeros((16, 32), np.uint16)
    transpose(np.ascontiguousarray(numbers[:, :16]), turned)
    assert np.array_equal(turned, numbers[:, :16].T)
    pairs = np.zeros((32, 2), np.uint16)
    pair(numbers[0], numbers[1], pairs)
    assert sorted(vectors.PAIRED) == list(range(32))
    assert np.array_equal(pairs, numbers[:2, vectors.PAIRED].T)
