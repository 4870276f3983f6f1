"""A run in a Jupyter notebook: a table and a curve of returns below the cell, drawn anew with each report."""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from typing import Any

from sfactory.telemetry.sparkline import Point

WIDTH, HEIGHT, MARGIN = 560, 180, 36
"""Size of the curve in pixels, and of the space for its labels."""
MOST_POINTS = 500
"""Points of the curve."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class NotebookView:
    """An output of the current cell that is drawn anew.

    Args:
        title: Name of the run.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._handle: Any = None

    def show(self, head: str, rows: Sequence[tuple[str, str]], points: Sequence[Point]) -> None:
        """Draw.

        Args:
            head: What is said above all else.
            rows: Labels and values of the table.
            points: Returns by env steps.
        """
        from IPython.display import HTML, display

        page = HTML(_page(self._title, head, rows, points))
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


def _page(title: str, head: str, rows: Sequence[tuple[str, str]], points: Sequence[Point]) -> str:
    half = (len(rows) + 1) // 2
    cell = '<td style="text-align:left;opacity:.7">{}</td><td style="text-align:right">{}</td>'
    empty = ("", "")
    pairs = [(rows[i], rows[half + i] if half + i < len(rows) else empty) for i in range(half)]
    body = "".join(f"<tr>{''.join(cell.format(*map(html.escape, entry)) for entry in pair)}</tr>" for pair in pairs)
    return (
        f"<div><b>{html.escape(title)}</b> {html.escape(head)}"
        f'<table style="width:{WIDTH}px">{body}</table>{_curve(points)}</div>'
    )


def _curve(points: Sequence[Point]) -> str:
    """Returns against env steps, as SVG; empty before there are two points."""
    if len(points) < 2:
        return ""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    left, right = min(steps), max(steps)
    tall, wide = (high - low) or 1.0, (right - left) or 1.0

    def place(step: float, value: float) -> str:
        x = MARGIN + (step - left) / wide * (WIDTH - 2 * MARGIN)
        return f"{x:.1f},{HEIGHT - MARGIN / 2 - (value - low) / tall * (HEIGHT - MARGIN):.1f}"

    line = " ".join(place(*point) for point in points)
    label = '<text x="{}" y="{}" text-anchor="{}" fill="currentColor" font-size="11">{}</text>'
    labels = (
        label.format(MARGIN - 4, MARGIN / 2 + 4, "end", f"{high:.4g}"),
        label.format(MARGIN - 4, HEIGHT - MARGIN / 2 + 4, "end", f"{low:.4g}"),
        label.format(WIDTH - MARGIN, HEIGHT - 2, "end", f"return against env steps, up to {right:,.0f}"),
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="return against env steps">'
        f'<polyline points="{line}" fill="none" stroke="#2a7ab0" stroke-width="1.5"/>{"".join(labels)}</svg>'
    )
