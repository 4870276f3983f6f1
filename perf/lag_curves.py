"""Scores of the curves that ``perf.lag`` keeps: of each task, variant and lag, one curve a seed."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from itertools import product
from pathlib import Path

DATA = Path(__file__).parent / "data" / "lag"
LAGS = (0, 1, 2, 4, 8)
LAST_PART = 0.25
"""Share of the env steps at the end of a curve over which returns are averaged."""

Scores = dict[tuple[str, str, int], list[float]]


def score(curve: Path) -> float:
    """Mean training return over the last part of a curve's env steps."""
    with curve.open() as file:
        points = [(int(row["env_steps"]), float(row["episode_return_mean"])) for row in csv.DictReader(file)]
    begin = (1 - LAST_PART) * points[-1][0]
    return statistics.fmean(value for steps, value in points if steps >= begin and value == value)


def scores(data: Path, tasks: Iterable[str], variants: Iterable[str]) -> Scores:
    """The scores of all seeds, by task, variant and lag, of those that have any."""
    found: Scores = {}
    for task, variant, lag in product(tasks, variants, LAGS):
        if curves := sorted(data.glob(f"{task}.{variant}.{lag}.*.csv")):
            found[task, variant, lag] = [score(curve) for curve in curves]
    return found
