"""perf/lag.py: every variant trains, and only whole curves are kept."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from perf import lag
from sfactory import objective
from sfactory.runtime import training
from sfactory.runtime.runner import train


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


def test_a_cell_that_is_interrupted_has_no_curve(monkeypatch, tmp_path):
    """As by the SIGTERM that each gets when the whole command is ended; it would never be run again."""
    monkeypatch.setattr(lag, "train", lambda config, _: train(config, [lambda report: False]))
    with pytest.raises(SystemExit):
        lag.run(lag.Task("CartPole-v1", 100_000), "mended", 0, 1, tmp_path / "curve.csv")
    assert not list(tmp_path.iterdir())


def test_cells_that_fail_are_told(monkeypatch, tmp_path, capsys):
    real = subprocess.Popen
    monkeypatch.setattr(
        lag.subprocess, "Popen", lambda command: real([sys.executable, "-c", f"raise SystemExit({command[-1]} % 2)"])
    )
    cells = ["--tasks", "acrobot", "--lags", "0", "--seeds", "2", "3", "4"]
    monkeypatch.setattr(sys, "argv", ["lag", "--data", str(tmp_path), *cells])
    monkeypatch.setattr(lag, "exit_at_signals", lambda: None)
    assert lag.main() == 1
    assert capsys.readouterr().err == "failed: acrobot mended 0 3\n"
