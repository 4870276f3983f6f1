"""Operations of compiled code on numbers at an address, on every processor."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sfactory.kernels.convolution import vectors


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
    pairs = np.zeros((16, 2), np.uint16)
    pair(numbers[0], numbers[1], pairs)
    assert np.array_equal(pairs, numbers[:2, :16].T)


def test_rows_are_added_up_and_lines_cleared() -> None:
    @njit
    def add(rows, total):
        vectors.add_rows(rows.ctypes.data, rows.shape[1] * 2, len(rows), total.ctypes.data)

    @njit
    def clear(target):
        vectors.clear(target.ctypes.data)

    rows = torch.randint(-8, 9, (5, 48), generator=torch.Generator().manual_seed(0)).bfloat16()
    bits, total = rows.view(torch.int16).numpy(), torch.ones(40)
    add(bits, total.numpy())
    assert torch.equal(total[:32], 1 + rows[:, :32].float().sum(0))
    assert torch.equal(total[32:], torch.ones(8))
    clear(bits)
    assert not rows[0, :32].any()
    assert rows[0, 32:].any()
