"""A small curve of returns in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
KEPT = 4096
"""Values from which every other one is dropped."""


class History:
    """Values over a whole run, thinned out as they become many."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._every = self._seen = 1

    def add(self, value: float) -> None:
        """Add a value; NaN is left out."""
        if math.isnan(value):
            return
        if self._seen % self._every == 0:
            self._values.append(value)
        self._seen += 1
        if len(self._values) >= KEPT:
            self._values, self._every = self._values[::2], 2 * self._every

    def means(self, most: int) -> list[float]:
        """The values, at most so many: if there are more, means of neighbours."""
        count = len(self._values)
        if count <= most:
            return list(self._values)
        cuts = [i * count // most for i in range(most + 1)]
        return [sum(self._values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def sparkline(values: Sequence[float]) -> str:
    """One block for each value, from the lowest to the highest; empty with less than two values that are finite."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    if low == high:
        return BLOCKS[len(BLOCKS) // 2] * len(known)
    return "".join(BLOCKS[min(int((value - low) / (high - low) * len(BLOCKS)), len(BLOCKS) - 1)] for value in known)
