"""Line charts as SVG for a run's page. matplotlib takes longer to import than a run may take to end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 28, 34
"""Margins around the lines, in pixels."""
POINTS = 400
"""Most points of a line; more are means of neighbours."""
COLOURS = ("#2f6fb3", "#d9822b", "#3a9d5d", "#b34a4a", "#7a5bb0")
_PREFIXES = {9: "G", 6: "M", 3: "k", 0: ""}

Series = tuple[np.ndarray, np.ndarray]
"""Horizontal and vertical values, float64 ``[n]`` each, finite."""


@dataclass(frozen=True, eq=False)
class Chart:
    """What a chart shows.

    Attributes:
        lines: Lines by their labels.
        band: Lower and upper end of an area behind the lines.
        x_label: What the horizontal axis counts.
    """

    title: str
    lines: Mapping[str, Series]
    band: tuple[Series, Series] | None = None
    x_label: str = "env steps"

    def svg(self) -> str:
        """The chart as an SVG element; empty without any point."""
        lines = {label: _thinned(series) for label, series in self.lines.items() if len(series[0])}
        if not lines:
            return ""
        band = [_thinned(edge) for edge in self.band or () if len(edge[0])]
        everything = [*lines.values(), *band]
        axes = _Axes(
            _range(np.concatenate([x for x, _ in everything])), _range(np.concatenate([y for _, y in everything]))
        )
        parts = [f'<text class="title" x="{LEFT}" y="16">{escape(self.title)}</text>', *axes.grid()]
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(self.x_label)}</text>')
        if len(band) == 2:
            (x, low), (_, high) = band
            outline = axes.points(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]]))
            parts.append(f'<polygon points="{outline}" fill="{COLOURS[0]}" opacity="0.15"/>')
        for number, (label, (x, y)) in enumerate(lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            last = f"<title>{escape(label)}: {short(y[-1])}</title>"
            parts.append(f'<polyline points="{axes.points(x, y)}" stroke="{colour}">{last}</polyline>')
            if len(x) == 1:
                parts.append(f'<circle cx="{axes.across(x)[0]:.1f}" cy="{axes.up(y)[0]:.1f}" r="3" fill="{colour}"/>')
        if len(lines) > 1:
            parts.append(_legend(list(lines)))
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
        return head + "".join(parts) + "</svg>"


class _Axes:
    """Places values in the picture.

    Args:
        across, up: Least and greatest value of either axis.
    """

    def __init__(self, across: tuple[float, float], up: tuple[float, float]) -> None:
        self._x, self._y = across, up

    def across(self, x: np.ndarray) -> np.ndarray:
        low, high = self._x
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def up(self, y: np.ndarray) -> np.ndarray:
        low, high = self._y
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def points(self, x: np.ndarray, y: np.ndarray) -> str:
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(self.across(x), self.up(y), strict=True))

    def grid(self) -> list[str]:
        """Lines and numbers at round values."""
        parts = []
        for y in _ticks(*self._y):
            height = self.up(np.array(y))
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{short(y)}</text>')
        for x in _ticks(*self._x):
            place = self.across(np.array(x))
            parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{short(x)}</text>')
        return parts


def _legend(labels: list[str]) -> str:
    parts, right = [], WIDTH - RIGHT
    for number, label in reversed(list(enumerate(labels))):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<text x="{right}" y="16" text-anchor="end" style="fill:{colour}">{escape(label)}</text>')
        right -= 7 * len(label) + 12
    return "".join(parts)


def _thinned(series: Series) -> Series:
    x, y = series
    if len(x) <= POINTS:
        return x, y
    means = [np.array([part.mean() for part in np.array_split(values, POINTS)]) for values in (x, y)]
    return means[0], means[1]


def _range(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    room = 0.5 * (abs(low) or 1.0) if low == high else 0.0
    return low - room, high + room


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values between two others."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short(value: float) -> str:
    """A number in a few characters, such as 1.5M."""
    power = next((p for p in _PREFIXES if abs(value) >= 10**p), 0)
    return f"{value / 10**power:.4g}{_PREFIXES[power]}" if abs(value) < 1e12 else f"{value:.3g}"
