"""How arrays share one block of memory: one behind the other, each at a multiple of 64 bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

ALIGNMENT = 64


def packed(arrays: Iterable[tuple[tuple[int, ...], np.dtype]]) -> tuple[list[tuple[int, int]], int]:
    """Begin and end in bytes of each array, given by shape and dtype, and the size of their block."""
    places, size = [], 0
    for shape, dtype in arrays:
        end = size + math.prod(map(int, shape)) * np.dtype(dtype).itemsize
        places.append((size, end))
        size = -(-end // ALIGNMENT) * ALIGNMENT
    return places, size
