"""The small curve of returns."""

from __future__ import annotations

import math

import pytest

from sfactory.telemetry.sparkline import KEPT, History, sparkline


@pytest.mark.parametrize(
    ("values", "curve"),
    [([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"), ([5, 5], "▅▅"), ([-3, math.nan, 9], "▁█"), ([1], ""), ([], "")],
)
def test_the_lowest_and_the_highest_value_have_the_lowest_and_the_highest_block(values, curve) -> None:
    assert sparkline(values) == curve


def test_a_long_history_keeps_its_shape_in_bounded_memory() -> None:
    history = History()
    for i in range(10 * KEPT):
        history.add(64 * i, float(i))
    history.add(1, math.nan)
    history.add(1, math.inf)
    means = history.means(50)
    assert len(means) == 50 and means == sorted(means)
    assert means[0] < 0.05 * 10 * KEPT and means[-1] > 0.9 * 10 * KEPT
    assert len(history.means(10**9)) < KEPT
    assert all(steps == 64 * value for steps, value in history.points(50))


def test_a_run_that_falls_back_has_no_values_of_what_it_lost() -> None:
    history = History()
    for steps, value in [(10, 1.0), (20, 2.0), (30, 3.0), (20, 4.0), (25, 5.0)]:
        history.add(steps, value)
    assert history.points(9) == [(10, 1.0), (20, 2.0), (20, 4.0), (25, 5.0)]
