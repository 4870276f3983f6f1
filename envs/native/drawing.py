"""Pictures made of thick lines, for rendering without a graphics library."""

from __future__ import annotations

import numpy as np

Point = tuple[float, float]


def canvas(height: int, width: int) -> np.ndarray:
    """A white RGB picture, uint8 ``[height, width, 3]``."""
    return np.full((height, width, 3), 255, np.uint8)


def draw_segment(image: np.ndarray, start: Point, end: Point, radius: float, colour: tuple[int, int, int]) -> None:
    """Colour every pixel within `radius` pixels of the segment between two points (row, column)."""
    rows, columns = np.ogrid[: image.shape[0], : image.shape[1]]
    along = np.subtract(end, start)
    length = max(float(along @ along), 1e-9)
    share = np.clip(((rows - start[0]) * along[0] + (columns - start[1]) * along[1]) / length, 0, 1)
    distance = (rows - start[0] - share * along[0]) ** 2 + (columns - start[1] - share * along[1]) ** 2
    image[distance <= radius**2] = colour
