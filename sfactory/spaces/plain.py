"""Stand-ins for Gymnasium's spaces in a process that only plays a saved policy, where Gymnasium is not installed.

They have the attributes that :mod:`sfactory.spaces` reads, and none of the methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class Space:
    """Base of all spaces; by itself, one that only has a shape and a dtype."""

    def __init__(self, shape: Sequence[int] | None = None, dtype: Any = None) -> None:
        self.shape = None if shape is None else tuple(shape)
        self.dtype = None if dtype is None else np.dtype(dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"


class Box(Space):
    """Arrays of numbers between two bounds."""

    def __init__(self, low: np.ndarray, high: np.ndarray, dtype: Any = np.float32) -> None:
        super().__init__(low.shape, dtype)
        self.low, self.high = low, high
        self.bounded_below, self.bounded_above = self.low > -np.inf, self.high < np.inf


class Discrete(Space):
    """The integers `start` to `start + n - 1`."""

    def __init__(self, n: int, start: int = 0, dtype: Any = np.int64) -> None:
        super().__init__((), dtype)
        self.n, self.start = n, start


class MultiDiscrete(Space):
    """Arrays of such integers, of `nvec` values each."""

    def __init__(self, nvec: Any, dtype: Any = np.int64, start: Any = None) -> None:
        self.nvec = np.array(nvec, dtype)
        super().__init__(self.nvec.shape, dtype)
        self.start = np.zeros(self.nvec.shape, dtype) if start is None else np.array(start, dtype)


class MultiBinary(Space):
    """Arrays of bits."""

    def __init__(self, n: int | Sequence[int]) -> None:
        super().__init__((n,) if isinstance(n, int) else n, np.int8)
        self.n = n


class Dict(Space):
    """Named spaces."""

    def __init__(self, spaces: Iterable[tuple[str, Space]]) -> None:
        super().__init__()
        self.spaces = dict(spaces)


class Tuple(Space):
    """Several spaces in order."""

    def __init__(self, spaces: Iterable[Space]) -> None:
        super().__init__()
        self.spaces = tuple(spaces)


class Text(Space):
    """Strings, from which nothing is learned."""

    def __init__(self, max_length: int) -> None:
        super().__init__((), np.str_)
