"""Charts that a browser can draw, whatever the numbers are."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from sfactory.runs.charts import HEIGHT, POINTS, WIDTH, Chart, short


def line(*values: float) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(values), dtype=float) * 1000, np.array(values)


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0), (5.0, 5.0), (7.0,), (0.0,), (-1e9, 1e9), (1e-9, 2e-9)])
def test_lines_lie_within_the_picture(values: tuple[float, ...]) -> None:
    drawn = ElementTree.fromstring(Chart("a <title>", {"one": line(*values)}).svg())
    (points,) = (element.get("points", "").split() for element in drawn.iter("polyline"))
    places = np.array([[float(number) for number in point.split(",")] for point in points])
    assert len(points) == len(values)
    assert (places >= 0).all() and (places <= (WIDTH, HEIGHT)).all()
    assert drawn.findtext("text") == "a <title>"


def test_a_long_line_is_thinned_and_a_band_is_one_area() -> None:
    values = line(*np.sin(np.arange(5000) / 500))
    svg = Chart("t", {"a": values, "b": line(1.0)}, (values, values)).svg()
    drawn = ElementTree.fromstring(svg)
    assert len(next(iter(drawn.iter("polyline"))).get("points", "").split()) == POINTS
    assert len(list(drawn.iter("polygon"))) == 1 and len(list(drawn.iter("circle"))) == 1
    assert len(svg) < 50_000


def test_without_points_there_is_no_chart() -> None:
    assert Chart("t", {"a": (np.empty(0), np.empty(0))}).svg() == ""


@pytest.mark.parametrize(("value", "text"), [(1_500_000, "1.5M"), (0, "0"), (-20_000, "-20k"), (0.0003, "0.0003")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
