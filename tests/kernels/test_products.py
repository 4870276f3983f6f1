"""Products of bfloat16 matrices from address to address, against torch's. Whole numbers make every comparison an
equality."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from sfactory.kernels.convolution import dots, tiles

WAYS = [
    pytest.param(
        way,
        id=way.__name__.split(".")[-1],
        marks=pytest.mark.skipif(not way.at_hand(), reason="this processor cannot do them"),
    )
    for way in (dots, tiles)
]
PARTS, LENGTH, STRIDE = 3, 64, 96


def whole(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_pairs(x: Tensor) -> Tensor:
    """``[parts, length, 32]`` as ``[parts, length / 2, 32, 2]``."""
    return x.unflatten(1, (-1, 2)).transpose(2, 3).contiguous()


def bits(x: Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy()


@pytest.mark.parametrize("way", WAYS)
def test_sums_of_products(way: ModuleType) -> None:
    @njit
    def multiply(rows, left, right, total, kept):
        way.begin(kept.ctypes.data)
        steps = (
            left.shape[2] * 2,
            left.shape[1] * left.shape[2] * 2,
            right.shape[2] * 4,
            right.shape[1] * right.shape[2] * 4,
        )
        left_step, left_part, right_step, right_part = steps
        addresses = left.ctypes.data, right.ctypes.data
        way.multiply(
            rows,
            PARTS,
            LENGTH,
            addresses[0],
            left_step,
            left_part,
            addresses[1],
            right_step,
            right_part,
            total.ctypes.data,
        )
        way.end(kept.ctypes.data)

    for rows in way.ROWS:
        left, right = whole(PARTS, rows, STRIDE, seed=rows), whole(PARTS, LENGTH, 32, seed=-rows)
        total = torch.full((rows + 1, 32), 7.0)
        multiply(
            rows,
            bits(left),
            bits(in_pairs(right)).reshape(PARTS, LENGTH // 2, 32, 2),
            total.numpy(),
            np.zeros(64, np.uint8),
        )
        assert torch.equal(total[:rows], torch.bmm(left[:, :, :LENGTH].float(), right.float()).sum(0))
        assert torch.equal(total[rows], torch.full((32,), 7.0))


@pytest.mark.parametrize("way", WAYS)
def test_products_added_to_a_total(way: ModuleType) -> None:
    """Of an even length that need not be a multiple of 32, if the left matrix is zero beyond it."""

    @njit
    def add(columns, length, left, right, total, kept):
        way.begin(kept.ctypes.data)
        addresses, steps = (left.ctypes.data, right.ctypes.data), (left.shape[1] * 2, right.shape[1] * 4)
        way.add_product(
            columns,
            1,
            length,
            addresses[0],
            steps[0],
            0,
            addresses[1],
            steps[1],
            0,
            total.ctypes.data,
            total.shape[1] * 4,
        )
        way.end(kept.ctypes.data)

    length = 50
    for columns in range(way.COLUMNS, 33, way.COLUMNS):
        left, right, total = whole(32, STRIDE, seed=1), whole(1, LENGTH, 32, seed=2), whole(32, 48, seed=3).float()
        left[:, length:] = 0
        expected = total.clone()
        expected[:, :columns] += left[:, :length].float() @ right[0, :length, :columns].float()
        add(columns, length, bits(left), bits(in_pairs(right))[0], total.numpy(), np.zeros(64, np.uint8))
        assert torch.equal(total, expected)


@pytest.mark.parametrize("way", ["dots", "tiles"])
def test_numba_may_be_told_to_compile_for_another_processor(way: str) -> None:
    program = f"from sfactory.kernels.convolution import {way}; assert not {way}.at_hand()"
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"NUMBA_CPU_NAME": "generic"})
