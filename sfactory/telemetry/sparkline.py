"""The returns of a run so far, and a small curve of them in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
KEPT = 4096
"""Points from which every other one is dropped."""
Point = tuple[float, float]
"""Env steps and a value."""


class History:
    """Values over a whole run, thinned out as they become many."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._every = self._seen = 1

    def add(self, env_steps: float, value: float) -> None:
        """Add a value, in place of those of more env steps, which a run that falls back to a checkpoint has lost. One
        that is not finite is left out."""
        if not math.isfinite(value):
            return
        while self._points and self._points[-1][0] > env_steps:
            self._points.pop()
        if self._seen % self._every == 0:
            self._points.append((env_steps, value))
        self._seen += 1
        if len(self._points) >= KEPT:
            self._points, self._every = self._points[::2], 2 * self._every

    def points(self, most: int) -> list[Point]:
        """The points, at most so many: if there are more, means of neighbours."""
        count = len(self._points)
        if count <= most:
            return list(self._points)
        cuts = [i * count // most for i in range(most + 1)]
        return [_mean(self._points[a:b]) for a, b in itertools.pairwise(cuts)]

    def means(self, most: int) -> list[float]:
        """The values of :meth:`points`."""
        return [value for _, value in self.points(most)]


def _mean(points: Sequence[Point]) -> Point:
    steps, values = zip(*points, strict=True)
    return sum(steps) / len(points), sum(values) / len(points)


def sparkline(values: Sequence[float]) -> str:
    """One block for each value, from the lowest to the highest; empty with less than two values that are finite."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    if low == high:
        return BLOCKS[len(BLOCKS) // 2] * len(known)
    return "".join(BLOCKS[min(int((value - low) / (high - low) * len(BLOCKS)), len(BLOCKS) - 1)] for value in known)
