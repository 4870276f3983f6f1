"""perf/lag.py: every variant trains."""

from __future__ import annotations

import csv

import pytest

from perf import lag
from sfactory import objective
from sfactory.runtime import training


@pytest.fixture(autouse=True)
def _nothing_stays_changed(monkeypatch):
    """A cell changes what its process trains with, and has a process of its own."""
    monkeypatch.setattr(lag.LateLearner, "lag", 0)
    monkeypatch.setattr(training, "Learner", training.Learner)
    monkeypatch.setattr(objective, "weighted_advantages", objective.weighted_advantages)


@pytest.mark.parametrize("variant", lag.VARIANTS)
def test_a_variant_trains_on_late_batches(variant, tmp_path):
    path = tmp_path / "curve.csv"
    lag.run(lag.Task("CartPole-v1", 3000), variant, 1, 1, path)
    with path.open() as file:
        assert int(list(csv.DictReader(file))[-1]["env_steps"]) >= 3000
